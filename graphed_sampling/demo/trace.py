"""`graphed-sampling trace`: some steps of a loop, as a trace for Perfetto and as a picture."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from graphed_sampling import (
    GraphedSampler,
    IncrementalDecoder,
    LagProbe,
    RequestTable,
    SamplingParams,
    StepLoop,
    Tracer,
)
from graphed_sampling.demo.random_model import SHAPES, RandomForward, RandomModel
from graphed_sampling.demo.run import OptionError, pick_backend, pick_device
from graphed_sampling.step.trace import LANES, Span

_PROMPT_TOKENS: Final = 16
_PICTURED_STEPS: Final = 12
_COLOURS: Final = {"step": "#3b75af", "enqueue": "#c44e52", "bookkeep": "#55a868", "lag": "#8c8c8c"}


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What the command line says. size: of the model, whose weights are random: "tiny", "135m",
    or "auto", which is 135m on a GPU. out: of the files, without their endings."""

    out: Path
    steps: int = 100
    requests: int = 16
    depth: int = 1
    size: str = "auto"
    device: str = "auto"
    backend: str = "auto"

    @property
    def files(self) -> tuple[Path, Path]:
        """Trace and picture. The name's own dots stay."""
        return (
            self.out.with_name(f"{self.out.name}.json"),
            self.out.with_name(f"{self.out.name}.png"),
        )


@dataclass(frozen=True)
class TraceSummary:
    """idle: the device's share of time between steps. lag: of the event loop, seconds."""

    steps: int
    tokens: int
    idle: float
    lag_p50: float
    lag_p99: float


def run_trace(options: TraceOptions) -> TraceSummary:
    """Run the steps and write `out`.json and `out`.png; OptionError as `run_demo`, and for files
    that cannot be written."""
    for file in options.files:
        _check_writable(file)
    device = pick_device(options.device)
    size = options.size
    if size == "auto":
        size = "135m" if device.type == "cuda" else "tiny"
    tracer = Tracer()
    capacity = _PROMPT_TOKENS + options.steps
    shape = SHAPES[size]
    model = RandomModel(shape, num_slots=options.requests, capacity=capacity, device=device)
    table = RequestTable(options.requests, shape.vocab_size, device=device, seed=0)
    backend = pick_backend(options.backend, device)
    sampler = GraphedSampler(table, logits_dtype=model.dtype, backend=backend)
    loop = StepLoop(
        table,
        sampler,
        RandomForward.of(model, sampler),
        depth=options.depth,
        max_length=capacity,
        max_unread=capacity,
        new_decoder=lambda: IncrementalDecoder(_letters),
        tracer=tracer,
    )
    probe = LagProbe(every=0.0005, tracer=tracer)
    asyncio.run(_serve(loop, probe, options))
    trace, picture = options.files
    write_perfetto(tracer.spans, trace)
    draw(_section(list(tracer.spans)), picture)
    totals = loop.totals
    busy = totals.gpu_seconds + totals.gpu_idle_seconds
    return TraceSummary(
        totals.steps,
        totals.tokens,
        totals.gpu_idle_seconds / busy if busy else 0.0,
        probe.quantile(0.5),
        probe.quantile(0.99),
    )


def _check_writable(file: Path) -> None:
    """Before the run. Only opening it tells."""
    is_new = not file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise OptionError(f"--out: {file} cannot be written: {error.strerror}") from error
    if is_new:
        file.unlink()


def _letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(97 + token_id % 26) for token_id in token_ids)


async def _serve(loop: StepLoop, probe: LagProbe, options: TraceOptions) -> None:
    async def one(number: int) -> None:
        prompt = [(7 * number + i) % loop.table.vocab_size for i in range(_PROMPT_TOKENS)]
        params = SamplingParams(seed=number, top_k=50, logprobs=2, max_tokens=options.steps)
        async for _ in loop.generate(prompt, params, stop="no such text"):
            pass

    async with loop:
        probe.start()
        await asyncio.gather(*(one(number) for number in range(options.requests)))
        probe.stop()


def write_perfetto(spans: Iterable[Span], path: Path) -> None:
    """Chrome's JSON of trace events, which ui.perfetto.dev opens. Microseconds."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(LANES)
    ]
    spans = list(spans)
    begin = min((span.start for span in spans), default=0.0)
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": 1,
                "tid": LANES.index(span.lane),
                "ts": 1e6 * (span.start - begin),
                "dur": 1e6 * (span.end - span.start),
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _section(spans: list[Span]) -> list[Span]:
    """Some steps from the middle: a picture of all would show none."""
    gpu = [span for span in spans if span.lane == "GPU"]
    first = max(len(gpu) // 2 - _PICTURED_STEPS // 2, 0)
    shown = gpu[first : first + _PICTURED_STEPS]
    if not shown:
        return []
    begin, end = shown[0].start, shown[-1].end
    return [span for span in spans if span.end > begin and span.start < end]


def draw(spans: Sequence[Span], path: Path) -> None:
    """The lanes over time, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    axes = figure.subplots()
    begin = min((span.start for span in spans if span.lane == "GPU"), default=0.0)
    end = max((span.end for span in spans if span.lane == "GPU"), default=0.0)
    for span in spans:
        kind = span.name.split()[0]
        place = len(LANES) - 1 - LANES.index(span.lane)
        late = kind == "lag" and span.end - span.start > 0.001
        axes.broken_barh(
            [(1000 * (span.start - begin), 1000 * (span.end - span.start))],
            (place - 0.35, 0.7),
            facecolors="#d62728" if late else _COLOURS[kind],
            edgecolors="white",
            linewidth=0.4,
        )
        if kind == "step":
            middle = 500 * (span.start + span.end - 2 * begin)
            number = span.name.split()[1]
            axes.text(middle, place, number, ha="center", va="center", color="white", fontsize=7)
    axes.set_yticks(range(len(LANES)), LANES[::-1])
    axes.set_xlim(0, 1000 * (end - begin))
    axes.set_xlabel("milliseconds")
    legend = [
        (_COLOURS["step"], "a step on the device"),
        (_COLOURS["enqueue"], "enqueue"),
        (_COLOURS["bookkeep"], "bookkeeping, in slices"),
        (_COLOURS["lag"], "a question to the event loop, until it answers"),
        ("#d62728", "above 1 ms"),
    ]
    axes.legend(
        handles=[Patch(color=colour, label=label) for colour, label in legend],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.16),
        ncols=len(legend),
        frameon=False,
        fontsize=8,
    )
    figure.savefig(path, dpi=110)

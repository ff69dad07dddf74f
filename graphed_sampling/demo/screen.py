"""What the demo shows: answers as they grow on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from graphed_sampling import SamplingParams
from graphed_sampling.demo.engine import Engine, Generation

PLAIN_WIDTH = 110  # of tables and lines where there is no terminal to ask
REFRESHES_PER_SECOND = 8
TOPS_SHOWN = 3  # steps whose best tokens are shown, of a request that asked for them


class Screen:
    """Answers in the making are a table at the foot of the terminal, finished ones scroll up.

    plain: finished answers only, without colour; so it is, too, where there is no terminal.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, console: Console, *, plain: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._console = console
        self._live: Live | None = None
        if console.is_terminal and not plain:
            self._live = Live(
                console=console, transient=True, refresh_per_second=REFRESHES_PER_SECOND
            )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show_running(self, engine: Engine) -> None:
        if self._live is not None:
            self._live.update(self._running_table(engine))

    def show_answer(self, generation: Generation) -> None:
        answer = self.decode(generation.token_ids)
        tops = self._top_logprobs(generation)
        title = f"{generation.request.title}: {short_params(generation.request.params)}"
        facts = f"{len(generation.token_ids)} tokens, {generation.finish_reason.name}"
        if self._live is None:
            prompt = f"> {generation.request.prompt}"
            lines = [f"[{title}]", prompt, answer, *tops, f"({facts})", ""]
            # Soft wrap: a line of output stays one line, whatever reads it.
            self._console.print(Text("\n".join(lines)), soft_wrap=True)
            return
        body = [Text(generation.request.prompt, style="bold"), Text(answer)]
        body += [Text(line, style="cyan") for line in tops]
        self._console.print(
            Panel(Group(*body), title=Text(title), title_align="left", subtitle=facts)
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text so far, without special tokens and without a last character's first bytes."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text.rstrip("\ufffd")

    def _running_table(self, engine: Engine) -> RenderableType:
        table = Table(expand=True, box=None, show_header=False, padding=(0, 1))
        table.add_column(width=15, no_wrap=True, style="bold")
        table.add_column(ratio=1, no_wrap=True)
        width = max(self._console.width - 20, 1)
        for generation in engine.running:
            text = self.decode(generation.token_ids).replace("\n", " ")
            table.add_row(generation.request.title, Text(text[-width:]))
        totals = engine.totals
        state = (
            f"step {totals.steps}, {totals.tokens} tokens; "
            f"{len(engine.running)} answers in the making, {engine.num_waiting} waiting for a slot"
        )
        return Group(table, Text(state, style="dim"))

    def _top_logprobs(self, generation: Generation) -> list[str]:
        return [
            f"token {step}: "
            + "  ".join(
                f"{self.decode([token])!r} {math.exp(logprob):.1%}" for token, logprob in best
            )
            for step, best in enumerate(generation.top_logprobs[:TOPS_SHOWN], start=1)
        ]


def new_console(*, plain: bool) -> Console:
    console = Console(no_color=True if plain else None, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


@contextmanager
def stage(text: str, console: Console, *, plain: bool) -> Iterator[None]:
    """Say what is being waited for: on a terminal beside a clock, while it lasts."""
    if plain or not console.is_terminal:
        console.print(f"{text} ...", soft_wrap=True)
        yield
        return
    columns = (SpinnerColumn(), "{task.description} ...", TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


def print_summary(console: Console, generations: Sequence[Generation]) -> None:
    table = Table("request", "parameters", title="All answers", title_justify="left")
    for name in ("tokens", "finish", "mean logprob", "tokens/s"):
        table.add_column(name, justify="right")
    for g in generations:
        count = len(g.token_ids)
        table.add_row(
            g.request.title,
            short_params(g.request.params),
            str(count),
            g.finish_reason.name,
            f"{sum(g.logprobs) / count:.2f}",
            f"{count / g.seconds:.1f}",
        )
    console.print(table)


def print_totals(console: Console, engine: Engine, count: int, seconds: float) -> None:
    totals = engine.totals
    steps = max(totals.steps, 1)
    console.print(
        f"{count} requests, {totals.steps} steps, {totals.tokens} tokens in {seconds:.1f} s: "
        f"{totals.tokens / seconds:.1f} tokens/s\n"
        f"a step: {1000 * totals.gpu_seconds / steps:.2f} ms of model and sampler, "
        f"{1000 * totals.gpu_idle_seconds / steps:.2f} ms idle after it "
        f"(backend {engine.sampler.backend} on {engine.sampler.device})",
        soft_wrap=True,
    )


def short_params(params: SamplingParams) -> str:
    """What is on, but for the length; of collections the number of entries."""
    parts = ["greedy"] if params.is_greedy else [f"temperature {params.temperature:g}"]
    shown = params.features() - {"max_tokens"} | {"seed"}
    for f in fields(params):
        value = getattr(params, f.name)
        if f.name not in shown or value is None or (f.name == "logprobs" and value == 0):
            continue
        name = f.name.removesuffix("_token_ids").removesuffix("_ids").replace("_", " ")
        if isinstance(value, bool):
            parts.append(name)
        elif isinstance(value, float):
            parts.append(f"{name} {value:g}")
        elif isinstance(value, int):
            parts.append(f"{name} {value if value < 10**6 else f'...{value % 10**4:04}'}")
        elif isinstance(value, str):
            parts.append(f"{name} {value}")
        else:
            parts.append(f"{name} x{len(value)}")
    return ", ".join(parts)

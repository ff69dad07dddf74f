"""`graphed-sampling trace`: its files, and the model with random weights that it runs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

for package in ("transformers", "rich", "typer"):
    pytest.importorskip(package, reason=f"{package}, of the demo extra, is not installed")

from test_cli import run  # noqa: E402

from graphed_sampling import (  # noqa: E402
    GraphedSampler,
    RequestTable,
    SamplingParams,
    StepBatch,
    StepLoop,
)
from graphed_sampling.demo import trace  # noqa: E402
from graphed_sampling.demo.random_model import TINY, RandomForward, RandomModel  # noqa: E402
from graphed_sampling.demo.run import OptionError  # noqa: E402
from graphed_sampling.demo.trace import TraceOptions, run_trace, write_perfetto  # noqa: E402
from graphed_sampling.step.trace import LANES, LagProbe, Span  # noqa: E402

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)


def test_the_command_writes_a_trace_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the trace extra, is not installed")
    out = tmp_path / "some.v1"
    options = ["--steps", "6", "--requests", "3", "--size", "tiny", "--backend", "torch"]
    status, text = run("trace", "--out", str(out), "--device", "cpu", *options)
    assert status == 0 and "18 tokens; the device idle" in text, text
    assert (tmp_path / "some.v1.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "some.v1.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tuple(names[tid] for tid in range(3)) == LANES
    slices = [(names[e["tid"]], e["name"]) for e in events if e["ph"] == "X"]
    for step in range(6):
        assert ("GPU", f"step {step}") in slices
        assert ("CPU phase", f"bookkeep {step}") in slices
    assert ("event loop", "lag") in slices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "huge"], "--size huge: one of auto, tiny, 135m"),
        (["--out", "/nowhere/trace"], "there is no folder /nowhere"),
        (["--device", "abacus"], "device 'abacus' is not known"),
        (["--steps", "0"], "Invalid value for '--steps'"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the trace extra, is not installed")
    status, text = run("trace", *arguments)
    assert status == 2 and message in text


def test_files_that_cannot_be_written_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_device: str) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr(trace, "pick_device", never)
    (tmp_path / "x.png").mkdir()  # a folder that is not ours would do, too, but not for root
    with pytest.raises(OptionError, match=r"x\.png cannot be written: Is a directory"):
        run_trace(TraceOptions(out=tmp_path / "x"))
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


def test_perfetto_gets_microseconds_from_the_first_span_on(tmp_path: Path) -> None:
    spans = [Span("CPU phase", "enqueue 0", 5.0, 5.25), Span("GPU", "step 0", 4.5, 6.0)]
    write_perfetto(spans, tmp_path / "x.json")
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events[3:]] == [
        ("enqueue 0", 1, 0.5e6, 0.25e6),
        ("step 0", 0, 0.0, 1.5e6),
    ]


def test_a_probe_sees_a_blocked_loop() -> None:
    probe = LagProbe(every=0.001)
    assert probe.quantile(0.5) == 0.0
    slept = [0.0]

    async def main() -> None:
        probe.start()
        while len(probe.lags) < 5:
            await asyncio.sleep(0.001)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while loop.time() - begun < 0.1:
            pass
        slept[0] = loop.time() - begun
        seen = len(probe.lags)
        while len(probe.lags) == seen:
            await asyncio.sleep(0.001)
        probe.stop()

    asyncio.run(main())
    assert probe.quantile(1.0) > 0.05
    assert probe.quantile(0.0) <= probe.quantile(0.5) <= probe.quantile(1.0)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_random_model_does_not_depend_on_batch_or_chunks(device: str) -> None:
    """Its greedy tokens in a batch, in chunks and overlapped are those of one request alone.

    In fp32, since products of other shapes round otherwise, and bf16 knows ties.
    """
    place = torch.device(device)
    params = SamplingParams(temperature=0.0, max_tokens=12)

    def answers(
        num_slots: int, depth: int, chunk: int, prompts: list[list[int]]
    ) -> list[list[int]]:
        model = RandomModel(
            TINY, num_slots=num_slots, capacity=40, device=place, dtype=torch.float32
        )
        table = RequestTable(num_slots, TINY.vocab_size, device=place)
        sampler = GraphedSampler(table, logits_dtype=model.dtype, backend="auto")
        forward = RandomForward.of(model, sampler)

        def checked(batch: StepBatch) -> torch.Tensor:
            assert batch.span <= 40
            return forward(batch)

        async def main() -> list[list[int]]:
            loop = StepLoop(
                table, sampler, checked, depth=depth, max_prefill_tokens=chunk, max_length=40
            )

            async def one(prompt: list[int]) -> list[int]:
                return [i async for d in loop.generate(prompt, params) for i in d.token_ids]

            async with loop:
                return list(await asyncio.gather(*map(one, prompts)))

        return asyncio.run(main())

    prompts = [[7 * i + j for j in range(3 + 5 * i)] for i in range(4)]
    alone = [answers(1, 0, 100, [prompt])[0] for prompt in prompts]
    assert len({tuple(tokens) for tokens in alone}) == 4
    assert answers(3, 1, 4, prompts) == alone
    assert answers(4, 2, 100, prompts) == alone

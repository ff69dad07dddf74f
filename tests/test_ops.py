"""The torch ops: schemas, fakes, compilation, and the stateless `sample`."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import graphed_sampling
from graphed_sampling import (
    RequestTable,
    Sampler,
    SamplingParams,
    backends,
    group_stats,
    ops,
    philox,
)
from graphed_sampling.positions import position_layout
from graphed_sampling.reference import sample_row

OPS = torch.ops.graphed_sampling
V = 50


def device_params() -> list[object]:
    marks = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]
    return ["cpu", pytest.param("cuda", marks=marks)]


@pytest.fixture(params=device_params())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def usable_backends(device: str) -> list[str]:
    return [n for n in backends.NAMES if not backends.module(n).unusable(torch.device(device))]


def sample_arguments(rows: int, device: str, **changes: object) -> dict[str, Tensor]:
    def column(values: object, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).expand(rows).contiguous().to(device)

    generator = torch.Generator().manual_seed(3)
    values: dict[str, object] = {
        "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7, "position": 3,
        **changes,
    }  # fmt: skip
    dtypes = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    arguments: dict[str, Tensor] = {
        "logits": (torch.randn(rows, V, generator=generator) * 2).to(device)
    }
    for name, value in values.items():
        arguments[name] = column(value, dtypes.get(name, torch.float32))
    return arguments


# `sample`.


def test_sample_equals_the_reference_row_by_row(device: str) -> None:
    rng = np.random.default_rng(0)
    rows = 64
    choices: dict[str, list[float]] = {
        "temperature": [0.0, 0.5, 1.0, 2.0],
        "top_k": [-1, 0, 1, 5, V, 1000],
        "top_p": [0.2, 0.9, 1.0],
        "min_p": [0.0, 0.1, 1.0],
        "seed": [-1, 0, 5, 2**62],
        "position": [0, 1, 2**40],
    }
    columns = {name: rng.choice(values, rows) for name, values in choices.items()}
    columns["seed"] = rng.choice(np.array(choices["seed"], dtype=object), rows).astype(np.int64)
    arguments = sample_arguments(rows, device, **columns)
    token_ids, logprobs = OPS.sample(**arguments)
    assert token_ids.dtype == torch.int64 and logprobs.dtype == torch.float32
    logits = arguments["logits"].cpu().numpy()
    for i in range(rows):
        expected = sample_row(
            logits[i],
            SamplingParams(
                temperature=float(columns["temperature"][i]),
                top_k=int(columns["top_k"][i]),
                top_p=float(columns["top_p"][i]),
                min_p=float(columns["min_p"][i]),
                seed=int(columns["seed"][i]),
                logprobs=0,
            ),
            position=int(columns["position"][i]),
        )
        assert token_ids[i] == expected.token_id
        assert logprobs[i].item() == pytest.approx(expected.logprob, abs=2e-6)


def test_sample_clamps_what_is_out_of_range(device: str) -> None:
    """Nothing can fail on the device: the nearest accepted value counts; NaN is greedy, or off."""
    pairs: list[tuple[str, float, float]] = [
        ("temperature", -3.0, 0.0),
        ("temperature", math.nan, 0.0),
        ("temperature", math.inf, torch.finfo(torch.float32).max),
        ("top_k", -7, -1),
        ("top_k", 2**31 - 1, 0),
        ("top_p", 0.0, 1e-30),
        ("top_p", -1.0, 1e-30),
        ("top_p", 1.5, 1.0),
        ("top_p", math.nan, 1.0),
        ("min_p", -0.5, 0.0),
        ("min_p", 2.0, 1.0),
        ("min_p", math.nan, 0.0),
    ]
    seeds = torch.arange(40)
    for name, outside, inside in pairs:
        drawn = OPS.sample(**sample_arguments(40, device, seed=seeds, **{name: outside}))
        expected = OPS.sample(**sample_arguments(40, device, seed=seeds, **{name: inside}))
        assert torch.equal(drawn[0], expected[0]), (name, outside)


def test_sample_never_draws_the_padded_vocabulary(device: str) -> None:
    arguments = sample_arguments(300, device, top_k=0, top_p=1.0, seed=torch.arange(300))
    arguments["logits"][:, 40:] = 50.0
    token_ids, logprobs = OPS.sample(**arguments, vocab_size=40)
    assert int(token_ids.max()) < 40
    expected = arguments["logits"][:, :40].double().log_softmax(1).gather(1, token_ids[:, None])
    assert torch.allclose(logprobs.double(), expected[:, 0], atol=2e-6, rtol=0)


def test_sample_s_logprobs_do_not_pretend_to_have_a_gradient(device: str) -> None:
    arguments = sample_arguments(3, device)
    arguments["logits"].requires_grad_()
    token_ids, logprobs = OPS.sample(**arguments)
    assert not token_ids.requires_grad
    assert not logprobs.requires_grad


def test_sample_of_no_rows(device: str) -> None:
    token_ids, logprobs = OPS.sample(**sample_arguments(0, device))
    assert token_ids.shape == logprobs.shape == (0,)


Change = Callable[[Tensor], Tensor]
WRONG: list[tuple[str, str, Change]] = [
    ("logits have shape", "logits", lambda t: t[0]),
    ("logits have dtype", "logits", lambda t: t.double()),
    ("last dimension must be contiguous", "logits", lambda t: t.t().contiguous().t()),
    (r"temperature is torch\.float64", "temperature", lambda t: t.double()),
    (r"temperature is torch\.float32 \[2\]", "temperature", lambda t: t[:2]),
    (r"top_k is torch\.int64", "top_k", lambda t: t.long()),
    (r"top_p is torch\.float16", "top_p", lambda t: t.half()),
    (r"min_p is torch\.float32 \[3, 1\]", "min_p", lambda t: t[:, None]),
    (r"seed is torch\.int32", "seed", lambda t: t.int()),
    (r"position is torch\.float32", "position", lambda t: t.float()),
]


@pytest.mark.parametrize(("match", "name", "change"), WRONG)
def test_sample_names_the_wrong_argument(match: str, name: str, change: Change) -> None:
    arguments = sample_arguments(3, "cpu")
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=match):
        OPS.sample(**arguments)


@pytest.mark.parametrize("vocab_size", [V + 1, 0, -2])
def test_sample_names_the_wrong_vocab_size(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size = {vocab_size} is not accepted"):
        OPS.sample(**sample_arguments(3, "cpu"), vocab_size=vocab_size)


# `sample_step`.


class Step:
    """A table and the arguments of its step."""

    def __init__(self, device: str, backend: str) -> None:
        self.table = RequestTable(4, V, device=device, eos_token_ids=(2,), max_logprobs=3, seed=7)
        self.takes_words = "words" not in backends.module(backend).REFUSES
        seeds = range(3) if self.takes_words else [None] * 3
        slots = [self.table.admit(SamplingParams(seed=s, logprobs=2)) for s in seeds]
        self.table.upload()
        self.slots = torch.tensor(slots, dtype=torch.int32, device=device)
        self.output = graphed_sampling.new_output(self.table, 3)
        self.scratch = graphed_sampling.new_scratch(self.table, backend, 3)
        self.backend = backend

    def arguments(self, logits: Tensor) -> tuple[object, ...]:
        table = self.table
        return (
            logits, self.slots, table.params, table.state, table.tables, self.output.record,
            self.scratch, table.layout.to_ints(), self.backend,
        )  # fmt: skip


def test_sample_step_names_the_wrong_argument() -> None:
    step = Step("cpu", "torch")
    good = list(step.arguments(torch.zeros(3, V)))
    for match, index, wrong in (
        ("logits have shape", 0, torch.zeros(3, V - 1)),
        (r"slots is torch\.int64", 1, step.slots.long()),
        ("params is", 2, step.table.params[:-1]),
        ("state is", 3, step.table.state.long()),
        ("tables is", 4, step.table.tables[1:]),
        ("output is", 5, step.output.record[:2]),
        (r"scratch is torch\.float32", 6, torch.zeros(1)),
        ("scratch is", 6, torch.zeros(4, dtype=torch.int32)[::2]),
        ("layout = ", 7, [1, 2]),
        ("layout = ", 7, [*step.table.layout.to_ints()[:-1], 5]),
        ("backend = 'cake' is not known", 8, "cake"),
    ):
        arguments = [*good]
        arguments[index] = wrong
        with pytest.raises(ValueError, match=match):
            OPS.sample_step(*arguments)
    for match, kwargs in (
        ("grammar_bitmask is", {"grammar_bitmask": torch.zeros(3, 1, dtype=torch.int32)}),
        ("words is", {"words": torch.zeros(2, dtype=torch.int64)}),
        ("given is", {"given": torch.zeros(3, dtype=torch.int32)}),
    ):
        with pytest.raises(ValueError, match=match):
            OPS.sample_step(*good, **kwargs)
    assert step.table.positions.tolist() == [0, 0, 0, 0]


def test_tensors_on_meta_among_others_are_refused() -> None:
    """They lead to the op's fake, which would do nothing."""
    step = Step("cpu", "torch")
    with pytest.raises(ValueError, match="tensors are on cpu and meta"):
        OPS.sample_step(*step.arguments(torch.zeros(3, V, device="meta")))
    seeds = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="position is on cpu"):
        OPS.philox_words(seeds.to("meta"), seeds)


def test_scratch_must_be_one_aligned_piece(device: str) -> None:
    """Kernels write to it by address."""
    backend = next((b for b in usable_backends(device) if b == "triton"), None)
    if backend is None:
        pytest.skip("triton is the one backend that takes scratch")
    step = Step(device, backend)
    arguments = [*step.arguments(torch.zeros(3, V, device=device))]
    size = step.scratch.numel()
    spare = torch.zeros(2 * size + 1, dtype=torch.int32, device=device)
    for wrong in (spare[: 2 * size : 2], spare[1 : size + 1], spare[:1].expand(size)):
        arguments[6] = wrong
        with pytest.raises(ValueError, match="scratch is"):
            OPS.sample_step(*arguments)
    assert not spare.any()


def test_opcheck_of_every_op(device: str) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        OPS.sample.default,
        tuple(sample_arguments(3, device).values()),
        test_utils=checks,
    )
    for backend in usable_backends(device):
        step = Step(device, backend)
        mask = torch.full((3, 2), -1, dtype=torch.int32, device=device)
        words = torch.zeros(3, dtype=torch.int64, device=device)
        optional = {"grammar_bitmask": mask} | ({"words": words} if step.takes_words else {})
        for kwargs in ({}, optional):
            torch.library.opcheck(
                OPS.sample_step.default,
                step.arguments(torch.randn(3, V, device=device)),
                kwargs,
                test_utils=checks,
            )
    if "cuda" in usable_backends(device):
        arguments = Step(device, "cuda").arguments(torch.randn(3, V, device=device))
        *tensors, layout, _ = arguments
        torch.library.opcheck(OPS.cuda_step.default, (*tensors, layout), test_utils=checks)
        stats = {"group_stats": group_stats(torch.randn(3, V, device=device), V)}
        torch.library.opcheck(OPS.cuda_step.default, (*tensors, layout), stats, test_utils=checks)
        torch.library.opcheck(OPS.sample_step.default, arguments, stats, test_utils=checks)
        ids = torch.zeros(3, dtype=torch.int64, device=device)
        record = graphed_sampling.new_prompt_output(3, device=device)
        torch.library.opcheck(
            OPS.cuda_score_rows.default,
            (
                torch.randn(3, V, device=device), ids, None, ids, ids[:0].view(3, 0), None, None,
                record, record[:0].view(-1), position_layout(V, 0, 0).to_ints(), True, False,
            ),
            test_utils=checks,
        )  # fmt: skip
    seeds = torch.arange(5, device=device)
    torch.library.opcheck(OPS.philox_words.default, (seeds, seeds + 3), test_utils=checks)
    table = RequestTable(2, V, device=device)
    # One segment: target 0, payload start 0; one word to word 1 of the parameters.
    packet = torch.tensor([0, 1, 1, 0, 9], dtype=torch.int32, device=device)
    arguments = (table.params, table.state, table.tables, packet, 1, 1)
    torch.library.opcheck(OPS.scatter_segments.default, arguments, test_utils=checks)


class Spy:
    """A backend's `sample_step` that notes where the tensors lie that the op writes to."""

    def __init__(self, plain: Callable[..., None]) -> None:
        self.plain = plain
        self.addresses: set[tuple[int, ...]] = set()

    def __call__(self, logits: Tensor, slots: Tensor, *tensors: Tensor, **kwargs: object) -> None:
        self.addresses.add(tuple(t.data_ptr() for t in tensors[:4]))
        self.plain(logits, slots, *tensors, **kwargs)


@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
def test_compiled_in_full_without_cloning_the_tables(
    device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by inductor, the op works on the table's own memory: nothing is copied and back.

    (aot_eager runs the functional form as it is, copies and all; its results are the same.)
    """
    for backend in usable_backends(device):
        torch.compiler.reset()
        step, twin = Step(device, backend), Step(device, backend)
        eager = Sampler(twin.table, backend)
        spy = Spy(backends.module(backend).sample_step)
        monkeypatch.setattr(backends.module(backend), "sample_step", spy)

        def model(hidden: Tensor, step: Step = step) -> Tensor:
            OPS.sample_step(*step.arguments(hidden * 2 + 1))
            return step.output.record[:, 0] + 0

        compiled = torch.compile(model, fullgraph=True, backend=mode)
        for i in range(3):
            hidden = torch.randn(3, V, generator=torch.Generator().manual_seed(i)).to(device)
            expected = eager(hidden * 2 + 1, twin.slots).token_ids.clone()
            spy.addresses.clear()
            assert torch.equal(compiled(hidden).long(), expected)
            table = step.table
            written = (table.params, table.state, table.tables, step.output.record)
            if mode == "inductor":
                assert spy.addresses == {tuple(t.data_ptr() for t in written)}
        assert torch.equal(step.table.state[:-1], twin.table.state[:-1])


def test_sample_compiles_in_full(device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda **kwargs: OPS.sample(**kwargs)[0] + 1, fullgraph=True, backend="aot_eager"
    )
    arguments = sample_arguments(5, device, seed=torch.arange(5))
    assert torch.equal(compiled(**arguments), OPS.sample(**arguments)[0] + 1)


# `philox_words`.


def test_philox_words_equal_the_definition(device: str) -> None:
    rng = np.random.default_rng(1)
    edges = np.array([0, 1, -1, 2**31, 2**32, -(2**63), 2**63 - 1], np.int64)
    seeds = np.concatenate([edges, rng.integers(-(2**63), 2**63, 400)])
    positions = np.concatenate([edges[::-1], rng.integers(0, 2**40, 400)])
    # A column of a matrix, as the records are read.
    matrix = torch.from_numpy(np.stack([seeds, positions], 1)).to(device)
    for stream in (0, 3, 0xFFFFFFFF):
        words = OPS.philox_words(matrix[:, 0], matrix[:, 1], stream).tolist()
        expected = [
            philox.word(int(s), int(p), stream) for s, p in zip(seeds, positions, strict=True)
        ]
        assert [w % 2**64 for w in words] == expected
        plain = philox.words(matrix[:, 0].clone(), matrix[:, 1].clone(), stream)
        assert plain.tolist() == words


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("seed", {"seed": torch.zeros(2, 3).long()}),
        ("seed", {"seed": torch.zeros(3, dtype=torch.int32)}),
        ("position", {"position": torch.zeros(1).long()}),
        ("position", {"position": torch.zeros(3)}),
        ("position", {"position": torch.zeros(3, 1).long()}),
    ],
)
def test_philox_words_name_the_wrong_argument(name: str, wrong: dict[str, Tensor]) -> None:
    good = torch.zeros(3, dtype=torch.int64)
    arguments = {"seed": good, "position": good, **wrong}
    with pytest.raises(ValueError, match=name):
        ops._philox_words(**arguments)
    # In C++ every error is a RuntimeError.
    with pytest.raises((ValueError, RuntimeError), match=name):
        OPS.philox_words(**arguments)

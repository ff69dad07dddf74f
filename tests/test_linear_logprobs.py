"""Logprobs from hidden states and the LM head's weight, a chunk of logits at a time."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from helpers import BackendDevice
from test_prompt_logprobs import scorers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from graphed_sampling import (
    PromptLogprobs,
    SamplingParams,
    UnsupportedFeatureError,
    linear_logprobs,
    lm_head,
    prompt_logprobs,
)

OPS = torch.ops.graphed_sampling
N, H, V = 11, 6, 70
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PROCESSED = SamplingParams(temperature=0.7, top_k=20, logprobs_mode="processed")
WARM = SamplingParams(temperature=1.4, logprobs_mode="processed")


def inputs(dtype: torch.dtype = torch.float32, width: int = V) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, H, generator=generator).to(dtype)
    weight = torch.randn(width, H, generator=generator).to(dtype)
    return hidden, weight, torch.randint(V, (N,), generator=generator)


@pytest.mark.parametrize("chunk_rows", [0, 1, 4, N, 100])
@pytest.mark.parametrize("params", [None, PROCESSED, WARM], ids=["raw", "filtered", "warm"])
def test_it_is_prompt_logprobs_of_the_product(
    params: SamplingParams | None, chunk_rows: int
) -> None:
    """Matrix products of other shapes round otherwise, so not bit for bit."""
    hidden, weight, tokens = inputs()
    given = torch.randint(V, (N, 2), generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {
        "params": params, "given_ids": given, "top_n": 3, "rank": True, "entropy": True
    }  # fmt: skip
    got = linear_logprobs(hidden, weight, tokens, chunk_rows=chunk_rows, **options)
    expected = prompt_logprobs(hidden @ weight.t(), tokens, **options)
    assert torch.equal(got.top_token_ids, expected.top_token_ids)
    for name in ("ranks", "num_kept", "flags"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for name in ("logprobs", "given_logprobs", "top_logprobs", "entropies", "normalisers"):
        a, b = getattr(got, name), getattr(expected, name)
        assert torch.allclose(a, b, atol=2e-5, equal_nan=True), name


def test_the_rows_asked_for_alone() -> None:
    hidden, weight, tokens = inputs()
    hidden[3] = math.nan
    whole = linear_logprobs(hidden, weight, tokens, rank=True)
    mask = torch.arange(N) % 2 == 0
    masked = linear_logprobs(hidden, weight, tokens, rows=mask, rank=True, chunk_rows=4)
    assert masked.logprobs[~mask].isnan().all() and not masked.ranks[~mask].any()
    assert torch.allclose(masked.logprobs[mask], whole.logprobs[mask], atol=2e-5)
    rows = torch.tensor([5, 2, -1, 5, 7])
    listed = linear_logprobs(
        hidden, weight, tokens[rows], rows=rows, num_rows=torch.tensor([4], dtype=torch.int32),
        chunk_rows=2,
    )  # fmt: skip
    assert listed.logprobs.isnan().tolist() == [False, False, True, False, True]
    assert torch.allclose(listed.logprobs[[0, 1, 3]], whole.logprobs[[5, 2, 5]], atol=2e-5)


@pytest.mark.parametrize("leaves", ["hw", "w"])
@pytest.mark.parametrize("saved_rows", [0, 3])
@pytest.mark.parametrize("way", ["mask", "list", "slack"])
def test_what_nobody_asked_for_may_hold_anything(way: str, saved_rows: int, leaves: str) -> None:
    hidden, weight, tokens = inputs()
    asked = torch.tensor([2, 5, 7])
    exact = [hidden[asked].requires_grad_(), weight.clone().requires_grad_()]
    linear_logprobs(*exact, tokens[asked]).logprobs.sum().backward()
    unasked = torch.ones(N, dtype=torch.bool).index_fill(0, asked, False)
    hidden[unasked] = math.nan
    rows = torch.tensor([2, 5, 7, -1, -1]) if way == "list" else torch.tensor([2, 5, 7, 0, 1])
    options: dict[str, Any] = {"rows": rows, "saved_rows": saved_rows, "chunk_rows": 2}
    if way == "mask":
        options["rows"] = ~unasked
    elif way == "slack":
        options["num_rows"] = torch.tensor([3], dtype=torch.int32)
    hidden.requires_grad_("h" in leaves)
    weight.requires_grad_()
    got = linear_logprobs(hidden, weight, tokens if way == "mask" else tokens[rows], **options)
    got.logprobs.nansum().backward()
    assert torch.allclose(weight.grad, exact[1].grad, atol=1e-5)
    if "h" in leaves:
        assert torch.allclose(hidden.grad[asked], exact[0].grad, atol=1e-5)
        assert not hidden.grad[unasked].any()


def test_a_padded_vocabulary_counts_for_nothing() -> None:
    hidden, weight, tokens = inputs(width=V + 3)
    weight[V:] = 100.0
    weight.requires_grad_()
    got = linear_logprobs(hidden, weight, tokens, vocab_size=V)
    expected = prompt_logprobs(hidden @ weight[:V].t(), tokens)
    assert torch.allclose(got.logprobs, expected.logprobs, atol=2e-5)
    got.logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad[V:].any() and weight.grad[:V].any()


class Noted(TorchDispatchMode):
    """Looks at every operation's result, those of operations inside this package's ops too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "graphed_sampling":
            with self:
                keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                result = func.redispatch(keys, *args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        self.note(func, args, result)
        return result

    def note(self, func: Any, args: Any, result: Any) -> None:
        raise NotImplementedError


class LargestTensor(Noted):
    """Notes the largest tensor that any operation gives."""

    numel = 0

    def note(self, func: Any, args: Any, result: Any) -> None:
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())


@pytest.mark.parametrize("repeats", [3, 8])  # fewer positions than tokens, and more
def test_never_all_logits_forward_or_backward(repeats: int) -> None:
    hidden, weight, tokens = inputs()
    hidden, weight = hidden.repeat(repeats, 1).requires_grad_(), weight.requires_grad_()
    tokens = tokens.repeat(repeats)
    with LargestTensor() as largest:
        got = linear_logprobs(hidden, weight, tokens, entropy=True, chunk_rows=4, backend="torch")
        (got.logprobs.sum() + got.entropies.sum()).backward()
    assert 4 * V <= largest.numel < hidden.shape[0] * V / 4
    with LargestTensor() as largest:
        linear_logprobs(hidden, weight, tokens, saved_rows=30, backend="torch")
    assert largest.numel >= 30 * V


class Products(Noted):
    """Counts rows of logits that are worked out (of a part of a row its part), and notes how many
    are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.saved = 0.0, -1

    def note(self, func: Any, args: Any, result: Any) -> None:
        if func is torch.ops.aten.mm.out and args[0].shape[1] == H:
            self.rows += result.numel() / V
        if func is OPS.linear_logprobs.default:
            self.saved = result[-1].shape[0]


SELECTIONS = {
    "all": None,
    "mask": torch.arange(N) % 3 != 1,
    "list": torch.tensor([5, 2, -1, 5, 0, 10, 1, 3, 7, 9, 5]),
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("chunk_rows", [0, 4])
@pytest.mark.parametrize("saved_rows", [1, 3, 4, 6, N, 100])
@pytest.mark.parametrize("params", [None, PROCESSED, WARM], ids=["raw", "filtered", "warm"])
def test_saved_logits_change_no_gradient_and_are_not_worked_out_again(
    params: SamplingParams | None, saved_rows: int, chunk_rows: int, selection: str
) -> None:
    tokens, rows = inputs()[2], SELECTIONS[selection]
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(3))
    told = []
    for saved in (0, saved_rows):
        leaves = [t.requires_grad_() for t in inputs(width=V + 2)[:2]]
        with Products() as forward:
            got = linear_logprobs(
                *leaves, tokens, rows=rows, params=params, entropy=True, vocab_size=V,
                chunk_rows=chunk_rows, saved_rows=saved,
            )  # fmt: skip
        assert forward.rows == N and forward.saved == min(saved, N)
        loss = (got.logprobs * upstream[0]).nansum() + (got.entropies * upstream[1]).nansum()
        # Twice: what was saved is as it was.
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        with Products() as backward:
            second = torch.autograd.grad(loss, leaves)
        assert backward.rows == pytest.approx(N - forward.saved)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        told.append([got.logprobs, got.entropies, *first])
    for a, b in zip(*told, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("leaves", "all_of_them", "masked", "listed"),
    # 280 bytes a row, in what 3608 bytes leave beside gradients (264, 1680), the sum in fp32 (264,
    # or 96 of a chunk), a copy of those hidden states where not all are asked for, and of a list
    # their gradients in fp32 (264).
    [("hw", 5, 4, 3), ("h", 11, 11, 10), ("w", 6, 5, 5)],
)  # fmt: skip
def test_logits_are_saved_where_a_gradient_may_come(
    leaves: str, all_of_them: int, masked: int, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, tokens = inputs()
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 4 * 4 * V)
    monkeypatch.setattr(lm_head, "MEMORY_BYTES", 2 * 1120 + 3608)
    rows = torch.arange(N)

    def saved(**options: Any) -> int:
        with Products() as products:
            linear_logprobs(hidden, weight, tokens, **options)
        return products.saved

    assert saved() == 0 and saved(saved_rows=3) == 3
    hidden.requires_grad_("h" in leaves)
    weight.requires_grad_("w" in leaves)
    assert saved() == all_of_them == saved(params=WARM)
    assert saved(rows=rows >= 0) == masked and saved(rows=rows) == listed
    assert saved(params=PROCESSED) == 0  # which takes other sums, and to sort
    assert saved(saved_rows=0) == 0 == saved(chunk_rows=2)
    assert saved(chunk_rows=2, saved_rows=20) == N
    with torch.no_grad():
        assert saved() == 0
    monkeypatch.setattr(lm_head, "MEMORY_BYTES", 0)
    assert saved() == 0


@pytest.mark.parametrize(
    ("count", "of_hidden", "of_weight", "filtered", "by_columns"),
    [
        (V, True, True, False, True),
        (V + 1, True, True, False, False),
        (V + 1, False, True, False, True),
        (1, True, False, False, False),
        (1, True, True, True, False),
    ],
)
def test_the_smaller_gradient_is_summed(
    count: int, of_hidden: bool, of_weight: bool, filtered: bool, by_columns: bool
) -> None:
    """Tiles of all positions sum those of hidden states, tiles of all tokens the weight's."""
    tiles = lm_head._Tiles.of(
        count, torch.zeros(V, H), 2, of_hidden=of_hidden, of_weight=of_weight, filtered=filtered
    )
    assert tiles.by_columns == by_columns
    assert (tiles.rows == count) if by_columns else (tiles.columns == V)
    assert tiles.rows * tiles.columns <= 2 * V


def exact_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    upstream: Tensor,
    temperature: float,
    top_k: int = 0,
) -> Tensor:
    z = hidden @ weight.t() / temperature
    if top_k > 0:
        z = z.masked_fill(z < z.topk(top_k, 1).values[:, -1:], -math.inf)
    log_p = z.log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p.where(p > 0, 0.0)).sum(1)
    return log_p.gather(1, tokens[:, None])[:, 0] @ upstream[0] + entropy @ upstream[1]


@pytest.mark.parametrize("vocab", [V, N - 2])  # more tokens than positions, and fewer
@pytest.mark.parametrize("chunk_rows", [0, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("params", [None, WARM, PROCESSED], ids=["raw", "warm", "filtered"])
def test_gradients_equal_torch_s_in_float64(
    params: SamplingParams | None, dtype: torch.dtype, chunk_rows: int, vocab: int
) -> None:
    hidden, weight, tokens = inputs(dtype, vocab)
    temperature, top_k = 1.0, 0
    if params is not None:
        temperature, top_k = params.temperature, min(params.top_k, vocab)
    tokens = tokens % vocab
    if top_k > 0:
        if dtype != torch.float32:
            pytest.skip("rounded logits have other survivors")
        tokens = (hidden.double() @ weight.double().t()).topk(3, 1).indices[:, 2]
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(3))
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    exact_loss(exact[0], exact[1], tokens, upstream.double(), temperature, top_k).backward()
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    got = linear_logprobs(
        ours[0], ours[1], tokens, params=params, entropy=True, chunk_rows=chunk_rows
    )
    (got.logprobs @ upstream[0] + got.entropies @ upstream[1]).backward()
    # Logits are rounded to the dtype, of which a gradient of size 1 takes so much.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.015}[dtype]
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == dtype
        assert torch.allclose(a.grad.double(), b.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("pair", scorers())
@pytest.mark.parametrize("chunk_rows", [0, 4])
@pytest.mark.parametrize("saved_rows", [0, 5])
@pytest.mark.parametrize("vocab", [V, N - 2])
def test_every_backend_has_the_gradients(
    pair: BackendDevice, vocab: int, saved_rows: int, chunk_rows: int
) -> None:
    """Those of tiles by its own kernel, if it has one, or by torch operations."""
    hidden, weight, tokens = inputs(torch.float32, vocab)
    tokens = tokens % vocab
    upstream = torch.randn(2, N, generator=torch.Generator().manual_seed(3))
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    exact_loss(exact[0], exact[1], tokens, upstream.double(), 1.0).backward()
    ours = [t.to(pair.device, copy=True).requires_grad_() for t in (hidden, weight)]
    got = linear_logprobs(
        *ours, tokens.to(pair.device), entropy=True, backend=pair.backend,
        chunk_rows=chunk_rows, saved_rows=saved_rows,
    )  # fmt: skip
    upstream = upstream.to(pair.device)
    (got.logprobs @ upstream[0] + got.entropies @ upstream[1]).backward()
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad.cpu().double(), b.grad, atol=1e-4, rtol=1e-4)


def test_a_weight_of_many_positions_has_its_gradient_in_fp32() -> None:
    """More positions than tokens, so that it is a sum over chunks of them."""
    torch.manual_seed(0)
    count, vocab = 4096, 8
    hidden = (1 + torch.randn(count, 4) / 8).bfloat16()
    weight = torch.randn(vocab, 4).bfloat16().requires_grad_()
    tokens = torch.zeros(count, dtype=torch.int64)
    wide = weight.detach().double().requires_grad_()
    (hidden.double() @ wide.t()).log_softmax(1)[:, 0].sum().backward()
    linear_logprobs(hidden, weight, tokens, chunk_rows=8).logprobs.sum().backward()
    hidden.requires_grad_()
    both = linear_logprobs(hidden, weight, tokens, chunk_rows=8).logprobs.sum()
    for gradient in (weight.grad, torch.autograd.grad(both, weight)[0]):
        worst = (gradient.double() - wide.grad).abs().max() / wide.grad.abs().max()
        assert worst < 0.005  # a gradient's own rounding, and that of the logits


def test_gradients_of_rows_in_a_list_add_up() -> None:
    hidden, weight, tokens = inputs()
    rows = torch.tensor([5, 2, -1, 5])
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    chosen = rows[[0, 1, 3]]
    exact_loss(
        exact[0][chosen], exact[1], tokens[[0, 1, 3]], torch.ones(2, 3).double(), 1.0
    ).backward()
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    got = linear_logprobs(ours[0], ours[1], tokens[:4], rows=rows, entropy=True, chunk_rows=3)
    (got.logprobs.nansum() + got.entropies.nansum()).backward()
    for a, b in zip(ours, exact, strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad.double(), b.grad, atol=1e-5)


def test_only_the_gradient_that_is_wanted() -> None:
    hidden, weight, tokens = inputs()
    for index in (0, 1):
        tensors = [hidden.clone(), weight.clone()]
        tensors[index].requires_grad_()
        linear_logprobs(*tensors, tokens).logprobs.sum().backward()
        assert tensors[index].grad is not None and tensors[1 - index].grad is None


def test_gradcheck() -> None:
    hidden, weight, tokens = inputs()
    hidden, weight = hidden[:3].requires_grad_(), weight[:5].requires_grad_()

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        got = linear_logprobs(
            hidden, weight, tokens[:3] % 5, params=WARM, top_n=1, entropy=True, chunk_rows=2
        )
        return got.logprobs, got.top_logprobs, got.entropies

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that fp32 is coarse: eps is chosen for it
        assert torch.autograd.gradcheck(scores, (hidden, weight), eps=1e-2, atol=2e-3, rtol=1e-2)


def test_opcheck_and_compiled_in_full() -> None:
    hidden, weight, tokens = inputs()
    arguments = (hidden.requires_grad_(), weight.requires_grad_(), tokens)
    torch.library.opcheck(
        OPS.linear_logprobs.default, arguments, {"top_n": 2, "entropy": True, "chunk_rows": 3}
    )
    torch.compiler.reset()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return OPS.linear_logprobs(hidden * 2, weight, tokens)[0].sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(hidden, weight), loss(hidden, weight))


def test_compiled_once_for_any_number_of_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the number of rows that are saved depends on it."""
    monkeypatch.setattr(lm_head, "MEMORY_BYTES", 10**6)
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", 2**16)

    def loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, tokens, backend="torch").logprobs.sum()

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    weight = torch.randn(30, 16, requires_grad=True)
    for count in range(100, 3100, 300):
        hidden = torch.randn(count, 16, requires_grad=True)
        tokens = torch.randint(30, (count,))
        gradients = [
            torch.autograd.grad(f(hidden, weight, tokens), (hidden, weight))
            for f in (compiled, loss)
        ]
        for a, b in zip(*gradients, strict=True):
            assert torch.allclose(a, b, atol=1e-4)
    assert counter.frame_count <= 3


def test_no_second_derivative() -> None:
    hidden, weight, tokens = inputs()
    weight.requires_grad_()
    got = linear_logprobs(hidden, weight, tokens)
    (gradient,) = torch.autograd.grad(got.logprobs.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("match", "change"),
    [
        ("hidden is torch.float64", {"hidden": torch.zeros(N, H).double()}),
        (r"hidden is torch.float32 \[6\]", {"hidden": torch.zeros(H)}),
        (r"weight is torch.float32 \[70, 5\]", {"weight": torch.zeros(V, H - 1)}),
        ("weight is torch.bfloat16", {"weight": torch.zeros(V, H).bfloat16()}),
        ("next_token_ids is", {"next_token_ids": torch.zeros(N - 1).long()}),
        ("next_token_ids holds 70", {"next_token_ids": torch.full((N,), V)}),
        ("vocab_size = 71 is not accepted", {"vocab_size": V + 1}),
        ("chunk_rows = -1 is not accepted", {"chunk_rows": -1}),
        ("chunk_rows = 1.5 is not accepted", {"chunk_rows": 1.5}),
        ("chunk_rows = True is not accepted", {"chunk_rows": True}),
        ("saved_rows = -2 is not accepted", {"saved_rows": -2}),
        ("saved_rows = 0.0 is not accepted", {"saved_rows": 0.0}),
        (f"saved_rows = {2**63} is not accepted", {"saved_rows": 2**63}),
        (f"chunk_rows = {2**63} is not accepted", {"chunk_rows": 2**63}),
        (
            r"next_token_ids is torch.int64 \[\]",
            {"next_token_ids": torch.tensor(3), "hidden": torch.zeros(N, H, requires_grad=True)},
        ),
        (r"weight is torch.float32 \[\]", {"weight": torch.tensor(1.0, requires_grad=True)}),
        ("top_n = 1.0", {"top_n": 1.0}),
        ("backend = None is not known", {"backend": None}),
        ("weight is sparse or nested", {"weight": torch.zeros(V, H).to_sparse()}),
        ("top_n = -1", {"top_n": -1}),
    ],
)
def test_the_wrong_argument_is_named(match: str, change: dict[str, Any]) -> None:
    hidden, weight, tokens = inputs()
    arguments = {"hidden": hidden, "weight": weight, "next_token_ids": tokens, **change}
    with pytest.raises(ValueError, match=match):
        linear_logprobs(**arguments)


def test_params_that_need_another_filter_raise() -> None:
    hidden, weight, tokens = inputs()
    refused = SamplingParams(typical_p=0.9, logprobs_mode="processed")
    with pytest.raises(UnsupportedFeatureError, match="typical_p"):
        linear_logprobs(hidden, weight, tokens, params=refused)


def test_no_positions() -> None:
    hidden, weight, _ = inputs()
    none = torch.zeros(0).long()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    got = linear_logprobs(hidden, weight, none, top_n=2)
    assert got.logprobs.shape == (0,) and got.top_token_ids.shape == (0, 2)
    got.logprobs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_as_on_the_cpu(dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "cuda"):
        hidden, weight, tokens = (t.to(device) for t in inputs(dtype))
        tensors = hidden.requires_grad_(), weight.requires_grad_()
        got = linear_logprobs(*tensors, tokens, entropy=True, chunk_rows=4)
        (got.logprobs.sum() + got.entropies.sum()).backward()
        results.append([got.logprobs, got.entropies, *(t.grad for t in tensors)])
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.015}[dtype]
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a.double(), b.cpu().double(), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_positions_take_less_than_2_gb() -> None:
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GB of device memory")
    count, width, vocab = 32768, 2048, 151936
    hidden = torch.randn(count, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    tokens = torch.randint(vocab, (count,), device="cuda")

    def peaks(**options: int) -> tuple[int, int]:
        """Of the forward pass, and of both, gradients included."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        got = linear_logprobs(hidden, weight, tokens, **options)
        forward = torch.cuda.max_memory_allocated() - before
        gradients = torch.autograd.grad(got.logprobs.sum(), (hidden, weight))
        both = torch.cuda.max_memory_allocated() - before
        assert all(g.isfinite().all() for g in gradients)
        return forward, both

    kept = (hidden.numel() + weight.numel()) * 2
    for options in ({}, {"saved_rows": 0}):
        forward, both = peaks(**options)
        assert forward < 1e9 and both - kept < 2e9
        assert options or both < 2e9


def test_the_result_has_the_parts_of_prompt_logprobs() -> None:
    hidden, weight, tokens = inputs()
    got = linear_logprobs(hidden, weight, tokens)
    assert isinstance(got, PromptLogprobs)
    exact = (hidden.double() @ weight.double().t()).log_softmax(1)
    assert torch.allclose(got.logprobs.double(), exact.gather(1, tokens[:, None])[:, 0], atol=2e-5)


@pytest.mark.parametrize("chunk_rows", [0, 32, 1])
def test_a_hidden_state_of_many_positions_has_their_gradients_in_fp32(chunk_rows: int) -> None:
    torch.manual_seed(0)
    count = 2048
    hidden = torch.randn(1, 16).bfloat16().requires_grad_()
    weight = torch.randn(1000, 16).bfloat16()
    tokens = torch.randint(1000, (1,)).expand(count)
    wide = hidden.detach().double().requires_grad_()
    (torch.log_softmax(wide @ weight.double().t(), 1)[0, tokens[0]] * count).backward()
    rows = torch.zeros(count, dtype=torch.int64)
    scored = linear_logprobs(hidden, weight, tokens, rows=rows, chunk_rows=chunk_rows)
    scored.logprobs.sum().backward()
    worst = (hidden.grad.double() - wide.grad).abs().max() / wide.grad.abs().max()
    assert worst < 0.02  # the logits' own rounding, and that of their gradients


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 1, 1, 4, 2])], ids=["all", "list"])
def test_autocast_changes_nothing(rows: Tensor | None) -> None:
    hidden, weight, tokens = inputs()
    hidden, tokens = hidden[:5], tokens[:5]
    gradients = []
    for enabled in (False, True):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            linear_logprobs(*leaves, tokens, rows=rows).logprobs.sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    for plain, cast in zip(*gradients, strict=True):
        assert torch.equal(plain, cast)


def test_no_hidden_states() -> None:
    hidden, weight = torch.zeros(0, H, requires_grad=True), torch.zeros(V, H, requires_grad=True)
    none = torch.tensor([-1, -1])
    linear_logprobs(hidden, weight, none, rows=none).logprobs.nansum().backward()
    assert hidden.grad.shape == (0, H) and not weight.grad.any()

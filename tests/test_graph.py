"""`GraphedSampler`, and the step inside a graph of the user's own.

On a machine without a GPU the same objects run eagerly, and so do these tests; what only a GPU has
(capture, streams, pinned memory, waiting) carries the mark `gpu`.
"""

from __future__ import annotations

import gc
import importlib.util
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import BackendDevice

from graphed_sampling import (
    GraphedSampler,
    RequestTable,
    RowFlags,
    Sampler,
    SamplingParams,
    backends,
)

GPU = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")]
V = 1000
SPIN_CYCLES = 2_000_000_000  # about a second at 2 GHz


def _cases() -> list[object]:
    cases = []
    for name in backends.NAMES:
        for device in ("cpu", "cuda"):
            if device == "cuda" and not GPU:
                cases.append(pytest.param(name, device, marks=gpu, id=f"{name}-{device}"))
            elif not backends.module(name).unusable(torch.device(device)):
                marks = gpu if device == "cuda" else []
                cases.append(pytest.param(name, device, marks=marks, id=f"{name}-{device}"))
    return cases


everywhere = pytest.mark.parametrize(("backend", "device"), _cases())
on_gpu = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=gpu) for name in ("triton", "torch")]
)

MIXED = [
    SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1, logprobs=3, rank=True),
    SamplingParams(temperature=0.0, logprobs=2, logprobs_mode="processed"),
    SamplingParams(min_p=0.05, seed=3, logprobs=0),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1, seed=4),
    SamplingParams(logit_bias={3: 4.0, 5: -float("inf")}, seed=5, bad_words_ids=[[7], [1, 2]]),
    SamplingParams(allowed_token_ids=[1, 2, 3, 700], seed=6, logprob_token_ids=[1, 700]),
    SamplingParams(seed=7),
]


def make_table(device: str, requests: int = 8, **kwargs: object) -> RequestTable:
    return RequestTable(requests, V, device=device, eos_token_ids=(2,), seed=11, **kwargs)


def served(backend: str, params: SamplingParams) -> SamplingParams:
    """params without what the backend refuses."""
    return BackendDevice(backend, torch.device("cpu")).supported(params)


def takes_words(backend: str) -> bool:
    return BackendDevice(backend, torch.device("cpu")).takes_words


def admit_mixed(table: RequestTable, backend: str) -> torch.Tensor:
    params = [served(backend, p) for p in MIXED]
    slots = [table.admit(p, prompt_token_ids=[1, 2, 3 + i]) for i, p in enumerate(params)]
    return torch.tensor(slots, dtype=torch.int32)


def random_logits(step: int, rows: int, device: str, width: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(rows, width, generator=generator) * 3).to(device)


def used_tables(table: RequestTable) -> torch.Tensor:
    """All of a table's bitmaps and counts but the padding row's."""
    layout, rows = table.layout, table.layout.rows
    bitmaps = table.tables[: layout.counts].view(3, rows, layout.bitmap_words)
    counts = table.tables[layout.counts :].view(rows, layout.vocab_size)
    return torch.cat([bitmaps[:, :-1].flatten(), counts[:-1].flatten()])


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_replay_equals_eager(backend: str, device: str, dtype: torch.dtype) -> None:
    eager_table, graphed_table = make_table(device), make_table(device)
    slots = admit_mixed(eager_table, backend)
    admit_mixed(graphed_table, backend)
    eager = Sampler(eager_table, backend)
    graphed = GraphedSampler(graphed_table, (1, 2, 8), dtype, backend=backend)
    for step in range(BackendDevice(backend, torch.device(device)).rows(6, 6, 2)):
        logits = random_logits(step, len(MIXED), device).to(dtype)
        expected = eager(logits, slots).record.clone()
        assert torch.equal(graphed(logits, slots).record, expected)
    assert torch.equal(eager_table.state[:-1], graphed_table.state[:-1])
    assert torch.equal(used_tables(eager_table), used_tables(graphed_table))


@everywhere
def test_replays_draw_afresh_and_repeat_under_the_same_seed(backend: str, device: str) -> None:
    sequences = []
    steps = BackendDevice(backend, torch.device(device)).rows(200, 40, 20)
    for _ in range(2):
        table = make_table(device)
        slot = table.admit(served(backend, SamplingParams(seed=123)))
        sampler = GraphedSampler(table, (1,), backend=backend)
        sampler.logits_buffer(1).zero_()
        slots = torch.tensor([slot], dtype=torch.int32)
        tokens = [sampler(sampler.logits_buffer(1), slots).token_ids.clone() for _ in range(steps)]
        sequences.append(torch.cat(tokens).tolist())
    assert sequences[0] == sequences[1]
    # 200 draws from 1000 equally likely tokens: 181 distinct are expected, standard deviation 4.
    assert len(set(sequences[0])) > 0.75 * steps


@everywhere
def test_a_step_fits_its_bucket_and_pads_with_nothing(backend: str, device: str) -> None:
    table = make_table(device)
    slots = admit_mixed(table, backend)
    sampler = GraphedSampler(table, (2, 8), backend=backend)
    sampler.logits_buffer(8).fill_(float("nan"))
    table.upload()
    before = table.state.clone()
    logits = random_logits(0, 3, device)
    output = sampler(logits, slots[:3])
    assert output.token_ids.shape == (3,)
    assert (output.flags == 0).all()
    assert torch.equal(table.state[3:-1], before[3:-1])
    padded = sampler(random_logits(1, 5, device), torch.tensor([-1, 0, -1, 1, -1]).int())
    assert (padded.flags == RowFlags.PADDING).tolist() == [True, False, True, False, True]
    assert padded.token_ids[[0, 2, 4]].tolist() == [-1, -1, -1]
    empty = sampler(random_logits(1, 0, device), torch.zeros(0, dtype=torch.int32))
    assert empty.token_ids.shape == (0,)


@everywhere
def test_logits_written_into_the_buffer_equal_foreign_ones(backend: str, device: str) -> None:
    records = []
    for foreign in (False, True):
        table = make_table(device)
        slots = admit_mixed(table, backend)
        sampler = GraphedSampler(table, (4, 8), logits_width=V + 24, backend=backend)
        logits = random_logits(5, len(MIXED), device, V + 24)
        logits[:, V:] = 1e9  # the padded vocabulary would win
        if not foreign:
            buffer = sampler.logits_buffer(len(MIXED))
            assert buffer.shape == (len(MIXED), V + 24)
            buffer.copy_(logits)
            logits = buffer
        records.append(sampler(logits, slots).record.clone())
    assert torch.equal(*records)
    assert int(records[0].view(torch.int64)[:, 0].max()) < V


@everywhere
def test_optional_inputs_come_and_go_between_replays(backend: str, device: str) -> None:
    table = make_table(device)
    params = [served(backend, SamplingParams(seed=i)) for i in range(3)]
    slots = torch.tensor([table.admit(p) for p in params], dtype=torch.int32)
    sampler = GraphedSampler(table, (4,), backend=backend)
    only_nine = torch.zeros(3, sampler.table.layout.bitmap_words, dtype=torch.int32)
    only_nine[:, 0] = 1 << 9
    words = torch.tensor([0, -1, 0])  # the first and the last of the 2**64 words
    flat = torch.zeros(3, V, device=device)
    for on_device in (False, True):
        place = device if on_device else "cpu"
        mask_arg, words_arg = only_nine.to(place), words.to(place)
        assert sampler(flat, slots, grammar_bitmask=mask_arg).token_ids.tolist() == [9, 9, 9]
        if takes_words(backend):
            assert sampler(flat, slots, words=words_arg).token_ids.tolist() == [0, V - 1, 0]
        drawn = sampler(flat, slots).token_ids.tolist()
        assert drawn not in ([9, 9, 9], [0, V - 1, 0])
        if not takes_words(backend):
            continue
        both = sampler(flat, slots, grammar_bitmask=mask_arg, words=words_arg)
        assert both.token_ids.tolist() == [9, 9, 9]


@everywhere
def test_slots_on_the_device_equal_slots_on_the_host(backend: str, device: str) -> None:
    records = []
    for place in ("cpu", device):
        table = make_table(device)
        slots = admit_mixed(table, backend).to(place)
        sampler = GraphedSampler(table, (8,), backend=backend)
        records.append(sampler(random_logits(2, len(MIXED), device), slots).record.clone())
    assert torch.equal(*records)


@everywhere
def test_what_is_not_accepted_raises_before_anything_happens(backend: str, device: str) -> None:
    table = make_table(device)
    slots = admit_mixed(table, backend)
    sampler = GraphedSampler(table, (1, 4), torch.float32, backend=backend)
    two = slots[:2]
    good = random_logits(0, 2, device)
    table.upload()
    before = table.state.clone()

    def refuses(match: str, *args: object, **kwargs: object) -> None:
        with pytest.raises(ValueError, match=match):
            sampler(*args, **kwargs)  # type: ignore[arg-type]

    refuses("largest bucket, 4", random_logits(0, 5, device), slots[:5])
    refuses("dtype", good.half(), two)
    refuses("logits is sparse or nested", good.to_sparse(), two)
    nested = torch.nested.nested_tensor([*good], layout=torch.jagged)
    refuses("logits is sparse or nested", nested, two)
    refuses(">= 1000", good[:, :-1], two)
    refuses("columns", torch.zeros(2, V + 1, device=device), two)
    refuses("last dimension must be contiguous", torch.zeros(V, 2, device=device).t(), two)
    refuses(r"slots is torch.int64", good, two.long())
    refuses(r"slots is torch.int32 \[3\]", good, slots[:3])
    refuses("slots holds 8", good, torch.tensor([0, 8], dtype=torch.int32))
    refuses("slots holds -2", good, torch.tensor([0, -2], dtype=torch.int32))
    refuses("slots holds 7, which is not admitted", good, torch.tensor([0, 7], dtype=torch.int32))
    refuses("slots holds 1 more than once", good, torch.tensor([1, 1], dtype=torch.int32))
    refuses("grammar_bitmask", good, two, grammar_bitmask=torch.zeros(2, 31, dtype=torch.int32))
    refuses("grammar_bitmask", good, two, grammar_bitmask=torch.zeros(2, 32, dtype=torch.int64))
    refuses("words", good, two, words=torch.zeros(2, dtype=torch.int32))
    assert torch.equal(table.state, before)


def test_construction_names_what_it_does_not_accept() -> None:
    table = make_table("cpu")
    for match, kwargs in (
        ("table is NoneType", {"table": None}),
        ("backend = 'cake'", {"backend": "cake"}),
        ("backend = None", {"backend": None}),
        ("backend = 5", {"backend": 5}),
        ("row_buckets", {"row_buckets": ()}),
        ("row_buckets", {"row_buckets": (0, 1)}),
        ("row_buckets", {"row_buckets": (1.5,)}),
        ("logits_dtype", {"logits_dtype": torch.float64}),
        ("logits_width", {"logits_width": V - 1}),
    ):
        with pytest.raises(ValueError, match=match):
            GraphedSampler(**({"table": table} | kwargs))  # type: ignore[arg-type]


def test_default_buckets_reach_the_table_s_size() -> None:
    assert GraphedSampler(make_table("cpu", 12), backend="torch").row_buckets == (1, 2, 4, 8, 12)
    assert GraphedSampler(make_table("cpu", 8), backend="torch").row_buckets == (1, 2, 4, 8)
    assert GraphedSampler(make_table("cpu", 1), backend="torch").row_buckets == (1,)


def _load_example(name: str) -> ModuleType:
    path = Path(__file__).parent.parent / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@everywhere
def test_the_step_in_a_graph_of_the_user_s_own(backend: str, device: str) -> None:
    """The example's graph gives what the eager sampler gives, with admissions between replays."""
    example = _load_example("own_graph")
    torch.manual_seed(0)
    with torch.no_grad():
        model = example.ToyModel().to(device)
        tables = [RequestTable(4, example.VOCAB_SIZE, device=device, seed=1) for _ in range(2)]
        own = example.OwnGraph(model, tables[0], 4, backend)
        eager = Sampler(tables[1], backend)
        slots: list[int] = []
        for step in range(6):
            if step in (0, 2, 3):
                params = SamplingParams(seed=step, top_k=20, frequency_penalty=0.5)
                params = served(backend, params)
                slots.append(tables[0].admit(params, prompt_token_ids=[step + 1]))
                tables[1].admit(params, prompt_token_ids=[step + 1])
            tables[1].upload()
            named = torch.tensor(slots + [-1] * (4 - len(slots)), dtype=torch.int32)
            own.slots.copy_(named)
            inputs = tables[1].last_token_ids[named.long().clamp(min=0).to(device)].clamp(min=0)
            expected = eager(model(inputs), named).record.clone()
            own.replay()
            assert torch.equal(own.output.record, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_upload_inside_a_capture_is_refused() -> None:
    table = make_table("cuda")
    table.admit(SamplingParams())
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="before each replay"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        table.upload()
    table.upload()
    torch.cuda.synchronize()
    assert table.params[0, 0] != 0  # nothing was lost


@on_gpu
def test_memory_is_released_with_the_sampler(backend: str) -> None:
    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    table = RequestTable(64, 32000, device="cuda")
    GraphedSampler(table, (8,), backend=backend)  # what a first use leaves for good
    before = reserved()
    sampler = GraphedSampler(table, (1, 8, 64), backend=backend)
    report = sampler.capture_report
    assert [c.rows for c in report.buckets] == [1, 8, 64]
    assert report.bytes > 0 and report.seconds > 0
    assert reserved() > before
    del sampler
    assert reserved() == before


@on_gpu
def test_two_samplers_on_two_streams_do_not_disturb_each_other(backend: str) -> None:
    def tokens(concurrent: bool) -> list[torch.Tensor]:
        tables = [make_table("cuda") for _ in range(2)]
        slots = [admit_mixed(t, backend) for t in tables]
        samplers = [GraphedSampler(t, (8,), backend=backend) for t in tables]
        streams = [torch.cuda.Stream() for _ in range(2)]
        logits = [random_logits(i, len(MIXED), "cuda") for i in range(2)]
        drawn: list[list[torch.Tensor]] = [[], []]
        torch.cuda.synchronize()
        for _ in range(500):
            for i in range(2):
                with torch.cuda.stream(streams[i]):
                    output = samplers[i](logits[i], slots[i])
                    drawn[i].append(output.record.clone())
                if not concurrent:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
        return [torch.stack(d) for d in drawn]

    for together, apart in zip(tokens(True), tokens(False), strict=True):
        assert torch.equal(together, apart)


@on_gpu
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_a_step_never_synchronises(backend: str, graphed: bool) -> None:
    table = make_table("cuda")
    slots = admit_mixed(table, backend)
    sampler = GraphedSampler(table, (8,), backend=backend) if graphed else Sampler(table, backend)
    logits = random_logits(0, len(MIXED), "cuda")
    mask = torch.full((len(MIXED), table.layout.bitmap_words), -1, dtype=torch.int32)
    words = torch.zeros(len(MIXED), dtype=torch.int64)
    sampler(logits, slots, grammar_bitmask=mask, words=words)
    torch.cuda.synchronize()
    spun, done = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SPIN_CYCLES)
        spun.record()
        table.update(0, SamplingParams(top_k=5))
        table.release(1)
        table.admit(SamplingParams(seed=1), prompt_token_ids=[1] * 500)
        sampler(logits, slots, grammar_bitmask=mask, words=words)
        done.record()
        # Everything was enqueued while the spin kernel was still running. (One step, since the
        # driver makes the host wait when some thousand launches are in flight.)
        assert not spun.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert done.query()


@on_gpu
def test_updates_in_flight_each_reach_their_step(backend: str) -> None:
    """More updates behind a spinning GPU than the ring has entries: none overwrites another."""
    table = make_table("cuda")
    slot = table.admit(SamplingParams())
    sampler = GraphedSampler(table, (1,), backend=backend)
    slots = torch.tensor([slot], dtype=torch.int32)
    flat = torch.zeros(1, V, device="cuda")
    sampler(flat, slots)
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES // 4)
    tokens = []
    for step in range(12):
        table.update(slot, SamplingParams(allowed_token_ids=[step + 20]))
        tokens.append(sampler(flat, slots).token_ids.clone())
    assert torch.cat(tokens).tolist() == list(range(20, 32))
    assert table.staging_stats.waits > 0
    assert table.staging_stats.wait_seconds > 0


@on_gpu
def test_a_slot_readmitted_behind_a_step_in_flight(backend: str) -> None:
    table = make_table("cuda")
    old = table.admit(SamplingParams(allowed_token_ids=[30]), prompt_token_ids=[1, 2])
    sampler = GraphedSampler(table, (1,), backend=backend)
    slots = torch.tensor([old], dtype=torch.int32)
    flat = torch.zeros(1, V, device="cuda")
    torch.cuda._sleep(SPIN_CYCLES // 10)
    first = sampler(flat, slots).record.clone()
    table.release(old)
    new = table.admit(SamplingParams(allowed_token_ids=[31]), prompt_token_ids=[5] * 7)
    assert new == old
    second = sampler(flat, slots).record.clone()
    assert first.view(torch.int64)[0, 0] == 30
    assert second.view(torch.int64)[0, 0] == 31
    assert (first[0, 7].item(), second[0, 7].item()) == (1, 2)  # generations
    assert table.positions[new].item() == 8


@everywhere
def test_objects_made_in_inference_mode_work_outside_and_the_other_way_round(
    backend: str, device: str
) -> None:
    records = []
    for made_in, stepped_in in ((False, False), (True, False), (False, True)):
        with torch.inference_mode(made_in):
            table = make_table(device)
            sampler = GraphedSampler(table, (8,), backend=backend)
            slots = admit_mixed(table, backend)
        with torch.inference_mode(stepped_in):
            for step in range(2):
                output = sampler(random_logits(step, len(MIXED), device), slots)
                table.update(0, served(backend, SamplingParams(top_k=3, seed=9, min_p=0.1)))
        records.append(output.record.clone())
    assert torch.equal(records[0], records[1])
    assert torch.equal(records[0], records[2])


@everywhere
def test_a_default_device_of_the_user_s_changes_nothing(backend: str, device: str) -> None:
    """Everything names its device: under a default of "meta" nothing lands there."""
    records = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            table = make_table(device)
            sampler = GraphedSampler(table, (8,), backend=backend)
            with torch.device("cpu"):
                slots = admit_mixed(table, backend)
                logits = random_logits(0, len(MIXED), device)
            records.append(sampler(logits, slots).record.clone())
    assert torch.equal(*records)


@everywhere
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_of_the_user_s_changes_nothing(
    backend: str, device: str, dtype: torch.dtype
) -> None:
    """Engines set a default of bf16 while they make their model, and capture there too."""
    records = []
    logits = random_logits(0, len(MIXED), device)
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            table = make_table(device)
            sampler = GraphedSampler(table, (8,), torch.float32, backend=backend)
            slots = admit_mixed(table, backend)
            records.append(sampler(logits, slots).record.clone())
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(*records)


@everywhere
def test_autograd_keeps_nothing_of_the_logits(backend: str, device: str) -> None:
    """Without no_grad, a buffer that noted where its logits came from would hold every forward."""
    table = make_table(device)
    params = served(backend, SamplingParams(seed=1))
    slots = torch.tensor([table.admit(params)], dtype=torch.int32)
    head = torch.nn.Linear(8, V, bias=False, device=device)
    for sampler in (GraphedSampler(table, (2,), backend=backend), Sampler(table, backend)):
        output = sampler(head(torch.randn(1, 8, device=device)), slots)
        assert not output.logprobs.requires_grad
    graphed = GraphedSampler(table, (2,), backend=backend)
    for _ in range(2):
        graphed(head(torch.randn(1, 8, device=device)), slots)
        graphed.logits_buffer(1).copy_(head(torch.randn(1, 8, device=device)))
    buffer = graphed.logits_buffer(1)
    assert not buffer.requires_grad
    with torch.no_grad():
        torch.mm(torch.randn(1, 8, device=device), head.weight.T, out=buffer)
    graphed(buffer, slots)


@everywhere
def test_samplers_stay_out_of_compiled_code(backend: str, device: str) -> None:
    """A compiled function that calls a sampler leaves the call to Python, uploads and all."""
    table, twin = make_table(device), make_table(device)
    slots = admit_mixed(table, backend)
    admit_mixed(twin, backend)
    eager = Sampler(twin, backend)
    for make in (Sampler, GraphedSampler):
        torch.compiler.reset()
        sampler = make(table, backend=backend)
        compiled = torch.compile(
            lambda logits, call=sampler: call(logits * 1.0, slots).token_ids + 0,
            backend="aot_eager",
        )
        for step in range(3):
            logits = random_logits(step, len(MIXED), device)
            for each in (table, twin):  # so that there is something to upload
                params = SamplingParams(top_k=step + 2, seed=step, logprobs=step)
                each.update(0, served(backend, params))
            assert torch.equal(compiled(logits), eager(logits, slots).token_ids)
        with pytest.raises(RuntimeError, match="sample_step"):
            torch.compile(sampler, fullgraph=True, backend="aot_eager")(logits, slots)


@everywhere
def test_parts_of_the_buffer_are_refused_where_they_would_be_overwritten(
    backend: str, device: str
) -> None:
    table = make_table(device)
    slots = admit_mixed(table, backend)
    sampler = GraphedSampler(table, (8,), backend=backend)
    table.upload()
    before = table.state.clone()
    if device == "cuda":
        with pytest.raises(ValueError, match="a part of the sampler's own buffer"):
            sampler(sampler.logits_buffer(4)[1:3], slots[:2])
        assert torch.equal(table.state, before)
    with pytest.raises(ValueError, match="n = -1"):
        sampler.logits_buffer(-1)


@everywhere
def test_what_is_no_tensor_is_named(backend: str, device: str) -> None:
    table = make_table(device)
    slots = admit_mixed(table, backend)
    logits = random_logits(0, len(MIXED), device)
    for sampler in (Sampler(table, backend), GraphedSampler(table, (8,), backend=backend)):
        for match, arguments, kwargs in (
            ("logits is ndarray", (logits.cpu().numpy(), slots), {}),
            ("slots is list", (logits, slots.tolist()), {}),
            ("words", (logits, slots), {"words": [1] * len(MIXED)}),
            ("grammar_bitmask is ndarray", (logits, slots), {"grammar_bitmask": slots.numpy()}),
        ):
            with pytest.raises(ValueError, match=match):
                sampler(*arguments, **kwargs)


@on_gpu
def test_samplers_made_at_once_by_several_threads(backend: str) -> None:
    """One captures after the other: CUDA refuses a synchronisation during another's capture."""
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        table = make_table("cuda")
        slots = admit_mixed(table, backend)
        sampler = GraphedSampler(table, (8,), backend=backend)
        results[number] = sampler(random_logits(0, len(MIXED), "cuda"), slots).record.clone()
        # Not the device: another thread may be capturing on it.
        torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

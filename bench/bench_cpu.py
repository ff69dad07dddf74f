"""Time of one step of the `cpu` backend against torch.log_softmax of the same logits.

    python bench/bench_cpu.py [--rows 32] [--vocab 128256] [--threads N] [--rounds 40] [--only NAME]

Both run with the same number of threads in one process, in turns, and the least time of each
counts: what other processes took shows in the larger times only. log_softmax writes to memory that
it is given, which spares it the page faults of a fresh result, and takes a language model's logits
in all cases. Before it is timed, the tokens of every case, and how many are kept, are compared with
the `torch` backend's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import least_times
from rich.console import Console
from rich.table import Table

from graphed_sampling import backends
from graphed_sampling.backends import cpu
from graphed_sampling.layout import Output
from graphed_sampling.params import SamplingParams
from graphed_sampling.table import RequestTable
from graphed_sampling.testing import lm_like_logits

Step = Callable[[], None]
BAR = "top-k 50, top-p 0.95"


@dataclass(frozen=True)
class Case:
    """One class of requests, all rows alike."""

    name: str
    params: dict[str, Any]
    dtype: torch.dtype = torch.float32
    rows: str = "lm"  # a language model's logits; "equal" ones; "normal": of deviation 2
    prompt: int = 0
    bitmask: float = 1.0  # share of allowed tokens
    settings: dict[str, Any] = field(default_factory=dict)


FILTERED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "logprobs": 0}
CASES = [
    Case(BAR, FILTERED),
    Case("the same, bf16", FILTERED, dtype=torch.bfloat16),
    Case("the same, no logprob", FILTERED | {"logprobs": None}),
    Case("the same, 20 logprobs and rank", FILTERED | {"logprobs": 20, "rank": True}),
    Case("the same, processed logprobs", FILTERED | {"logprobs_mode": "processed"}),
    Case("the same, 5 % allowed", FILTERED, bitmask=0.05),
    Case(
        "the same, penalties, prompt of 4096",
        FILTERED | {"repetition_penalty": 1.1, "presence_penalty": 0.5},
        prompt=4096,
    ),
    Case("greedy", {"temperature": 0.0}),
    Case("greedy, logprob", {"temperature": 0.0, "logprobs": 0}),
    Case("temperature 0.8", {"temperature": 0.8}),
    Case("min-p 0.05", {"temperature": 0.8, "min_p": 0.05}),
    Case("top-p 0.95", {"temperature": 0.8, "top_p": 0.95}),
    Case("top-p 0.95, flat", {"top_p": 0.95}, rows="normal"),
    Case("top-p 0.95, all equal", {"top_p": 0.95}, rows="equal"),
    Case("top-k 50, all equal", {"top_k": 50}, rows="equal"),
    Case("top-k 5000", {"top_k": 5000}),
    Case("top-n-sigma 1", {"top_n_sigma": 1.0}),
    Case("typical-p 0.9", {"typical_p": 0.9}),
    Case("eta 0.002", {"eta_cutoff": 0.002}),
]


def make_step(case: Case, rows: int, vocab: int, backend: Any) -> tuple[Step, torch.Tensor]:
    """A step of all rows, which draws afresh at every call, and the record that it writes."""
    generator = torch.Generator().manual_seed(1)
    logits = {
        "lm": lambda: lm_like_logits(rows, vocab, generator, case.dtype),
        "equal": lambda: torch.ones(rows, vocab, dtype=case.dtype),
        "normal": lambda: (2 * torch.randn(rows, vocab, generator=generator)).to(case.dtype),
    }[case.rows]()
    table = RequestTable(rows, vocab, device="cpu")
    for i in range(rows):
        prompt = torch.randint(vocab, (case.prompt,), generator=generator).tolist()
        table.admit(SamplingParams(seed=i, **case.params), prompt)
    table.upload()
    bitmask = None
    if case.bitmask < 1:
        allowed = torch.rand(rows, table.layout.bitmap_words, 32, generator=generator)
        bits = (allowed < case.bitmask).long() << torch.arange(32)
        bitmask = bits.sum(-1).to(torch.int32)
    output = torch.empty(rows, table.layout.output_words, dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32)
    scratch = torch.empty(backend.scratch_words(table.layout, rows), dtype=torch.int32)
    backend.warm_up(table.layout, table.device, (torch.float32,))

    def step() -> None:
        backend.sample_step(
            logits,
            slots,
            table.params,
            table.state,
            table.tables,
            output,
            scratch,
            table.layout,
            grammar_bitmask=bitmask,
            words=None,
            given=None,
        )

    return step, output


def check(case: Case, vocab: int) -> None:
    """The step draws what the torch backend draws, for the same requests, and keeps as many."""
    records = []
    for backend in (cpu, backends.module("torch")):
        step, output = make_step(case, 4, vocab, backend)
        for _ in range(3):
            step()
        records.append(output[:, [Output.TOKEN_ID, Output.TOKEN_ID + 1, Output.NUM_KEPT]])
    assert torch.equal(*records), f"{case.name}: other tokens than torch's"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    report = Table(
        title=f"{arguments.rows} rows of {arguments.vocab}, threads: {arguments.threads}"
    )
    report.add_column("case")
    for name in ("step, us", "log_softmax, us", "ratio"):
        report.add_column(name, justify="right")
    for case in CASES:
        if arguments.only not in case.name:
            continue
        check(case, arguments.vocab)
        step, _ = make_step(case, arguments.rows, arguments.vocab, cpu)
        generator = torch.Generator().manual_seed(1)
        peer_logits = lm_like_logits(arguments.rows, arguments.vocab, generator, case.dtype)
        step()

        result = torch.empty_like(peer_logits)

        def peer(logits: torch.Tensor = peer_logits, result: torch.Tensor = result) -> None:
            torch.log_softmax(logits, -1, out=result)

        ours, theirs = least_times([step, peer], arguments.rounds)
        report.add_row(
            case.name, f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f}", f"{ours / theirs:.2f}"
        )
    Console().print(report)


if __name__ == "__main__":
    main()

"""Records next-token logits of the demo's model, as rows to measure samplers on.

    python bench/record_logits.py recorded.pt [--rows 256] [--temperature 0.7] [--device cpu]

Made-up logits are too flat or too regular. These are SmolLM2-135M-Instruct's (see
graphed_sampling/demo/model.py for its package) over the demo's prompts, each continued by sampling
until there are enough rows. They are what the model's head writes: no temperature or mask is in
them. The file is read with torch.load:

    {"logits": bfloat16 [rows, vocabulary], "model": name of the weights, "commit": this checkout's}
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from graphed_sampling import SamplingParams
from graphed_sampling.demo.engine import Engine, Request
from graphed_sampling.demo.model import (
    SlottedModel,
    find_model,
    load_config,
    load_network,
    load_tokenizer,
)
from graphed_sampling.demo.prompts import builtin_requests, make_request

MAX_TOKENS = 200


class RecordingModel(SlottedModel):
    """Keeps a copy of the logits that it writes."""

    def record_to(self, recorded: list[Tensor]) -> None:
        self._recorded = recorded

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        super().write_logits(hidden, out)
        self._recorded += out.to("cpu", torch.bfloat16, copy=True)


def prompts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The demo's, each once: some of its requests share a prompt."""
    return list(dict.fromkeys(r.prompt for r in builtin_requests(tokenizer, max_tokens=1)))


def make_requests(
    tokenizer: PreTrainedTokenizerBase, temperature: float, seeds: Iterator[int]
) -> list[Request]:
    return [
        make_request(
            tokenizer,
            prompt,
            prompt,
            SamplingParams(temperature=temperature, seed=next(seeds)),
            max_tokens=MAX_TOKENS,
        )
        for prompt in prompts(tokenizer)
    ]


def record(rows: int, temperature: float, device: torch.device) -> Tensor:
    """Logits in bfloat16, [rows, vocabulary]. All prompts run at once, and again if need be."""
    path = find_model()
    tokenizer = load_tokenizer(path)
    seeds = count()
    requests = make_requests(tokenizer, temperature, seeds)
    model = RecordingModel(
        load_network(path, load_config(path), device),
        num_slots=len(requests),
        capacity=max(request.max_length for request in requests),
    )
    recorded: list[Tensor] = []
    model.record_to(recorded)
    engine = Engine(
        model,
        num_slots=len(requests),
        eos_token_ids=[tokenizer.eos_token_id],
        backend="torch",  # no compiler to wait for
    )
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as progress:
        task = progress.add_task("rows", total=rows)
        while len(recorded) < rows:
            if not engine.busy:
                for request in requests:
                    engine.submit(request)
                requests = make_requests(tokenizer, temperature, seeds)
            engine.step()
            progress.update(task, completed=min(len(recorded), rows))
    return torch.stack(recorded[:rows])


def commit() -> str:
    folder = Path(__file__).parent
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=folder, text=True).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    if arguments.rows < 1:
        parser.error("--rows must be at least 1")
    logits = record(arguments.rows, arguments.temperature, arguments.device)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"logits": logits, "model": find_model().stem, "commit": commit()}, arguments.file)
    print(
        f"{arguments.file}: {tuple(logits.shape)}, {arguments.file.stat().st_size / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()

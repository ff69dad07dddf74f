"""The sampling step inside a CUDA graph of your own, behind the model's last layer.

    python examples/own_graph.py

One capture holds the LM head and `sample_step`. Before each replay, `table.upload()` sends what was
admitted, changed or released since the last one. The next inputs are read on the device, from
`table.last_token_ids`, so that replays can follow each other without the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphed_sampling import RequestTable, SamplingParams, backends, new_output, new_scratch

VOCAB_SIZE, HIDDEN = 4096, 256


class ToyModel(torch.nn.Module):
    """Stands for a model: an embedding and an LM head, so that a token's logits follow from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCAB_SIZE, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(torch.tanh(self.embedding(token_ids)))
        return logits


class OwnGraph:
    """Model and sampling step of all `rows` slots in one graph; eager where there is no GPU."""

    def __init__(self, model: ToyModel, table: RequestTable, rows: int, backend: str) -> None:
        self.model, self.table, self.rows = model, table, rows
        self.backend = backend
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=table.device)
        self.output = new_output(table, rows)
        self.scratch = new_scratch(table, backend, rows)
        self.graph: torch.cuda.CUDAGraph | None = None
        if table.device.type == "cuda":
            self._capture()

    def replay(self) -> None:
        """One step of every slot in `self.slots`."""
        self.table.upload()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()

    def _step(self) -> None:
        slots = self.slots.long().clamp(min=0)  # padding rows feed any token, and change nothing
        token_ids = self.table.last_token_ids[slots].clamp(min=0)
        logits = self.model(token_ids)
        torch.ops.graphed_sampling.sample_step(
            logits,
            self.slots,
            self.table.params,
            self.table.state,
            self.table.tables,
            self.output.record,
            self.scratch,
            self.table.layout.to_ints(),
            self.backend,
        )

    def _capture(self) -> None:
        # Every slot is -1 until after the capture: warm-up and capture change no state.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._step()


@torch.no_grad()
def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = ToyModel().to(device)
    table = RequestTable(4, VOCAB_SIZE, device=device)
    backend = backends.resolve("auto", table.device)
    step = OwnGraph(model, table, rows=4, backend=backend)
    slots = [
        table.admit(SamplingParams(temperature=0.8, top_k=50, seed=seed), prompt_token_ids=[seed])
        for seed in range(3)
    ]
    step.slots[: len(slots)] = torch.tensor(slots, dtype=torch.int32)
    texts: list[list[int]] = [[] for _ in slots]
    for _ in range(8):
        step.replay()
        for text, token_id in zip(texts, step.output.token_ids.tolist(), strict=False):
            text.append(token_id)
    for slot, text in zip(slots, texts, strict=True):
        print(f"slot {slot}: {text}")


if __name__ == "__main__":
    main()

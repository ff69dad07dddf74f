"""Random lives of tables: requests that come, change and go, and the steps between.

One history is told to several tables, in one process or in many: it follows from its seed alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from helpers import KINDS, random_bitmask, random_params, random_row, random_words

from graphed_sampling import RequestTable, SamplingParams


@dataclass(frozen=True)
class StepInputs:
    """What one step gets: CPU tensors, as `Sampler.__call__` takes them."""

    logits: torch.Tensor
    slots: torch.Tensor
    grammar_bitmask: torch.Tensor | None
    words: torch.Tensor | None

    @property
    def optional(self) -> dict[str, torch.Tensor | None]:
        return {"grammar_bitmask": self.grammar_bitmask, "words": self.words}


class History:
    """supported: what of random parameters is asked for; kinds: of rows, see `random_row`."""

    def __init__(
        self,
        seed: int,
        vocab: int,
        max_requests: int,
        *,
        kinds: Sequence[str] = KINDS,
        supported: Callable[[SamplingParams], SamplingParams] = lambda params: params,
        takes_words: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self.vocab, self.max_requests = vocab, max_requests
        self._kinds, self._supported, self._takes_words = kinds, supported, takes_words
        self._dtype = dtype
        self._admitted: set[int] = set()

    def table(self, device: torch.device | str = "cpu") -> RequestTable:
        return RequestTable(
            self.max_requests,
            self.vocab,
            device=device,
            eos_token_ids=(0,),
            max_logprobs=4,
            max_logit_bias=6,
            max_bad_words=4,
            max_logprob_ids=4,
            seed=5,
        )

    def change(self, *tables: RequestTable, rate: float = 0.3) -> None:
        """Requests that come, change and go, the same in all tables."""
        rng = self._rng
        for slot in range(self.max_requests):
            admitted = slot in self._admitted
            if rng.random() >= (rate / 3 if admitted else rate):
                continue
            if admitted and rng.random() < 0.7:
                for table in tables:
                    table.release(slot)
                self._admitted.discard(slot)
            elif admitted:
                params = self._supported(random_params(rng, self.vocab))
                for table in tables:
                    table.update(slot, params)
            else:
                prompt = rng.integers(0, self.vocab, rng.integers(0, 5)).tolist()
                output = rng.integers(0, self.vocab, rng.integers(0, 3)).tolist()
                params = self._supported(random_params(rng, self.vocab, output))
                for table in tables:
                    table.admit(params, prompt, output_token_ids=output, slot=slot)
                self._admitted.add(slot)

    def step(self, rows: int) -> StepInputs:
        """So many rows at most: some are padding, and none names a slot that holds no request."""
        rng = self._rng
        slots = rng.permutation([*sorted(self._admitted), *[-1] * 2])[:rows]
        count = len(slots)
        logits = [random_row(rng, self.vocab, str(rng.choice(self._kinds))) for _ in slots]
        bitmask = random_bitmask(rng, count, self.vocab) if rng.random() < 0.2 else None
        words = random_words(rng, count, 0.2) if rng.random() < 0.3 else None
        return StepInputs(
            torch.from_numpy(np.stack(logits)).to(self._dtype),
            torch.from_numpy(slots.astype(np.int32)),
            bitmask,
            words if self._takes_words else None,
        )


def used_state(table: RequestTable) -> torch.Tensor:
    """int32, on the host: all of a table's device state but the padding rows."""
    layout, rows = table.layout, table.layout.rows
    parts = [table.state[:-1].flatten()]
    if layout.penalties:
        bitmaps = table.tables[: layout.counts].view(3, rows, layout.bitmap_words)
        counts = table.tables[layout.counts :].view(rows, layout.vocab_size)
        parts += [bitmaps[:, :-1].flatten(), counts[:-1].flatten()]
    return torch.cat(parts).cpu()

"""FlashInfer's sampling for the CPU, in torch: the functions that the backend calls, in place.

It has the law and the random numbers of FlashInfer 0.7.4 (Philox4x32-10 as cuRAND lays it out:
seed, the row as subsequence, offset), and sums in float64. What FlashInfer must not be given, NaN
or probabilities that do not add up to 1, fails here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graphed_sampling import philox


def uniform(seed: int, subsequence: int, offset: int) -> float:
    """cuRAND's first uniform number, in (0, 1], of a state that was made with these."""
    counter = offset // 4
    numbers = philox.block(
        (counter & 0xFFFFFFFF, counter >> 32, subsequence, 0),
        (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF),
    )
    return numbers[offset % 4] * 2.0**-32 + 2.0**-33


class StandIn:
    """FlashInfer's module `sampling`, as far as it is used."""

    def softmax(
        self,
        workspace: Tensor,
        logits: Tensor,
        probabilities: Tensor,
        temperature: Tensor | None,
        temperature_value: float,
        enable_pdl: bool,
        /,
    ) -> None:
        assert logits.dtype == probabilities.dtype == torch.float32
        assert logits.is_contiguous() and probabilities.is_contiguous()
        assert temperature is None and temperature_value == 1.0
        torch.softmax(logits, 1, out=probabilities)

    def top_k_probs_to_slab(
        self,
        probabilities: Tensor,
        top_k: Tensor,
        /,
        *,
        top_k_max: int,
        out_vals: Tensor,
        out_idx: Tensor,
        out_count: Tensor,
    ) -> None:
        """The first k in (probability descending, id ascending), in no order; NaN counts as 0."""
        assert top_k.dtype == torch.int32 and 0 < top_k_max < probabilities.shape[1]
        assert bool((top_k <= top_k_max).all()) and bool((top_k > 0).all())
        rng = np.random.default_rng(0)
        for row, p in enumerate(torch.nan_to_num(probabilities).numpy()):
            k = int(top_k[row])
            best = rng.permutation(np.argsort(-p, kind="stable")[:k])
            out_vals[row, :k] = torch.from_numpy(p[best])
            out_idx[row, :k] = torch.from_numpy(best.astype(np.int32))
            out_count[row] = k

    def sampling_from_probs(
        self,
        probabilities: Tensor,
        samples: Tensor,
        valid: Tensor,
        indices: Tensor | None,
        deterministic: bool,
        seed: Tensor | None,
        seed_value: int,
        offset: Tensor | None,
        offset_value: int,
        /,
    ) -> None:
        assert indices is None and deterministic and seed is not None and offset is not None
        assert probabilities.dtype == torch.float32 and probabilities.is_contiguous()
        # It loads four at a time where their number allows that.
        assert probabilities.data_ptr() % 16 == 0 and samples.is_contiguous()
        assert samples.dtype == torch.int32 and valid.dtype == torch.bool
        assert seed.dtype == offset.dtype == torch.int64
        assert seed.shape == offset.shape == samples.shape == valid.shape
        assert len(samples) == len(probabilities)
        assert not probabilities.isnan().any(), "NaN reached FlashInfer's draw"
        sums = probabilities.sum(1)
        assert bool(((sums - 1).abs() < 1e-4).all()), f"probabilities add up to {sums}"
        for row, p in enumerate(probabilities.numpy().astype(np.float64)):
            u = uniform(int(seed[row]), row, int(offset[row]) & (2**64 - 1))
            # The first at which the sum exceeds u; the last one where the whole does not.
            drawn = int(np.searchsorted(np.cumsum(p), u, side="right"))
            samples[row] = min(drawn, int(np.flatnonzero(p)[-1]))
            valid[row] = True

"""Parameter records of rows that belong to no table: made on the device, from one value a row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphed_sampling.backends import exact_math
from graphed_sampling.layout import Param, ParamFlags, TableLayout
from graphed_sampling.params import GREEDY_TEMPERATURE, LOG2_E


class Filters(NamedTuple):
    """What a row is filtered by: fp32 [n], top_k int32 [n]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def clamped(self, vocab_size: int) -> Filters:
        """Values outside their range as the nearest accepted one; NaN as greedy or as off.

        A greedy row has temperature 0 and no other filter; a top_k of all tokens is off.
        """
        finite = torch.finfo(torch.float32)
        temperature = self.temperature.nan_to_num(nan=0.0).clamp(0.0, finite.max)
        greedy = temperature < GREEDY_TEMPERATURE
        return Filters(
            temperature.masked_fill(greedy, 0.0),
            torch.where(greedy | (self.top_k >= vocab_size), 0, self.top_k.clamp(min=0)),
            self.top_p.nan_to_num(nan=1.0).clamp(finite.tiny, 1.0).masked_fill(greedy, 1.0),
            self.min_p.nan_to_num(nan=0.0).clamp(0.0, 1.0).masked_fill(greedy, 0.0),
        )

    def scale(self) -> Tensor:
        """float64 [n]: log2(e) / T, of clamped filters; of greedy rows that of T = 1."""
        return LOG2_E / self.temperature.double().masked_fill(self.temperature == 0, 1.0)


def neutral_params(layout: TableLayout, device: torch.device) -> Tensor:
    """int32 [layout.rows, layout.params_words]: records of slots that hold no request."""
    params = torch.zeros(layout.rows, layout.params_words, dtype=torch.int32, device=device)
    real = params.view(torch.float32)
    for word in (Param.TEMPERATURE, Param.TOP_P, Param.TYPICAL_P, Param.REPETITION_PENALTY):
        real[:, word].fill_(1.0)
    real[:, Param.SCALE].fill_(LOG2_E)
    params.view(torch.float64)[:, Param.WIDE_SCALE // 2].fill_(LOG2_E)
    return params


def write_params(params: Tensor, filters: Filters, flags: ParamFlags) -> None:
    """Fill the first records of `neutral_params` for clamped filters of n rows.

    flags: those that say what is reported; the others are added here.
    """
    rows = filters.temperature.shape[0]
    params, real = params[:rows], params.view(torch.float32)[:rows]
    wide = params.view(torch.float64)
    temperature, top_k, top_p, min_p = filters
    greedy = temperature == 0
    temperature = temperature.masked_fill(greedy, 1.0)
    scale = filters.scale()
    log_min_p = exact_math.log(min_p.double().clamp(min=torch.finfo(torch.float32).tiny))
    needs_total = ~greedy & (top_k == 0) & (min_p <= 0)
    filtered = (top_k > 0) | (min_p > 0) | (top_p < 1)
    params[:, Param.FLAGS] = (
        int(flags | ParamFlags.ADMITTED)
        + filtered * int(ParamFlags.FILTERED)
        + greedy * int(ParamFlags.GREEDY)
        + needs_total * int(ParamFlags.TOTAL)
    )
    params[:, Param.TOP_K] = top_k
    real[:, Param.TEMPERATURE] = temperature
    real[:, Param.SCALE] = scale.float()
    wide[:, Param.WIDE_SCALE // 2] = scale
    real[:, Param.TOP_P] = top_p
    real[:, Param.MIN_P] = min_p
    wide[:, Param.MIN_P_OFFSET // 2] = temperature.double() * log_min_p

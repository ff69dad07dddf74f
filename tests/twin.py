"""The reference's filters for many rows at once: plain torch operations in float64, on any device.

`graphed_sampling.reference.sample_row` takes one row at a time; a million of them take hours. This
is the same function for rows without masks, bias and penalties, rule by rule in the same order,
and test_twin.py compares the two. It sorts, and its sums are float64: agreement with the reference
is to about 1e-12, far inside of what the contract leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from graphed_sampling import RowFlags, SamplingParams
from graphed_sampling.params import fp32

FILTERS: Final = (
    "top_n_sigma",
    "min_p",
    "top_k",
    "top_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
"""The filters in the contract's order."""

ROUNDING: Final = ("top_n_sigma", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""The filters whose decisions depend on rounded sums; those of min_p and top_k are exact."""

_CHUNK_ELEMENTS: Final = 2**24
"""Logits worked on at once: about 4 GB of working memory."""

Kept = tuple[Tensor, Tensor]
"""What a filter returns: bool [n, V], which survivors it keeps, and float64 [n], its margin."""


def share_tolerance(vocab_size: int) -> float:
    """How far a boundary or a cumulative mass may be from the exact one, by the contract."""
    return 2.0**-20 + vocab_size * 2.0**-36


@dataclass(frozen=True)
class Filters:
    """The filters of n requests: one value a row, as the table stores them, neutral where off.

    greedy: bool [n]; top_k: int64 [n], 0 is off; the others float64 [n]. min_p_offset is
    T * ln(min_p), -inf where off.
    """

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p_offset: Tensor
    top_n_sigma: Tensor
    typical_p: Tensor
    epsilon_cutoff: Tensor
    eta_cutoff: Tensor

    @classmethod
    def of(cls, requests: Sequence[SamplingParams], device: torch.device | str = "cpu") -> Filters:
        def reals(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        def field(name: str, off: float) -> Tensor:
            return reals([off if p.is_greedy else fp32(getattr(p, name)) for p in requests])

        temperature = [1.0 if p.is_greedy else fp32(p.temperature) for p in requests]
        min_p = [0.0 if p.is_greedy else fp32(p.min_p) for p in requests]
        offsets = [
            t * math.log(m) if m > 0 else -math.inf for t, m in zip(temperature, min_p, strict=True)
        ]
        top_k = [1 if p.is_greedy else max(p.top_k, 0) for p in requests]
        return cls(
            greedy=torch.tensor([p.is_greedy for p in requests], device=device),
            temperature=reals(temperature),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=field("top_p", 1.0),
            min_p_offset=reals(offsets),
            top_n_sigma=field("top_n_sigma", 0.0),
            typical_p=field("typical_p", 1.0),
            epsilon_cutoff=field("epsilon_cutoff", 0.0),
            eta_cutoff=field("eta_cutoff", 0.0),
        )

    def __getitem__(self, rows: slice | Tensor) -> Filters:
        return Filters(*(getattr(self, f.name)[rows] for f in fields(self)))

    def on(self, vocab_size: int) -> dict[str, Tensor]:
        """bool [n] by filter: where it is on."""
        return {
            "top_n_sigma": self.top_n_sigma > 0,
            "min_p": self.min_p_offset > -math.inf,
            "top_k": self.greedy | ((self.top_k > 0) & (self.top_k < vocab_size)),
            "top_p": self.top_p < 1,
            "typical_p": self.typical_p < 1,
            "epsilon_cutoff": self.epsilon_cutoff > 0,
            "eta_cutoff": self.eta_cutoff > 0,
        }


@dataclass(frozen=True)
class Draws:
    """What n words draw: token, int64 [n]. The rest is how: `Twin.cumulative`, the place of each id
    in the canonical order, int64 [V], and the words as probabilities, float64 [n].
    """

    token: Tensor
    cumulative: Tensor
    place: Tensor
    position: Tensor

    def distance(self, token: Tensor) -> Tensor:
        """float64 [n]: how far, in probability, each word lies outside of its token's interval."""
        index = self.place[token].unsqueeze(1)
        end = self.cumulative.gather(1, index)
        start = self.cumulative.gather(1, (index - 1).clamp(min=0)).masked_fill(index == 0, 0.0)
        position = self.position.unsqueeze(1)
        return torch.maximum(start - position, position - end).clamp(min=0)[:, 0]


@dataclass(frozen=True)
class Twin:
    """What the reference says of n rows of a vocabulary V. Tensors are by id unless said otherwise.

    y: fp32 [n, V], -inf where nothing can be drawn. flags: int32 [n], of `RowFlags`.
    order: int64 [n, V], ids by (y descending, id ascending). kept: bool [n, V].
    num_kept: int64 [n], as `StepOutput` reports it. logprobs: float64 [n, V], of the distribution
    drawn from, -inf outside. raw_logprobs: float64 [n, V]. margins: float64 [n, filters], in the
    order of `FILTERS`, inf where a filter is off (see `RowResult.margins`).
    """

    y: Tensor
    flags: Tensor
    order: Tensor
    kept: Tensor
    num_kept: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor
    margins: Tensor

    @property
    def margin(self) -> Tensor:
        """float64 [n]: the smallest margin of the filters that round."""
        return self.margins[:, [FILTERS.index(name) for name in ROUNDING]].amin(1)

    def cumulative(self, canonical: Tensor) -> Tensor:
        """float64 [n, V]: the cumulative distribution over ids in the order `canonical` [V]."""
        mass = self.logprobs.exp()[:, canonical].cumsum(1)
        return mass / mass[:, -1:]

    def draw(self, words: Tensor, canonical: Tensor) -> Draws:
        """What the words, int64 [n], draw, the ids lying in the order `canonical` [V]."""
        return draw(words, self.cumulative(canonical), canonical)


def draw(words: Tensor, cumulative: Tensor, canonical: Tensor) -> Draws:
    """What the words, int64 [n], draw from the rows of `Twin.cumulative`."""
    position = ((words >> 11) & (2**53 - 1)).double() * 2.0**-53
    index = torch.searchsorted(cumulative, position.unsqueeze(1), right=True)[:, 0]
    place = torch.empty_like(canonical)
    place[canonical] = torch.arange(len(canonical), device=canonical.device)
    return Draws(canonical[index], cumulative, place, position)


def twin(logits: Tensor, filters: Filters, chunk_elements: int = _CHUNK_ELEMENTS) -> Twin:
    """The twin of `sample_row` on raw logits [n, V], one of `filters` a row."""
    rows = max(1, chunk_elements // logits.shape[1])
    starts = range(0, len(logits), rows)
    parts = [_twin(logits[s : s + rows], filters[s : s + rows]) for s in starts]
    if len(parts) == 1:
        return parts[0]  # without a copy
    return Twin(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Twin)))


def _twin(logits: Tensor, filters: Filters) -> Twin:
    raw = logits.float()
    is_nan = raw.isnan()
    raw = raw.masked_fill(is_nan, -torch.inf) + 0.0
    y, flags = _candidates(raw)
    flags |= is_nan.any(1) * int(RowFlags.NAN)

    by_rank, order = torch.sort(y, dim=1, descending=True, stable=True)
    rows = _Rows(by_rank.double(), by_rank > -torch.inf, filters.temperature.unsqueeze(1))
    margins = []
    on = filters.on(y.shape[1])
    for name in FILTERS:
        margin = torch.full_like(filters.temperature, torch.inf)
        number = torch.nonzero(on[name])[:, 0]
        if len(number):
            some = rows[number]
            mask, margin[number] = _KEEP[name](some, filters[number])
            rows.kept[number] = some.kept & mask
        margins.append(margin)

    any_on = torch.stack(list(on.values())).any(0)
    counted = any_on | ((flags & int(RowFlags.EMPTY)) != 0)
    return Twin(
        y=y,
        flags=flags,
        order=order,
        kept=torch.zeros_like(rows.kept).scatter_(1, order, rows.kept),
        num_kept=rows.kept.sum(1).masked_fill(~counted, 0),
        logprobs=torch.zeros_like(rows.y).scatter_(1, order, rows.log_probabilities()),
        raw_logprobs=_raw_logprobs(raw),
        margins=torch.stack(margins, 1),
    )


def _candidates(raw: Tensor) -> tuple[Tensor, Tensor]:
    """y fp32 [n, V], and the flags int32 [n], of sanitised logits."""
    infinite = raw == torch.inf
    is_infinite, is_empty = infinite.any(1, keepdim=True), (raw == -torch.inf).all(1, keepdim=True)
    y = torch.where(is_infinite, torch.where(infinite, 0.0, -torch.inf), raw)
    y[:, :1] = torch.where(is_empty, 0.0, y[:, :1])
    flags = is_infinite * int(RowFlags.POS_INF) + is_empty * int(RowFlags.EMPTY)
    return y, flags[:, 0].to(torch.int32)


def _raw_logprobs(raw: Tensor) -> Tensor:
    """log_softmax of sanitised logits; +inf entries share the mass, an empty row has none."""
    y, flags = _candidates(raw)
    rows = _Rows(y.double(), y > -torch.inf, torch.ones_like(y[:, :1], dtype=torch.float64))
    empty = (flags & int(RowFlags.EMPTY)) != 0
    return rows.log_probabilities().masked_fill_(empty.unsqueeze(1), -torch.inf)


@dataclass
class _Rows:
    """Rows on their way through the filters. y, kept: [n, V], y float64; temperature: [n, 1]."""

    y: Tensor
    kept: Tensor
    temperature: Tensor

    def __getitem__(self, rows: Tensor) -> _Rows:
        return _Rows(self.y[rows], self.kept[rows], self.temperature[rows])

    @property
    def maximum(self) -> Tensor:
        """float64 [n, 1]: the largest y of the survivors, of which there always is one."""
        return self.y.masked_fill(~self.kept, -torch.inf).amax(1, keepdim=True)

    @property
    def count(self) -> Tensor:
        return self.kept.sum(1, keepdim=True)

    def log_probabilities(self) -> Tensor:
        """float64 [n, V], -inf outside of the survivors."""
        scaled = ((self.y - self.maximum) / self.temperature).masked_fill_(~self.kept, -torch.inf)
        return scaled - scaled.exp().sum(1, keepdim=True).log()

    def smallest(self, values: Tensor, among: Tensor) -> Tensor:
        """float64 [n, 1]: the smallest value of survivors that are `among`; inf without any."""
        return values.masked_fill(~(self.kept & among), torch.inf).amin(1, keepdim=True)


# The filters, each on the rows where it is on, whose columns are in the order of `Twin.order`.


def _keep_top_n_sigma(rows: _Rows, filters: Filters) -> Kept:
    maximum = rows.y[:, :1]
    mean = rows.y.masked_fill(~rows.kept, 0.0).sum(1, keepdim=True) / rows.count
    square = (rows.y - mean).square_().masked_fill_(~rows.kept, 0.0)
    reach = filters.top_n_sigma.unsqueeze(1) * (square.sum(1, keepdim=True) / rows.count).sqrt()
    bound = maximum - reach
    margin = rows.smallest((rows.y - bound).abs(), rows.y < maximum) / reach
    return rows.y >= bound, margin.masked_fill(reach == 0, torch.inf)[:, 0]


def _keep_min_p(rows: _Rows, filters: Filters) -> Kept:
    maximum = rows.y[:, :1]
    exact = maximum + filters.min_p_offset.unsqueeze(1)
    bound = exact.float()
    below = torch.nextafter(bound, torch.full_like(bound, -torch.inf))
    bound = torch.where(bound.double() > exact, below, bound).double()
    margin = rows.smallest((rows.y - exact).abs(), rows.y < maximum) / rows.temperature
    return rows.y >= bound, margin[:, 0]


def _keep_top_k(rows: _Rows, filters: Filters) -> Kept:
    rank = torch.arange(rows.y.shape[1], device=rows.y.device)
    return rank < filters.top_k.unsqueeze(1), torch.full_like(filters.top_p, torch.inf)


def _keep_top_p(rows: _Rows, filters: Filters) -> Kept:
    p = filters.top_p.unsqueeze(1)
    mass = ((rows.y - rows.y[:, :1]) / rows.temperature).exp_().masked_fill_(~rows.kept, 0.0)
    mass = mass.cumsum(1)
    mass /= mass[:, -1:].clone()
    last = _first(mass >= p)
    rank = torch.arange(rows.y.shape[1], device=rows.y.device)
    return rank <= last, _distance_from(p, mass, [last, last + 1], rows.count)


def _keep_typical(rows: _Rows, filters: Filters) -> Kept:
    p = filters.typical_p.unsqueeze(1)
    log_p = rows.log_probabilities()
    distance = (log_p + _entropy(log_p)).abs()  # inf outside of the survivors
    nearest_first = distance.argsort(dim=1, stable=True)
    mass = log_p.exp().gather(1, nearest_first).cumsum(1)
    mass /= mass[:, -1:].clone()
    crossing = nearest_first.gather(1, _first(mass >= p))
    cutoff = distance.gather(1, crossing)
    counts = [(distance < cutoff).sum(1, keepdim=True), (distance <= cutoff).sum(1, keepdim=True)]
    other = rows.y != rows.y.gather(1, crossing)
    return distance <= cutoff, torch.minimum(
        _distance_from(p, mass, counts, rows.count),
        rows.smallest((distance - cutoff).abs(), other)[:, 0],
    )


def _keep_epsilon(rows: _Rows, filters: Filters) -> Kept:
    return _keep_probable(rows, rows.log_probabilities(), filters.epsilon_cutoff.unsqueeze(1))


def _keep_eta(rows: _Rows, filters: Filters) -> Kept:
    epsilon = filters.eta_cutoff.unsqueeze(1)
    log_p = rows.log_probabilities()
    eta = torch.minimum(epsilon, epsilon.sqrt() * (-_entropy(log_p)).exp())
    return _keep_probable(rows, log_p, eta)


def _keep_probable(rows: _Rows, log_p: Tensor, cutoff: Tensor) -> Kept:
    is_maximum = rows.y == rows.maximum
    p = log_p.exp()
    margin = rows.smallest((p / cutoff - 1).abs(), ~is_maximum)
    return (p >= cutoff) | is_maximum, margin[:, 0]


def _entropy(log_p: Tensor) -> Tensor:
    """float64 [n, 1]; 0 ln 0 is 0."""
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(1, keepdim=True)


def _first(true: Tensor) -> Tensor:
    """int64 [n, 1]: the first column that is true."""
    return true.to(torch.uint8).argmax(1, keepdim=True)


def _distance_from(p: Tensor, mass: Tensor, counts: list[Tensor], size: Tensor) -> Tensor:
    """float64 [n]: from p to the nearest of the masses of the first `counts` of `size` survivors.

    The masses of none and of all count not: they are 0 and 1 whatever rounds.
    """
    nearest = torch.full_like(p, torch.inf)
    for count in counts:
        between = (count > 0) & (count < size)
        distance = (mass.gather(1, (count - 1).clamp(min=0)) - p).abs()
        nearest = torch.minimum(nearest, distance.masked_fill_(~between, torch.inf))
    return nearest[:, 0]


_KEEP: Final[dict[str, Callable[[_Rows, Filters], Kept]]] = {
    "top_n_sigma": _keep_top_n_sigma,
    "min_p": _keep_min_p,
    "top_k": _keep_top_k,
    "top_p": _keep_top_p,
    "typical_p": _keep_typical,
    "epsilon_cutoff": _keep_epsilon,
    "eta_cutoff": _keep_eta,
}

"""A step's output on the host, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphed_sampling.sampler import StepOutput
from graphed_sampling.step.requests import Sample, TokenLogprobs


class HostViews:
    """The parts of an output record in an entry of the ring; made once, the entries stay."""

    def __init__(self, output: StepOutput) -> None:
        self.token_ids = output.token_ids.numpy()
        self.finish_reason = output.finish_reason.numpy()
        self.flags = output.flags.numpy()
        self.logprobs = output.logprobs.numpy()
        self.ranks = output.ranks.numpy()
        self.top_token_ids = output.top_token_ids.numpy()
        self.top_logprobs = output.top_logprobs.numpy()
        self.given_logprobs = output.given_logprobs.numpy()


class Reports:
    """What the rows of a step report beside their tokens: read when the first row asks, for all
    rows at once, since a look at one element costs as much as a list of them."""

    def __init__(self, views: HostViews, rows: Sequence[Sample]) -> None:
        self._views = views
        self._rows = rows
        self._lists: tuple[list[Any], ...] | None = None

    def _read(self) -> tuple[list[Any], ...]:
        views, rows = self._views, len(self._rows)
        most = max(sample.params.logprobs or 0 for sample in self._rows)
        given = max(sample.given for sample in self._rows)
        return (
            views.logprobs[:rows].tolist(),
            views.ranks[:rows].tolist(),
            views.top_token_ids[:rows, :most].tolist(),
            views.top_logprobs[:rows, :most].tolist(),
            views.given_logprobs[:rows, :given].tolist(),
        )

    def of(self, sample: Sample, row: int, token: int) -> TokenLogprobs:
        if self._lists is None:
            self._lists = self._read()
        logprobs, ranks, top_ids, top_logprobs, given = self._lists
        count = sample.params.logprobs
        top = tuple(zip(top_ids[row][:count], top_logprobs[row], strict=False)) if count else ()
        own = tuple(given[row][: sample.given]) if sample.given else ()
        return TokenLogprobs(token, logprobs[row], ranks[row], top, own)

"""Text of a growing answer: tokens to text bit by bit, and stop strings in it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

_UNFINISHED: Final = "\ufffd"  # what decoders put for the first bytes of a character
_LONGEST_UNFINISHED: Final = 16  # tokens: no character is that long, so the first bytes are broken


class TokenDecoder(Protocol):
    """Turns one answer's tokens into text; every answer has its own."""

    def push(self, token_id: int) -> str:
        """What `token_id` adds that is certain: no part of a character."""
        ...

    def flush(self) -> str:
        """What is left at the end."""
        ...


class IncrementalDecoder:
    """A `TokenDecoder` over any `decode(token_ids) -> text`.

    Decoders look back: a space may depend on the token before. So the text of a token is what the
    tokens since the last whole text have more than those before it, decoded together.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # the tokens of the last piece of text
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if not text.endswith(_UNFINISHED):
            return self._emit(text)
        if len(self._pending) < _LONGEST_UNFINISHED:
            return ""
        broken, begun = self._parted(text)
        new = self._emit(broken)
        self._pending = begun
        return new

    def _parted(self, text: str) -> tuple[str, list[int]]:
        """Text that ends with broken bytes, without what the last tokens have of it; and these: as
        few as leave the text as it is, for they may be the first bytes of a character."""
        for first in range(len(self._pending) - 1, 0, -1):
            broken = self._decode(self._context + self._pending[:first])
            begun = self._pending[first:]
            if broken.endswith(_UNFINISHED) and broken + self._decode(begun) == text:
                return broken, begun
        return text, []

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        # After broken bytes nothing is looked back at: they might become whole after all.
        whole = not text.endswith(_UNFINISHED)
        self._context, self._pending = self._pending if whole else [], []
        self._context_text = self._decode(self._context) if whole else ""
        return new


class StopAutomaton:
    """Stop strings, as all samples of a request share them (Aho and Corasick's automaton).

    A node stands for a beginning of a stop string; the node after some text is the longest one
    that the text ends with. Memory grows with the length of the stop strings, time with that of
    the text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._after: list[dict[str, int]] = [{}]
        self._back = [0]  # the longest shorter beginning that the node's own ends with
        self.depth = [0]
        self.stop: list[str | None] = [None]  # the longest one that is complete at the node
        for stop in stops:
            node = 0
            for letter in stop:
                if letter not in self._after[node]:
                    self._after[node][letter] = len(self._after)
                    self._after.append({})
                    self._back.append(0)
                    self.depth.append(self.depth[node] + 1)
                    self.stop.append(None)
                node = self._after[node][letter]
            self.stop[node] = stop
        self.first = re.compile("|".join(re.escape(letter) for letter in self._after[0]))
        nodes = deque(self._after[0].values())
        while nodes:  # shorter ones first
            node = nodes.popleft()
            if self.stop[node] is None:
                self.stop[node] = self.stop[self._back[node]]
            for letter, after in self._after[node].items():
                self._back[after] = self.step(self._back[node], letter)
                nodes.append(after)

    def step(self, node: int, letter: str) -> int:
        """The node after one more letter."""
        while (after := self._after[node].get(letter)) is None:
            if node == 0:
                return 0
            node = self._back[node]
        return after


class StopStrings:
    """Lets text through up to the first stop string, whatever the pieces in which it comes.

    The stop string that is complete first counts; of several that are complete with the same
    character, the longest. What may be the beginning of one is held back.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown, and the stop string that ended the answer, if one did."""
        automaton, node = self._automaton, self._node
        if not node and automaton.first.search(text) is None:
            return text, None  # most text holds nothing that begins one
        for index, letter in enumerate(text, 1):
            node = automaton.step(node, letter)
            stop = automaton.stop[node]
            if stop is not None:
                whole = self._held + text[:index]
                self._node, self._held = 0, ""
                return whole[: len(whole) - len(stop)], stop
        whole = self._held + text
        shown = len(whole) - automaton.depth[node]
        self._node, self._held = node, whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back: the answer has ended."""
        held = self._held
        self._node, self._held = 0, ""
        return held


def check_stop_strings(stop: object, most: int, longest: int) -> tuple[str, ...]:
    """Stop strings as a tuple; ValueError unless they are at most `most` non-empty strings of at
    most `longest` characters."""
    stops = (stop,) if isinstance(stop, str) else stop
    accepted = f"a string, or a sequence of at most {most} strings, none of them empty"
    if (
        not isinstance(stops, Sequence)
        or isinstance(stops, bytes)
        or len(stops) > most
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise ValueError(f"stop = {stop!r} is not accepted: it must be {accepted}")
    if (length := max(map(len, stops), default=0)) > longest:
        raise ValueError(
            f"stop has a string of {length} characters: at most {longest} are accepted"
        )
    return tuple(dict.fromkeys(stops))

"""Text of a growing answer: tokens to text bit by bit, and stop strings in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from graphed_sampling.params import as_int

_UNFINISHED: Final = "\ufffd"  # what decoders put for the first bytes of a character
_LONGEST_UNFINISHED: Final = 16  # tokens: no character is that long, so those bytes are broken


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
        if text.endswith(_UNFINISHED) and len(self._pending) < _LONGEST_UNFINISHED:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._decode(self._context + self._pending)) if self._pending else ""

    def _emit(self, text: str) -> str:
        new = text[len(self._context_text) :]
        # After broken bytes nothing is looked back at: they might become whole after all.
        whole = not text.endswith(_UNFINISHED)
        self._context, self._pending = self._pending if whole else [], []
        self._context_text = self._decode(self._context) if whole else ""
        return new


class StopStrings:
    """Lets text through up to the first stop string, whatever the pieces in which it comes.

    The stop string that is complete first counts; of several that are complete with the same
    character, the longest. What may be the beginning of one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._longest = max(map(len, stops))
        # Most text holds none of these, which one look at a compiled expression tells.
        self._any = re.compile("|".join(map(re.escape, stops)))
        self._first = re.compile("|".join(re.escape(stop[0]) for stop in stops))
        self._beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown, and the stop string that ended the answer, if one did."""
        held = self._held + text
        if self._any.search(held):
            places = [
                (start + len(stop), start, stop)
                for stop in self._stops
                if (start := held.find(stop)) >= 0
            ]
            _, start, stop = min(places)
            self._held = ""
            return held[:start], stop
        begin = max(len(held) - self._longest + 1, 0)
        while (match := self._first.search(held, begin)) is not None:
            begin = match.start()
            if held[begin:] in self._beginnings:
                self._held = held[begin:]
                return held[:begin], None
            begin += 1
        self._held = ""
        return held, None

    def flush(self) -> str:
        """What was held back: the answer has ended."""
        held, self._held = self._held, ""
        return held


def check_stop_strings(stop: object, most: int) -> tuple[str, ...]:
    """Stop strings as a tuple; ValueError unless they are at most `most` non-empty strings."""
    stops = (stop,) if isinstance(stop, str) else stop
    accepted = f"a string, or a sequence of at most {most} strings, none of them empty"
    if (
        not isinstance(stops, Sequence)
        or isinstance(stops, bytes)
        or len(stops) > most
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise ValueError(f"stop = {stop!r} is not accepted: it must be {accepted}")
    return tuple(dict.fromkeys(stops))


def check_count(name: str, value: object, low: int) -> int:
    """`value` as an int; ValueError unless it is an integer >= low."""
    number = as_int(name, value, f"an integer >= {low}")
    if number < low:
        raise ValueError(f"{name} = {number} is not accepted: it must be an integer >= {low}")
    return number

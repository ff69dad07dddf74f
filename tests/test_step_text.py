"""Tokens to text, and stop strings: the same whatever the pieces are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphed_sampling import IncrementalDecoder
from graphed_sampling.step.text import StopAutomaton, StopStrings, check_stop_strings

ALPHABET = "abc"


def naive(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete, the longest of several."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
)
def test_stop_strings_are_found_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    finder, shown, found = StopStrings(StopAutomaton(stops)), "", None
    expected, stop = naive("".join(pieces), stops)
    for piece in pieces:
        text, found = finder.push(piece)
        shown += text
        assert expected.startswith(shown), "text was shown that belongs to the stop string"
        if found is not None:
            break
    else:
        shown += finder.flush()
    assert (shown, found) == (expected, stop)


@given(st.text(ALPHABET, max_size=20), st.text(ALPHABET, min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_be_a_beginning(text: str, stop: str) -> None:
    finder = StopStrings(StopAutomaton([stop]))
    shown, found = finder.push(text)
    if found is None:
        held = text[len(shown) :]
        longest = max(
            (n for n in range(min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0
        )
        assert held == text[len(text) - longest :]


@given(st.text(max_size=12), st.integers(0, 2**32))
def test_bytes_become_text_without_half_characters(text: str, _seed: int) -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    text = text.replace("\ufffd", "?")
    text = text.encode(errors="ignore").decode()
    decoder = IncrementalDecoder(decode)
    pieces = [decoder.push(i) for i in text.encode()]
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert decoder.flush() == ""


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=3),
            st.lists(st.integers(128, 255), min_size=10, max_size=30).map(bytes),
            st.sampled_from([letter.encode() for letter in "aé€😀"]),
        ),
        max_size=8,
    ).map(b"".join),
    st.integers(1, 3),
)
@example(b"\xff" * 15 + "😀".encode(), 1)
@example(b"\xff" * 14 + "😀".encode() + b"\xff" * 30 + "é".encode(), 1)
def test_broken_bytes_take_no_character_with_them(text: bytes, bytes_of_a_token: int) -> None:
    tokens = [text[i : i + bytes_of_a_token] for i in range(0, len(text), bytes_of_a_token)]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode(errors="replace")

    decoder = IncrementalDecoder(decode)
    pieces = [decoder.push(i) for i in range(len(tokens))]
    assert "".join(pieces) + decoder.flush() == text.decode(errors="replace")


def test_spaces_that_depend_on_the_token_before() -> None:
    words = ["", "one", "two", "three"]

    def decode(ids: Sequence[int]) -> str:
        return " ".join(words[i] for i in ids)

    decoder = IncrementalDecoder(decode)
    assert [decoder.push(i) for i in (1, 2, 3)] == ["one", " two", " three"]


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    decoder = IncrementalDecoder(lambda ids: bytes(ids).decode(errors="replace"))
    assert decoder.push(0xE2) == "" and decoder.push(0x82) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    pieces = [decoder.push(0x80) for _ in range(15)] + [decoder.push(0xE2)]
    assert pieces[:15] == [""] * 15 and pieces[15] == "\ufffd" * 15
    assert [decoder.push(i) for i in b"\x82\x80a"] == ["", "\u2080", "a"]


@pytest.mark.parametrize("stop", [["a", ""], ["a", 3], b"ab", 7, [str(i) for i in range(17)], None])
def test_stop_strings_that_are_none(stop: object) -> None:
    with pytest.raises(ValueError, match=r"stop = .* at most 16 strings, none of them empty"):
        check_stop_strings(stop, 16, 9)


def test_a_stop_string_that_is_too_long() -> None:
    assert check_stop_strings(["a", "b" * 9], 16, 9) == ("a", "b" * 9)
    with pytest.raises(ValueError, match="stop has a string of 10 characters: at most 9 are"):
        check_stop_strings(["a", "b" * 10], 16, 9)


def test_memory_of_stop_strings_grows_with_their_length() -> None:
    def size(length: int) -> int:
        stops = ["".join(chr(97 + i * i % 23) for i in range(length))]
        tracemalloc.start()
        automaton = StopAutomaton(stops)
        current, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert automaton.depth[-1] == length
        return current

    assert size(8000) < 6 * size(2000)


def test_stop_strings_as_they_may_be_given() -> None:
    assert check_stop_strings("ab", 16, 9) == ("ab",)
    assert check_stop_strings(["b", "a", "b"], 16, 9) == ("b", "a")
    assert check_stop_strings((), 16, 9) == ()

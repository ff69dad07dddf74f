"""The random words: published vectors, Python against tensors, independence of the streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphed_sampling.philox import Stream, block, word, words
from graphed_sampling.testing import chi_square

INT64 = st.integers(-(2**63), 2**63 - 1)
BORDERS = (0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -(2**32), -(2**32) - 1)


def as_int64(value: int) -> int:
    """The low 64 bits of `value` in two's complement."""
    return (value + 2**63) % 2**64 - 2**63


def words_of(seed: int, positions: torch.Tensor, stream: Stream = Stream.TARGET) -> torch.Tensor:
    """One request's words."""
    return words(torch.full_like(positions, seed), positions, stream)


# The three lines "philox4x32 10" of Random123's tests/kat_vectors.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param(
            (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"
        ),
        pytest.param(
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
            id="ones",
        ),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="pi",
        ),
    ],
)
def test_block_is_philox4x32_10(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    assert block(counter, key) == expected


def test_word_is_the_second_and_first_output() -> None:
    # The vector "zeros" above: out[1] << 32 | out[0].
    assert word(0, 0) == 0xE169C58D6627E8D5


def test_word_puts_seed_position_and_stream_into_key_and_counter() -> None:
    out = block((0x89ABCDEF, 0x01234567, Stream.RESIDUAL, 0), (0x76543210, 0xFEDCBA98))
    assert word(0xFEDCBA9876543210, 0x0123456789ABCDEF, Stream.RESIDUAL) == out[1] << 32 | out[0]


def test_only_the_low_64_bits_of_the_seed_count() -> None:
    assert word(-1, 5) == word(2**64 - 1, 5)
    assert word(-(2**63), 5) == word(2**63, 5)
    assert word(2**64 + 7, 5) == word(7, 5)


@given(seed=INT64, position=INT64, stream=st.sampled_from(Stream))
def test_tensors_agree_with_python(seed: int, position: int, stream: Stream) -> None:
    drawn = words(torch.tensor([seed]), torch.tensor([position]), stream)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [as_int64(word(seed, position, stream))]


@pytest.mark.parametrize("stream", Stream)
def test_tensors_agree_with_python_at_the_borders(stream: Stream) -> None:
    seeds, positions = torch.meshgrid(torch.tensor(BORDERS), torch.tensor(BORDERS), indexing="ij")
    expected = [[as_int64(word(s, p, stream)) for p in BORDERS] for s in BORDERS]
    assert words(seeds, positions, stream).tolist() == expected


def test_words_keep_shape_and_inputs() -> None:
    seed, position = torch.zeros(2, 3, dtype=torch.int64), torch.arange(6).view(2, 3)
    before = position.clone()
    assert words(seed, position).shape == (2, 3)
    assert torch.equal(position, before)
    assert words(seed[:0], position[:0]).shape == (0, 3)


def test_a_draw_depends_on_nothing_but_its_own_element() -> None:
    seeds = torch.tensor([1111, 2222, 3333, 4444])
    together = words(seeds, torch.full((4,), 9))
    alone = torch.cat([words(s.view(1), torch.tensor([9])) for s in seeds])
    assert torch.equal(together, alone)
    assert len(set(together.tolist())) == 4


def test_words_are_uniform() -> None:
    drawn = words_of(42, torch.arange(1 << 16))
    for shift in (0, 8, 24, 32, 56):  # bytes of both halves
        counts = torch.bincount((drawn >> shift) & 0xFF, minlength=256)
        chi_square(counts, [1 / 256] * 256, false_alarm=1e-5)


STREAM_PAIRS = [(a, b) for a in Stream for b in Stream if a < b]


@pytest.mark.parametrize(("first", "second"), STREAM_PAIRS, ids=lambda s: s.name)
def test_streams_are_independent(first: Stream, second: Stream) -> None:
    positions = torch.arange(1 << 14)
    pair = [(words_of(7, positions, s) >> 60) & 15 for s in (first, second)]
    counts = torch.bincount(16 * pair[0] + pair[1], minlength=256)
    chi_square(counts, [1 / 256] * 256, false_alarm=1e-5)


@pytest.mark.parametrize("lag", [1, 2, 4, 64])
def test_consecutive_positions_are_independent(lag: int) -> None:
    drawn = (words_of(7, torch.arange((1 << 14) + lag)) >> 60) & 15
    counts = torch.bincount(16 * drawn[:-lag] + drawn[lag:], minlength=256)
    chi_square(counts, [1 / 256] * 256, false_alarm=1e-5)


def test_neighbouring_seeds_are_independent() -> None:
    seeds = torch.arange((1 << 14) + 1)
    drawn = (words(seeds, torch.full_like(seeds, 3)) >> 60) & 15
    counts = torch.bincount(16 * drawn[:-1] + drawn[1:], minlength=256)
    chi_square(counts, [1 / 256] * 256, false_alarm=1e-5)


def test_a_neighbouring_seed_is_no_shifted_stream() -> None:
    positions = torch.arange(1000)
    mine, next_seed = (set(words_of(s, positions).tolist()) for s in (5, 6))
    assert len(mine) == 1000
    assert not mine & next_seed

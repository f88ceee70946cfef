"""Philox4x32-10: published vectors, and draws that depend on (seed, position, stream) alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepinfer.testing.philox import philox4x32, uniform, uniforms

WORDS = st.integers(0, 2**32 - 1)
LONGS = st.integers(0, 2**64 - 1)

# Random123, kat_vectors, "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> NDArray[np.uint32]:
    return np.array([int(word, 16) for word in text.split()], dtype=np.uint32)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_published_vectors(counter: str, key: str, output: str) -> None:
    result = philox4x32(words(counter), words(key))
    assert result.dtype == np.uint32
    np.testing.assert_array_equal(result, words(output))


def test_rows_are_independent_and_keep_their_shape() -> None:
    counters = np.stack([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = np.stack([words(key) for _, key, _ in KNOWN_ANSWERS])
    expected = np.stack([words(output) for _, _, output in KNOWN_ANSWERS])
    np.testing.assert_array_equal(philox4x32(counters, keys), expected)
    np.testing.assert_array_equal(philox4x32(counters[:, None], keys[:, None]), expected[:, None])
    assert philox4x32(counters[:0], keys[:0]).shape == (0, 4)


@given(LONGS, LONGS, WORDS)
def test_uniform_is_the_documented_function_of_the_words(
    seed: int, position: int, stream: int
) -> None:
    low = 2**32
    counter = np.array([position % low, position // low, stream, 0], dtype=np.uint32)
    key = np.array([seed % low, seed // low], dtype=np.uint32)
    first, second = (int(word) for word in philox4x32(counter, key)[:2])
    value = uniform(seed, position, stream)
    assert value == ((first * low + second) >> 11) / 2**53
    assert 0.0 <= value < 1.0


@given(st.lists(st.tuples(LONGS, LONGS), max_size=6), WORDS)
def test_a_row_does_not_depend_on_its_neighbours(rows: list[tuple[int, int]], stream: int) -> None:
    together = uniforms([seed for seed, _ in rows], [position for _, position in rows], stream)
    assert together.tolist() == [uniform(seed, position, stream) for seed, position in rows]


@given(LONGS, LONGS, WORDS, st.sampled_from(["seed", "position", "stream"]), st.integers(0, 31))
def test_every_bit_of_every_argument_matters(
    seed: int, position: int, stream: int, which: str, bit: int
) -> None:
    value = uniform(seed, position, stream)
    flips = [1 << bit] if which == "stream" else [1 << bit, 1 << (bit + 32)]
    for flip in flips:
        changed = uniform(
            seed ^ (flip if which == "seed" else 0),
            position ^ (flip if which == "position" else 0),
            stream ^ (flip if which == "stream" else 0),
        )
        assert changed != value


def test_draws_at_consecutive_positions_are_uniform() -> None:
    draws = uniforms([7] * 40_000, list(range(40_000)), 0)
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    chi_square = float(((counts - 2000.0) ** 2 / 2000.0).sum())
    assert chi_square < 43.8  # 19 degrees of freedom, one in a thousand

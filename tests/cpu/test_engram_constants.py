"""Constants of the n-gram hash against published values and an independent computation."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint.hf_config import load_model_config, parse_model_config
from deepinfer.config import ModelConfig
from deepinfer.errors import ConfigError
from deepinfer.model.engram import Engram, hash_multipliers, table_primes, table_rows
from deepinfer.model.linear import Precision
from deepinfer.testing.tiny import tiny_config

PRECISION = Precision(torch.float32, torch.float32)
# Model description 3.10 b: the released primes are 16000xxx.
RELEASED_PRIMES = {
    1: ["057 079 081 097 121 129 133 183", "189 207 211 253 277 289 307 321",
        "339 381 393 399 403 409 447 463"],
    14: ["477 487 499 507 511 573 609 627", "667 669 693 697 711 729 759 769",
         "781 799 813 819 841 877 879 889"],
}  # fmt: skip
# 3.10 c: rows of layer 1 for the classes (5, 17, 99091, 42).
RELEASED_ROWS = [
    3889985, 30570021, 40268302, 53854578, 74235168, 81029010, 100426120, 118891433, 143562967,
    153520896, 165847521, 186163984, 201532732, 215229454, 227289662, 255349519, 268223190,
    272362309, 293997170, 314318703, 333756862, 339748996, 352980399, 374793280,
]  # fmt: skip


@pytest.fixture
def tiny() -> ModelConfig:
    """The tiny configuration of model description 8.1, with its synthetic 300 classes."""
    sizes = {"engram_num_embeddings": [462, 630], "engram_compressed_vocab_size": 300}
    return parse_model_config(tiny_config(**sizes))


def engram(config: ModelConfig, layer: int) -> Engram:
    with torch.device("meta"):
        return Engram(config, layer, PRECISION)


def test_released_multipliers() -> None:
    assert hash_multipliers(1, 4, 99092) == [
        76632096046245, 4839876093313, 35959672319349, 73987337458391,
    ]  # fmt: skip
    assert hash_multipliers(14, 4, 99092) == [
        67716810739261, 51510806800915, 30921347202721, 82619226485591,
    ]  # fmt: skip


def test_tiny_multipliers() -> None:
    assert hash_multipliers(1, 4, 300) == [
        25312092204715445, 1598643339462077, 11877719498229879, 24438510811423417,
    ]  # fmt: skip
    assert hash_multipliers(4, 4, 300) == [
        27171098617865603, 1664016290499501, 24328227015100263, 6260917600735559,
    ]  # fmt: skip


@given(st.integers(0, 200), st.integers(1, 8), st.integers(1, 2**62))
def test_products_with_multipliers_fit_in_int64(layer: int, orders: int, classes: int) -> None:
    multipliers = hash_multipliers(layer, orders, classes)
    assert len(multipliers) == orders
    assert all(m % 2 == 1 and 0 <= (classes - 1) * m < 2**63 for m in multipliers)
    assert multipliers == hash_multipliers(layer, orders, classes)


def test_released_primes(released: ModelConfig) -> None:
    expected = [
        [[16_000_000 + int(digits) for digits in order.split()] for order in orders]
        for orders in RELEASED_PRIMES.values()
    ]
    assert table_primes(released) == expected
    assert table_rows(released) == [384_006_168, 384_016_682]
    assert table_rows(released) == list(released.engram_num_embeddings)


def test_tiny_primes(tiny: ModelConfig) -> None:
    assert table_primes(tiny) == [
        [[67, 71], [73, 79], [83, 89]], [[97, 101], [103, 107], [109, 113]],
    ]  # fmt: skip
    assert table_rows(tiny) == [462, 630]


def test_bench_and_oracle_rows(released: ModelConfig, oracle_folder: object) -> None:
    bench = dataclasses.replace(released, engram_layer_ids=(1,), engram_vocab_size=16000)
    assert table_rows(bench) == [386748]  # model description 8.2
    assert table_rows(load_model_config(oracle_folder)) == [2132, 2260]


@given(st.integers(1, 3000), st.integers(2, 5), st.integers(1, 5), st.integers(1, 3))
def test_primes_are_the_next_ones_that_are_free(
    start: int, ngram: int, heads: int, layers: int
) -> None:
    config = dataclasses.replace(
        parse_model_config(tiny_config(engram_layer_ids=[])),
        engram_layer_ids=tuple(range(layers)), engram_vocab_size=start,
        engram_max_ngram_size=ngram, engram_n_heads=heads,
    )  # fmt: skip
    needed = layers * (ngram - 1) * heads
    sieve = [n for n in range(2, start + 60 * needed + 100) if all(n % d for d in _up_to_root(n))]
    expected = [n for n in sieve if n >= start][:needed]
    assert list(itertools.chain(*itertools.chain(*table_primes(config)))) == expected
    assert [len(orders) for orders in table_primes(config)] == [ngram - 1] * layers


def _up_to_root(n: int) -> range:
    return range(2, int(n**0.5) + 1)


def test_primes_are_given_out_in_the_order_of_the_layer_list(tiny: ModelConfig) -> None:
    turned = dataclasses.replace(
        tiny, engram_layer_ids=(4, 1), engram_num_embeddings=(462, 630)
    )  # fmt: skip
    assert table_primes(turned) == table_primes(tiny)
    assert engram(turned, 4).primes.flatten().tolist() == [67, 71, 73, 79, 83, 89]
    assert engram(turned, 1).embed.weight.shape == (630, 32)
    assert engram(turned, 1).multipliers.tolist() == hash_multipliers(1, 4, 300)


def test_the_worked_example(released: ModelConfig) -> None:
    layer = engram(released, 1)
    m = layer.multipliers.tolist()
    states = [5 * m[0] ^ 17 * m[1]]
    states.append(states[-1] ^ 99091 * m[2])
    states.append(states[-1] ^ 42 * m[3])
    assert states == [306417207497384, 3562987775375502343, 3564964936466496321]
    assert layer.rows(torch.tensor([5, 17, 99091, 42])).tolist() == RELEASED_ROWS


@given(st.lists(st.tuples(*[st.integers(0, 299)] * 4), max_size=5))
def test_rows_by_the_formula(windows: list[tuple[int, ...]]) -> None:
    sizes = {"engram_num_embeddings": [462, 630], "engram_compressed_vocab_size": 300}
    config = parse_model_config(tiny_config(**sizes))
    for layer, primes in zip((1, 4), table_primes(config), strict=True):
        multipliers = hash_multipliers(layer, 4, 300)
        expected = []
        for window in windows:
            state, offset, rows = window[0] * multipliers[0], 0, []
            for order in (1, 2, 3):
                state ^= window[order] * multipliers[order]
                for prime in primes[order - 1]:
                    rows.append(state % prime + offset)
                    offset += prime
            expected.append(rows)
        classes = torch.tensor(windows, dtype=torch.int64).view(-1, 4)
        assert engram(config, layer).rows(classes).tolist() == expected


def test_a_table_with_too_few_rows_is_refused(tiny: ModelConfig) -> None:
    short = dataclasses.replace(tiny, engram_num_embeddings=(461, 630))
    with pytest.raises(ConfigError, match=r"engram_num_embeddings = 461 for layer 1; .* 462 rows"):
        engram(short, 1)
    longer = dataclasses.replace(tiny, engram_num_embeddings=(500, 630))
    assert engram(longer, 1).embed.weight.shape == (500, 32)

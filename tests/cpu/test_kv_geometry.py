"""Bytes of the cache against the published figures, and the rules for pages and rings."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.checkpoint.hf_config import parse_model_config
from deepinfer.checkpoint.released import RELEASED_CONFIG
from deepinfer.config import EngineOptions, Host, ModelConfig, max_rollback, resolve
from deepinfer.errors import ConfigError
from deepinfer.kv.geometry import CacheGeometry, cache_geometry
from deepinfer.kv.pool import CachePool
from deepinfer.testing.tiny import tiny_config

RELEASED = parse_model_config(RELEASED_CONFIG)
SIZES = {"engram_num_embeddings": [462, 630], "engram_compressed_vocab_size": 300}
TINY = parse_model_config(tiny_config(**SIZES))


def record_sizes(geometry: CacheGeometry) -> tuple[int, int, int]:
    index = geometry.index_code_bytes + geometry.index_scale_bytes
    return geometry.window_bytes, geometry.compressed_bytes, index


def test_records_have_their_published_sizes() -> None:
    assert record_sizes(cache_geometry(RELEASED, 64, 6)) == (528, 288, 68)
    assert record_sizes(cache_geometry(TINY, 16, 6)) == (66, 36, 34)


def test_a_token_takes_890_bytes_of_pages() -> None:
    for page_tokens in (16, 64, 1024):
        geometry = cache_geometry(RELEASED, page_tokens, 6)
        assert geometry.bytes_per_page == 890 * page_tokens
    assert cache_geometry(RELEASED, 64, 6).pages_for(1_048_576) * 64 * 890 == 933_232_640


def test_a_sequence_takes_its_windows_groups_and_history() -> None:
    """Model description 4.3, whose smallest window has no slack for rollback."""
    geometry = cache_geometry(RELEASED, 64, 0)
    assert geometry.ring_tokens == 128
    window = 43 * geometry.ring_tokens * geometry.window_bytes
    assert window == 2_906_112
    groups = 3 * geometry.group_tokens * 2 * 512 * 4
    assert geometry.bytes_per_slot == window + groups + 8 * 3
    with_slack = cache_geometry(RELEASED, 64, 6)
    assert with_slack.ring_tokens == 134
    assert 43 * with_slack.ring_tokens * with_slack.window_bytes == 3_042_336


@given(st.integers(1, 6))
def test_rings_are_long_enough_for_rollback(rows: int) -> None:
    """Model description 4.3: of m rows, window + m - 1 and ratio + m - 1 slots at least."""
    geometry = cache_geometry(RELEASED, 64, rows)
    assert geometry.ring_tokens >= 128 + rows - 1
    assert geometry.group_tokens >= 2 + rows - 1
    assert geometry.history_tokens >= 3 + rows
    assert geometry.rollback_tokens == rows


def test_layout_of_the_released_model() -> None:
    geometry = cache_geometry(RELEASED, 64, max_rollback(RELEASED))
    assert geometry.entries == {2: 32, 8: 32, 14: 32, 20: 64}
    assert geometry.pooling_layers == (2, 8, 14)
    assert (geometry.layers, geometry.draft_blocks, geometry.head_dim) == (40, 3, 512)


def test_models_without_compressed_layers() -> None:
    plain = dataclasses.replace(
        RELEASED, compress_ratios=(0,) * 43, kv_source_layer_ids=(), index_source_layer_ids=(),
        candidate_source_layer_id=None, num_nextn_predict_layers=0,
    )  # fmt: skip
    geometry = cache_geometry(plain, 1, 1)
    assert geometry.bytes_per_page == 0
    assert geometry.bytes_per_slot == 40 * 129 * 528 + 8 * geometry.history_tokens


@pytest.mark.parametrize(("model", "page_tokens", "unit"), [
    (RELEASED, 0, 16), (RELEASED, -16, 16), (RELEASED, 8, 16), (RELEASED, 63, 16),
    (RELEASED, 72, 16), (TINY, 24, 16),
])  # fmt: skip
def test_pages_that_would_split_a_group_or_a_block(
    model: ModelConfig, page_tokens: int, unit: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        cache_geometry(model, page_tokens, 6)
    message = str(caught.value)
    assert message.startswith(f"page_tokens = {page_tokens}; expected a multiple of {unit}: ")
    assert message.isprintable()


@given(st.integers(1, 200), st.integers(1, 20), st.booleans())
def test_a_page_is_refused_exactly_when_something_straddles_it(
    page_tokens: int, block: int, candidates: bool
) -> None:
    model = dataclasses.replace(
        RELEASED, candidate_block_size=block,
        candidate_source_layer_id=20 if candidates else None,
    )  # fmt: skip
    ends = {ratio: page_tokens / ratio / (block if candidates else 1) for ratio in (1, 2)}
    straddles = any(end != int(end) for end in ends.values())
    refused = False
    try:
        cache_geometry(model, page_tokens, 6)
    except ConfigError:
        refused = True
    assert refused == straddles


@given(st.integers(1, 40), st.booleans())
def test_default_pages_are_never_refused(block: int, candidates: bool) -> None:
    model = dataclasses.replace(
        RELEASED, candidate_block_size=block,
        candidate_source_layer_id=20 if candidates else None,
    )  # fmt: skip
    config, _ = resolve(EngineOptions("m"), {}, model, Host(cuda=False, cores=1))
    assert cache_geometry(model, config.page_tokens, 6).page_tokens == config.page_tokens


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_pages_for_tokens(tokens: int, sixteens: int) -> None:
    geometry = cache_geometry(RELEASED, 16 * sixteens, 6)
    pages = geometry.pages_for(tokens)
    assert pages * 16 * sixteens >= tokens > (pages - 1) * 16 * sixteens or pages == tokens == 0


@pytest.mark.parametrize("model", [RELEASED, TINY], ids=["released", "tiny"])
def test_the_pool_takes_the_bytes_that_are_counted(model: ModelConfig) -> None:
    geometry = cache_geometry(model, 32, max_rollback(model))
    pages, slots = 3, 2
    pool = CachePool(geometry, pages, slots, torch.device("meta"))
    paged = [*pool.compressed.values(), *pool.index_codes.values(), *pool.index_scales.values()]
    owned = [pool.window, pool.draft_window, *pool.groups.values(), pool.history]
    assert sum(tensor.nbytes for tensor in paged) == pages * geometry.bytes_per_page
    assert sum(tensor.nbytes for tensor in owned) == slots * geometry.bytes_per_slot
    assert {layer: t.shape[:2] for layer, t in pool.compressed.items()} == {
        layer: (pages, entries) for layer, entries in geometry.entries.items()
    }

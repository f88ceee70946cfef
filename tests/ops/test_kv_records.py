"""Stores and loads of packed records: composition, poison, canaries, independence of rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops import kv_records as reference
from deepinfer.ops.kv_records import triton as kernels
from deepinfer.ops.kv_records.spec import SPECS, poisoned
from deepinfer.ops.rms_norm import rms_norm
from deepinfer.ops.rms_norm.spec import EPS, exact_rows, weights
from deepinfer.ops.rope import rope
from deepinfer.ops.rope.spec import exact_rotations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "triton"])


def drawn(rows: int, dim: int, tail: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = exact_rows(generator, rows, dim).to(DEVICE)
    rotations = exact_rotations(generator, (rows,), tail).to(DEVICE)
    return x, weights(generator, dim).to(DEVICE), rotations


def places(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


@BACKENDS
def test_window_is_norm_rope_pack_and_comes_back(module) -> None:  # type: ignore[no-untyped-def]
    x, weight, rotations = drawn(4, 64, 32)
    keys = rope(rms_norm(x, weight, EPS), rotations)
    cache = poisoned(7, 66, DEVICE)
    records = module.store_window(x, weight, EPS, rotations, cache, places(6, -1, 0, 3))
    assert torch.equal(records, reference.pack_window(keys))
    loaded = module.load_window(cache, places(3, -1, 6, 0), torch.bfloat16)
    rounded = reference.round_window(keys)
    assert torch.equal(loaded, torch.stack([rounded[3], rounded[0] * 0, rounded[0], rounded[2]]))


@BACKENDS
def test_compressed_is_rope_pack_and_comes_back(module) -> None:  # type: ignore[no-untyped-def]
    x, _, rotations = drawn(3, 64, 32)
    cache = poisoned(5, 36, DEVICE)
    module.store_compressed(x, rotations, cache, places(4, -1, 1))
    loaded = module.load_compressed(cache, places(1, 4, -1), torch.float32)
    rounded = reference.round_compressed(rope(x, rotations)).float()
    assert torch.equal(loaded, torch.stack([rounded[2], rounded[0], rounded[0] * 0]))


@BACKENDS
def test_index_key_is_norm_rope_pack_and_comes_back(module) -> None:  # type: ignore[no-untyped-def]
    x, weight, rotations = drawn(3, 64, 32)
    codes, scales = poisoned(5, 32, DEVICE), poisoned(5, 2, DEVICE)
    module.store_index_key(x, weight, EPS, rotations, codes, scales, places(4, -1, 1))
    loaded = module.load_index_key(codes, scales, places(1, 4, -1), torch.bfloat16)
    rounded = reference.round_index(rope(rms_norm(x, weight, EPS), rotations))
    assert torch.equal(loaded, torch.stack([rounded[2], rounded[0], rounded[0] * 0]))


def store(module, kind: str, x: Tensor, weight: Tensor, turns: Tensor, cache, where) -> None:  # type: ignore[no-untyped-def]
    if kind == "window":
        module.store_window(x, weight, EPS, turns, cache[:, :66], where)
    elif kind == "compressed":
        module.store_compressed(x, turns, cache[:, :36], where)
    else:
        module.store_index_key(x, weight, EPS, turns, cache[:, :32], cache[:, 32:34], where)


@BACKENDS
@pytest.mark.parametrize(("kind", "width"), [("window", 66), ("compressed", 36), ("index", 34)])
def test_nothing_else_is_written(module, kind: str, width: int) -> None:  # type: ignore[no-untyped-def]
    """Rows around the cache, bytes behind its records, and rows that no place names."""
    x, weight, rotations = drawn(4, 64, 32)
    memory = torch.full((12, 80), 0xA5, dtype=torch.uint8, device=DEVICE)
    store(module, kind, x, weight, rotations, memory[2:9], places(6, -1, 0, 3))
    written = (memory != 0xA5).any(-1)
    assert written.nonzero().flatten().tolist() == [2, 5, 8]
    assert (memory[:, width:] == 0xA5).all()


@BACKENDS
@pytest.mark.parametrize("kind", ["window", "compressed", "index"])
def test_rows_without_a_place_change_nothing(module, kind: str) -> None:  # type: ignore[no-untyped-def]
    x, weight, rotations = drawn(3, 64, 32)
    memory = torch.randint(0, 256, (5, 80), dtype=torch.uint8).to(DEVICE)
    before = memory.clone()
    store(module, kind, x, weight, rotations, memory, places(-1, -7, -1))
    assert torch.equal(memory, before)


@pytest.mark.parametrize("kind", ["window", "compressed", "index"])
def test_a_row_alone_gives_what_it_gives_among_others(kind: str) -> None:
    x, weight, rotations = drawn(21, 64, 32)
    x = (x.float() * torch.rand(21, 64, device=DEVICE)).to(torch.bfloat16)
    x[0] = 1e15
    together = torch.zeros(21, 80, dtype=torch.uint8, device=DEVICE)
    alone = together.clone()
    store(kernels, kind, x, weight, rotations, together, torch.arange(21, device=DEVICE))
    for row in (1, 11, 20):
        only = slice(row, row + 1)
        store(kernels, kind, x[only], weight, rotations[only], alone, places(row))
        assert torch.equal(together[only], alone[only])


def test_index_query_alone_and_among_others() -> None:
    rotations = drawn(9, 64, 32)[2]
    queries = torch.randn(9, 4, 64).to(torch.bfloat16).to(DEVICE)
    together = kernels.index_query(queries, rotations)
    alone = kernels.index_query(queries[7:8, 2:3], rotations[7:8])
    assert torch.equal(together[7:8, 2:3], alone)
    assert torch.equal(together, reference.index_query(queries, rotations))


def test_cases_reach_past_two_gib() -> None:
    """The cases that claim it name a row that begins there."""
    for spec in SPECS:
        for case in spec.cases():
            if case.name == "past-2GiB":
                arguments = case.arguments(torch.device("cpu"))
                cache = arguments.get("cache", arguments.get("codes"))
                assert int(arguments["places"].max()) * cache.stride(0) >= 2**31, spec.name


def refused(function: Callable[[], object], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        function()


def test_refusals() -> None:
    x, weight, rotations = drawn(2, 64, 32)
    cache, where = poisoned(4, 66, DEVICE), places(0, 1)
    store_window = kernels.store_window
    refused(lambda: store_window(x.double(), weight, EPS, rotations, cache, where), "float64")
    refused(lambda: store_window(x[:, :48], weight, EPS, rotations, None, None), "multiple of 32")
    refused(lambda: store_window(x, weight, EPS, rotations, cache.T, where), "adjacent")
    refused(lambda: kernels.load_window(cache, where, torch.float64), "float64")
    refused(lambda: kernels.index_query(x[None, :, :32], drawn(1, 64, 64)[2]), "rotary")


@BACKENDS
def test_index_queries_with_a_batch_axis(module) -> None:  # type: ignore[no-untyped-def]
    """Rotations of the positions serve every sequence of the batch."""
    _, _, rotations = drawn(3, 64, 32)
    queries = torch.randn(2, 3, 4, 64).to(torch.bfloat16).to(DEVICE)
    found = module.index_query(queries, rotations)
    for alone, row in zip(queries, found, strict=True):
        assert torch.equal(module.index_query(alone, rotations), row)

"""Index scores from pages: against scores entry by entry, and bit for bit among their kernels."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.numerics import unpack_e2m1
from deepinfer.ops.index_scores import candidate_scores, paged_index_scores, tiles
from deepinfer.ops.index_scores import triton as kernels
from deepinfer.ops.kv_records import unpack_index_key
from deepinfer.ops.registry import specs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")


def case(name: str, operator: str = "paged_index_scores") -> dict[str, Any]:
    found = {c.name: c for c in specs()[operator].cases()}
    return found[name].arguments(DEVICE)


def taken_alone(arguments: dict[str, Any], row: int) -> dict[str, Any]:
    """The arguments with one row left."""
    names = {"queries", "weights", "sequence", "visible", "blocks"} & arguments.keys()
    return {**arguments, **{name: arguments[name][row : row + 1] for name in names}}


def with_idle_sequences(arguments: dict[str, Any]) -> dict[str, Any]:
    """So many sequences without rows that no kernel and no reference shares keys among rows."""
    table = arguments["page_table"]
    idle = table.new_full((len(arguments["queries"]), table.shape[1]), 10**9)
    return {**arguments, "page_table": torch.cat([table, idle])}


def slow(arguments: dict[str, Any]) -> Tensor:
    """Row by row and entry by entry in float64."""
    codes, scales = arguments["codes"], arguments["scales"]
    records = torch.cat([codes, scales], dim=-1).cpu()
    per_page = records.shape[1]
    table, width = arguments["page_table"].cpu(), arguments["width"]
    scores = torch.full((len(arguments["queries"]), width), -INF, dtype=torch.float64)
    for t, (query, weight) in enumerate(
        zip(arguments["queries"].cpu(), arguments["weights"].cpu(), strict=True)
    ):
        pages = table[int(arguments["sequence"][t])]
        for j in range(int(arguments["visible"][t])):
            record = records[pages[j // per_page], j % per_page]
            key = unpack_index_key(record, torch.float64)
            scores[t, j] = (torch.relu(query.double() @ key) * weight.double()).sum()
    return scores


@pytest.mark.parametrize("name", ["tiny", "chunk", "mixed order"])
@pytest.mark.parametrize("shared", [True, False])
def test_reference_entry_by_entry(name: str, shared: bool) -> None:
    arguments = case(name)
    expected = slow(arguments)
    found = paged_index_scores(**arguments if shared else with_idle_sequences(arguments))
    assert torch.equal(found.cpu() == -INF, expected == -INF)
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-6)


def test_float64_is_kept() -> None:
    arguments = case("tiny")
    arguments["queries"] = arguments["queries"].double()
    found = paged_index_scores(**arguments)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.cpu(), slow(arguments), rtol=1e-12, atol=1e-14)
    with pytest.raises(Unsupported, match="float64"):
        kernels.paged_index_scores(**arguments)


def test_candidates_are_a_part_of_all_scores() -> None:
    arguments = case("odd blocks", "candidate_scores")
    blocks, size = arguments.pop("blocks"), arguments.pop("block_size")
    found = candidate_scores(**arguments, blocks=blocks, block_size=size)
    entries = (blocks.long().unsqueeze(-1) * size + torch.arange(size, device=DEVICE)).flatten(1)
    width = int(entries.max()) + 1
    everything = paged_index_scores(**arguments, width=width)
    expected = everything.gather(1, entries.clamp_min(0)).masked_fill(entries < 0, -INF)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["chunk", "mixed order"])
def test_a_score_has_the_same_bits_in_every_kernel(name: str) -> None:
    """Rows that share keys, rows that do not, a row alone, and candidates."""
    arguments = case(name)
    rows, sequences = len(arguments["queries"]), len(arguments["page_table"])
    assert kernels.rows_share_keys(rows, sequences)
    assert not kernels.rows_share_keys(rows, rows + sequences)
    together = kernels.paged_index_scores(**arguments)
    apart = kernels.paged_index_scores(**with_idle_sequences(arguments))
    assert torch.equal(together, apart)
    for row in (0, rows - 1):
        alone = kernels.paged_index_scores(**taken_alone(arguments, row))
        assert torch.equal(alone, together[row : row + 1])
    size = 8
    blocks = torch.arange(-(-arguments["width"] // size), dtype=torch.int32, device=DEVICE)
    width = arguments.pop("width")
    some = {**taken_alone(arguments, rows - 1), "blocks": blocks.expand(1, -1)}
    listed = kernels.candidate_scores(**some, block_size=size)
    assert torch.equal(listed[:, :width], together[-1:])
    assert bool((listed[:, width:] == -INF).all())


@pytest.mark.parametrize(("shared", "ahead"), [(True, 1), (False, 2)])
def test_division_of_work_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, shared: bool, ahead: int
) -> None:
    """Any number of programs for a row, tiles of any size, and keys loaded earlier or later."""
    arguments = case("chunk")
    if not shared:
        arguments = with_idle_sequences(arguments)
    arguments["width"] += 100
    expected = kernels.paged_index_scores(**arguments)
    monkeypatch.setattr(kernels, "splits", lambda *_: 2)
    for name in ("ONE", "SEVERAL"):
        shape = kernels.Shape(reps=4, ahead=ahead, programs=1)
        monkeypatch.setattr(kernels, name, shape)
    assert torch.equal(kernels.paged_index_scores(**arguments), expected)


def test_splits() -> None:
    """Every processor has work, none waits for a second round, and no program is without a tile."""
    shape = kernels.Shape(reps=4, ahead=1, programs=528)
    assert kernels.splits(1, 100, shape) == 1
    assert kernels.splits(1, 16384, shape) == 128
    assert kernels.splits(64, 16384, shape) == 8
    assert kernels.splits(4096, 16384, shape) <= 2


@pytest.mark.parametrize("shared", [True, False])
def test_invisible_bytes_change_nothing(shared: bool) -> None:
    """Slots past the visible entries, foreign pages, and the unused end of the page table."""
    arguments = case("chunk")
    if not shared:
        arguments = with_idle_sequences(arguments)
    expected = kernels.paged_index_scores(**arguments)
    codes, scales = arguments["codes"], arguments["scales"]
    written = (scales != 0xFF).any(-1, keepdim=True)
    assert bool(written.any())
    assert not bool(written.all())
    arguments["codes"] = torch.where(written, codes, 0x5A)
    arguments["scales"] = torch.where(written, scales, 3)
    assert torch.equal(kernels.paged_index_scores(**arguments), expected)
    most = torch.zeros(len(arguments["page_table"]), dtype=torch.int64, device=DEVICE)
    most.scatter_reduce_(0, arguments["sequence"], arguments["visible"], "amax")
    first = torch.arange(arguments["page_table"].shape[1], device=DEVICE) * codes.shape[1]
    unused = first >= most.unsqueeze(-1)
    arguments["page_table"] = arguments["page_table"].masked_fill(unused, 10**12)
    assert torch.equal(kernels.paged_index_scores(**arguments), expected)


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_is_written_beside_the_result(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    arguments = case("chunk")
    if not shared:
        arguments = with_idle_sequences(arguments)
    rows, width = len(arguments["queries"]), arguments["width"]
    room = torch.full((rows + 2, width), 7.0, device=DEVICE)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: room[1:-1])
    found = kernels.paged_index_scores(**arguments)
    assert found.data_ptr() == room[1].data_ptr()
    assert bool((room[0] == 7).all())
    assert bool((room[-1] == 7).all())
    assert not bool((found == 7).any())


@triton.jit
def _unpack(words, gaps, out, DOT: tl.constexpr, PACKED: tl.constexpr):
    entry = tl.arange(0, 64)
    word = entry[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    gap = tl.load(gaps + entry)[None, :, None]
    found = tiles.unpack_words(tl.load(words + word), gap, DOT, PACKED)
    for nibble in tl.static_range(4):
        tl.store(out + nibble * 512 + word, found[nibble].to(tl.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_unpacked_words_are_exact(packed: bool) -> None:
    """Every nibble at every place, at scales that fall from 1 to 2^-126."""
    if packed and kernels.INTERPRETED:
        pytest.skip("the interpreter cannot run machine instructions")
    codes = torch.randint(0, 256, (64, 16), dtype=torch.uint8, device=DEVICE)
    gaps = torch.arange(64, dtype=torch.int32, device=DEVICE) * 2
    out = torch.empty(4, 64, 8, device=DEVICE)
    _unpack[(1,)](codes.view(torch.int16), gaps, out, DOT=kernels.DOT_DTYPE, PACKED=packed)
    expected = unpack_e2m1(codes) * torch.exp2(-gaps.float()).unsqueeze(-1)
    assert torch.equal(out.permute(1, 2, 0).flatten(1), expected)


def test_unsupported() -> None:
    arguments = case("tiny")
    wide = torch.full((*arguments["codes"].shape[:2], 40), 0, dtype=torch.uint8, device=DEVICE)
    wide[..., :16] = arguments["codes"]
    with pytest.raises(Unsupported, match="side by side"):
        kernels.paged_index_scores(**{**arguments, "codes": wide[..., :16]})
    narrow = {**arguments, "queries": arguments["queries"][..., :20]}
    with pytest.raises(Unsupported, match="20 channels"):
        kernels.paged_index_scores(**narrow)

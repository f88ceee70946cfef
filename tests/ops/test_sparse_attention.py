"""Sparse attention over packed records: properties of both Triton implementations, and decoding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.kernels.records import channels, compressed_tile, window_tile
from deepinfer.ops.kv_records import (
    pack_compressed,
    pack_window,
    unpack_compressed,
    unpack_window,
)
from deepinfer.ops.sparse_attention import attention_with_sink
from deepinfer.ops.sparse_attention.decode import sparse_attention_halves, sparse_attention_split
from deepinfer.ops.sparse_attention.reference import sparse_attention as reference
from deepinfer.ops.sparse_attention.spec import SPECS, make_arguments, moved
from deepinfer.ops.sparse_attention.triton import sparse_attention
from deepinfer.ops.spec import Arguments, Case
from deepinfer.testing.operators import check_case

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
SPLIT = [sparse_attention_halves, sparse_attention_split]
BOTH = pytest.mark.parametrize("function", [sparse_attention, *SPLIT])
Attention = Callable[..., tuple[Tensor, Tensor]]


def arguments(T: int, **sizes: Any) -> Arguments:
    return moved(make_arguments(torch.Generator().manual_seed(7), T, **sizes), DEVICE)


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("function", SPLIT)
def test_several_splits(function) -> None:  # type: ignore[no-untyped-def]
    sizes = {"D": 128, "W": 130, "K": 200, "share": 0.4}
    case = Case("splits", "tiny", lambda g, d: moved(make_arguments(g, 2, **sizes), d))
    check_case(SPECS[0], function, case, DEVICE)


@BOTH
def test_row_alone_equals_row_in_batch(function: Attention) -> None:
    a = arguments(3, D=128, W=70, K=130)
    together = function(**a)
    for row in range(3):
        rows = ("queries", "window_index", "compressed_index")
        alone = function(**{k: v[row : row + 1] if k in rows else v for k, v in a.items()})
        assert equal(alone, (together[0][row : row + 1], together[1][row : row + 1]))


@BOTH
def test_place_of_a_key_in_its_list_is_free(function: Attention) -> None:
    """Invalid entries between keys change nothing, neither do keys that no list names."""
    a = arguments(1, W=12, K=20, share=1.0)
    b = dict(a)
    gaps = torch.full((1, 24), -1, dtype=torch.int32, device=DEVICE)
    gaps[:, ::2] = a["window_index"]
    b["window_index"] = gaps
    for name in ("window", "own", "compressed"):
        used = a[name].ne(0xFF).any(-1, keepdim=True)
        b[name] = torch.where(used, a[name], 0)
    (out, lse), (other, other_lse) = function(**a), function(**b)
    torch.testing.assert_close(out, other, rtol=2**-6, atol=1e-3)
    torch.testing.assert_close(lse, other_lse, rtol=1e-4, atol=1e-4)
    b["window_index"] = a["window_index"]
    assert equal(function(**b), (out, lse))


@BOTH
def test_shared_lists_are_repeated_rows(function: Attention) -> None:
    """Queries that see the same keys, as those of a draft block: one list, expanded."""
    a = arguments(3)
    a["window_index"] = a["window_index"][:1].expand(3, -1)
    a["compressed_index"] = a["compressed_index"][:1].expand(3, -1)
    b = a | {k: a[k].contiguous() for k in ("window_index", "compressed_index")}
    assert equal(function(**a), function(**b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [reference, sparse_attention, *SPLIT])
def test_lists_apart_merge_by_lse(function: Attention, dtype: torch.dtype) -> None:
    a = arguments(2, share=0.7, dtype=dtype)
    a["sink"] = torch.full_like(a["sink"], -torch.inf)
    a["window_index"][1] = -1
    whole, whole_lse = function(**a)
    window, window_lse = function(**a | {"compressed": None, "compressed_index": None})
    compressed, compressed_lse = function(**a | {"window_index": a["window_index"][:, :0]})
    lse = torch.logaddexp2(window_lse, compressed_lse)
    merged = window * torch.exp2(window_lse - lse).unsqueeze(-1)
    merged = merged + compressed * torch.exp2(compressed_lse - lse).unsqueeze(-1)
    limit = 2**-6 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(merged, whole.float(), rtol=limit, atol=limit / 4)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-4)


@BOTH
def test_outputs_stay_in_their_place(function: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries around everything the launcher allocates are untouched."""
    frames: list[Tensor] = []
    empty = torch.empty

    def framed(*shape: Any, **options: Any) -> Tensor:
        sizes = torch.Size(shape[0] if isinstance(shape[0], tuple | torch.Size) else shape)
        frame = empty(sizes.numel() + 512, **options).fill_(77.0)
        frames.append(frame)
        return frame[256:-256].view(sizes)

    a = arguments(2, N=5)
    expected = function(**a)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", framed)
        found = function(**a)
    assert equal(found, expected)
    assert len(frames) >= 2
    for frame in frames:
        assert bool((frame[:256] == 77.0).all() & (frame[-256:] == 77.0).all())


def test_reference_equals_attention_over_unpacked_keys() -> None:
    a = arguments(5, W=12, K=20)
    wide = a | {"queries": a["queries"].double()}
    stored = torch.cat([a["window"], a["own"]])
    records = unpack_window(stored[a["window_index"].clamp(0).long()], torch.float64)
    more = unpack_compressed(a["compressed"][a["compressed_index"].clamp(0).long()], torch.float64)
    valid = torch.cat([a["window_index"], a["compressed_index"]], dim=1) >= 0
    expected = attention_with_sink(
        wide["queries"], torch.cat([records, more], dim=1), valid, a["sink"].double(), a["scale"]
    )
    torch.testing.assert_close(reference(**wide)[0], expected)
    out, _ = reference(**a | {"queries": a["queries"].float()})
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_float32_queries_are_exact_parts() -> None:
    """Three bf16 parts hold a float32: the kernel is as close to float64 as float32 is."""
    a = arguments(2, N=2, W=6, K=8, dtype=torch.float32)
    expected, lse = reference(**a | {"queries": a["queries"].double()})
    out, found = sparse_attention(**a)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found.double(), lse, rtol=2e-5, atol=2e-5)


@BOTH
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: {"queries": a["queries"].double()}, "float64"),
        (lambda a: {"queries": a["queries"][..., :48]}, "head dim"),
        (lambda a: {"window": a["window"][:, 1:]}, "records"),
        (lambda a: {"window_index": a["window_index"].long()}, "index list"),
        (lambda a: {"compressed_index": None}, "together"),
        (lambda a: {"sink": a["sink"][:1]}, "sink"),
    ],
)
def test_unsupported(
    function: Attention, change: Callable[[Arguments], Arguments], reason: str
) -> None:
    a = arguments(2)
    with pytest.raises(Unsupported, match=reason):
        function(**a | change(a))


@triton.jit
def _decode(records, out, order, ROW: tl.constexpr, D: tl.constexpr, FP4: tl.constexpr,
            KEYS: tl.constexpr, WIDE: tl.constexpr, dot: tl.constexpr):  # fmt: skip
    key = tl.arange(0, KEYS)
    record = records + key.to(tl.int64) * ROW
    if FP4:
        tile = compressed_tile(record, key >= 0, D, KEYS, WIDE, dot)
    else:
        tile = window_tile(record, key >= 0, D, KEYS, WIDE, dot)
    channel = channels(D, WIDE)
    tl.store(order + tl.arange(0, D), channel)
    tl.store(out + key[:, None] * D + channel[None, :], tile)


def _ptx(asm: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """What a block of PTX integer and bf16x2 instructions does, written from the ISA manual."""
    names = {f"${outputs + i}": x.astype(np.uint32) for i, x in enumerate(inputs)}

    def value(name: str) -> Any:
        return names[name] if name in names else np.uint32(int(name, 0))

    def prmt(a: Any, b: Any, selector: Any) -> Any:
        eight = a.astype(np.uint64) | np.asarray(b, np.uint64) << np.uint64(32)
        word = np.zeros_like(a)
        for place in range(4):
            pick = int(selector) >> (4 * place) & 15
            byte = (eight >> np.uint64(8 * (pick & 7)) & np.uint64(0xFF)).astype(np.uint32)
            # The top bit of a selector asks for copies of the byte's sign.
            byte = np.where(byte >= 0x80, 0xFF, 0) if pick & 8 else byte
            word = word | (byte << (8 * place)).astype(np.uint32)
        return word

    def product(a: Any, b: Any) -> Any:
        halves = []
        for shift in (0, 16):
            x, y = (((v >> shift) << 16).astype(np.uint32).view(np.float32) for v in (a, b))
            rounded = torch.from_numpy(x.astype(np.float64) * y).float().bfloat16()
            assert bool((rounded.double() == torch.from_numpy(x.astype(np.float64) * y)).all())
            halves.append(rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32))
        return halves[0] | halves[1] << 16

    operations = {
        "prmt.b32": prmt,
        "shr.s32": lambda a, n: (a.view(np.int32) >> np.int32(n)).view(np.uint32),
        "shl.b32": lambda a, n: (a << n).astype(np.uint32),
        "and.b32": lambda a, b: a & b,
        "mul.rn.bf16x2": product,
    }
    for line in asm.strip("{}").split(";"):
        operation, *operands = line.replace(",", " ").split() or [".reg"]
        if operation != ".reg":
            names[operands[0]] = operations[operation](*map(value, operands[1:]))
    return [names[f"${i}"] for i in range(outputs)]


def _inline(asm: Any, constraints: str, args: list[Any], dtype: Any, **_: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    text = getattr(asm, "value", asm)
    found = _ptx(text, [a.handle.data for a in args], len(dtype))
    return tuple(tl.tensor(TensorHandle(x, tl.uint32), args[0].type) for x in found)


@pytest.mark.parametrize("D", [128, 512])
@pytest.mark.parametrize("compiled", [True, False], ids=["bits", "arithmetic"])
def test_decoded_records(D: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every code with many scales, in the form of the GPU (its PTX evaluated) and in float32."""
    if INTERPRETED:
        monkeypatch.setattr(tl, "inline_asm_elementwise", _inline)
    dot = tl.bfloat16 if compiled else tl.float32
    dtype = torch.bfloat16 if compiled else torch.float32
    keys, generator = 16, torch.Generator().manual_seed(3)
    codes = torch.stack([torch.randperm(256, generator=generator) for _ in range(keys * 2)])
    codes = codes.view(-1)[: keys * D].repeat(D // 128)[: keys * D].view(keys, D).to(torch.uint8)
    finite = torch.where((codes & 0x7F) == 0x7F, 0x40, codes)
    e8m0 = torch.arange(keys * D // 32).view(keys, -1) % 45 + 105
    window = torch.cat([finite, e8m0.to(torch.uint8)], dim=1)
    e4m3 = torch.arange(keys * D // 16).view(keys, -1) % 126 + 1
    compressed = torch.cat([codes[:, : D // 2], e4m3.to(torch.uint8)], dim=1)
    for records, unpack in ((window, unpack_window), (compressed, unpack_compressed)):
        fp4 = records is compressed
        out = torch.empty(keys, D, dtype=dtype, device=DEVICE)
        order = torch.empty(D, dtype=torch.int32, device=DEVICE)
        _decode[(1,)](records.to(DEVICE), out, order, ROW=records.shape[1], D=D, FP4=fp4,
                      KEYS=keys, WIDE=True, dot=dot)  # fmt: skip
        assert sorted(order.tolist()) == list(range(D))
        expected = unpack(records, torch.float32) * 2.0**-16
        assert torch.equal(out.cpu().float(), expected)
        assert bool((expected != 0).float().mean() > 0.7)


def test_packed_zeros_keep_their_sign_or_vanish() -> None:
    """-0.0 in a key is no other than 0.0 to attention."""
    a = arguments(1, ring=4, own=0, entries=4, share=1.0)
    a["window"] = pack_window(torch.full((4, 64), -0.0)).to(DEVICE)
    a["compressed"] = pack_compressed(torch.zeros(4, 64)).to(DEVICE)
    out, lse = sparse_attention(**a)
    assert bool((out == 0).all())
    torch.testing.assert_close(lse, torch.full_like(lse, 32.0).log2())

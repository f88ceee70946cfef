"""Contract of sparse_attention, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.kv_records import pack_compressed, pack_window
from deepinfer.ops.sparse_attention.reference import sparse_attention
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of

Make = Callable[[torch.Generator, torch.device], Arguments]


def draw_index(generator: torch.Generator, T: int, n: int, entries: int, share: float) -> Tensor:
    """[T, n] int32 into `entries`, with repeats; about `share` of them valid, the rest negative."""
    if entries == 0:
        return torch.full((T, n), -1, dtype=torch.int32)
    index = torch.randint(0, entries, (T, n), generator=generator)
    drop = torch.rand(T, n, generator=generator) >= share
    return index.masked_fill(drop, -1).to(torch.int32)


def poison(records: Tensor, used: Tensor) -> Tensor:
    """Records with bytes 0xFF, which decode to NaN, in all rows that `used` does not name."""
    poisoned = torch.full_like(records, 0xFF)
    rows = used[(used >= 0) & (used < len(records))].long()
    poisoned[rows] = records[rows]
    return poisoned


def make_arguments(
    generator: torch.Generator,
    T: int,
    N: int = 4,
    D: int = 64,
    W: int = 12,
    K: int | None = 20,
    ring: int = 24,
    own: int = 6,
    entries: int = 40,
    share: float = 0.8,
    dtype: torch.dtype = torch.bfloat16,
    loudness: float = 1.0,
) -> Arguments:
    """Normal queries times `loudness`, normal keys, random lists; unread records hold NaN."""
    queries = torch.randn(T, N, D, generator=generator) * loudness
    window_index = draw_index(generator, T, W, ring + own, share)
    stored = pack_window(torch.randn(ring + own, D, generator=generator))
    stored = poison(stored, window_index)
    arguments: Arguments = {
        "queries": queries.to(dtype),
        "window": stored[:ring].clone(),
        "own": stored[ring:].clone(),
        "window_index": window_index,
        "compressed": None,
        "compressed_index": None,
        "sink": torch.randn(N, generator=generator),
        "scale": D**-0.5,
    }
    if K is not None:
        index = draw_index(generator, T, K, entries, share)
        packed = pack_compressed(torch.randn(entries, D, generator=generator))
        arguments |= {"compressed": poison(packed, index), "compressed_index": index}
    return arguments


def moved(arguments: Arguments, device: torch.device) -> Arguments:
    """Arguments with their tensors on a device."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def _random(T: int, **sizes: float | torch.dtype | None) -> Make:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        return moved(make_arguments(generator, T, **sizes), device)  # type: ignore[arg-type]

    return make


def _lists(generator: torch.Generator, device: torch.device) -> Arguments:
    """No key; one in either list, at the end; all the same key; the same in both lists."""
    a = make_arguments(generator, 6, N=3, W=12, K=20, share=1.0)
    window_index, compressed_index = a["window_index"], a["compressed_index"]
    window_index[:3] = -1
    compressed_index[:3] = -1
    window_index[1, -1] = 29
    compressed_index[2, -1] = 7
    window_index[3] = 5
    compressed_index[3] = -5
    window_index[4] = -(2**31)
    for name, index in (("window", window_index), ("compressed", compressed_index)):
        a[name] = poison(torch.where(a[name] == 0xFF, 0x38, a[name]), index)
    a["own"] = torch.where(a["own"] == 0xFF, 0x38, a["own"])
    return moved(a, device)


def _sinks(generator: torch.Generator, device: torch.device) -> Arguments:
    a = make_arguments(generator, 3, N=6, W=4, K=4)
    a["sink"] = torch.tensor([1e4, -1e4, float("-inf"), 0.0, 80.0, -80.0])
    a["window_index"][1] = -1
    a["compressed_index"][1] = -1
    return moved(a, device)


def _magnitudes(generator: torch.Generator, device: torch.device) -> Arguments:
    """Keys from 1e-30 to 3e4 by channel groups, zeros of both signs, scores up to 1e4."""
    a = make_arguments(generator, 4, N=2, D=128, W=10, K=10, ring=10, own=0, entries=10, share=1.0)
    powers = torch.tensor([1e-30, 1e-3, 1.0, 3e4]).repeat_interleave(32)
    keys = torch.randn(10, 128, generator=generator) * powers
    keys[3] = 0.0
    keys[4] = -0.0
    a["window"], a["compressed"] = pack_window(keys), pack_compressed(keys)
    a["queries"] = a["queries"] / powers.clamp_min(1e-3).to(a["queries"].dtype)
    a["queries"][:2] *= 1000.0
    return moved(a, device)


def _strided(generator: torch.Generator, device: torch.device) -> Arguments:
    """Queries and lists that are slices of wider tensors; shared lists; records with gaps."""
    a = moved(make_arguments(generator, 5, N=3, D=128, W=9, K=17), device)
    T, _, D = a["queries"].shape
    a["queries"] = (
        torch.cat([a["queries"]] * 2, dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
    )
    a["queries"] = a["queries"][..., D:]
    a["window_index"] = torch.cat([a["window_index"]] * 2, dim=-1)[:, 9:]
    a["compressed_index"] = a["compressed_index"][:1].expand(T, -1)
    for name in ("window", "compressed"):
        wider = torch.cat([a[name], a[name][:, :16]], dim=-1)
        a[name] = wider[:, : a[name].shape[1]]
    # One byte off: no wide loads.
    shifted = torch.zeros(a["own"].numel() + 1, dtype=torch.uint8, device=device)[1:]
    a["own"] = shifted.view_as(a["own"]).copy_(a["own"])
    return a


def _far(generator: torch.Generator, device: torch.device) -> Arguments:
    """Compressed records beyond 2^31 bytes of the first (only the GPU has room for them)."""
    a = moved(make_arguments(generator, 3, N=64, D=512, W=128, K=512), device)
    stride = 2**26 if device.type == "cuda" else 320
    far = torch.empty(39 * stride + 288, dtype=torch.uint8, device=device)
    view = far.as_strided((40, 288), (stride, 1))
    a["compressed"] = view.copy_(a["compressed"])
    return a


def _cases() -> Iterator[Case]:
    yield Case("3 rows", "tiny", _random(3, D=128))
    yield Case("3 rows, float32", "tiny", _random(3, dtype=torch.float32))
    yield Case("3 rows, float32, wide words", "tiny", _random(2, D=128, K=6, dtype=torch.float32))
    yield Case("several tiles", "tiny", _random(2, D=128, W=130, K=70, share=0.5))
    yield Case("no row", "hostile", _random(0))
    yield Case("1 row, 1 head", "hostile", _random(1, N=1))
    yield Case("48 heads", "hostile", _random(1, N=48))
    yield Case("65 heads", "hostile", _random(1, N=65, D=32))
    yield Case("no compressed records", "hostile", _random(2, K=None))
    yield Case("empty compressed list", "hostile", _random(2, K=0))
    yield Case("no window", "hostile", _random(2, W=0))
    yield Case("no key at all", "hostile", _random(2, W=0, K=0))
    yield Case("empty ring", "hostile", _random(2, ring=0, entries=0))
    yield Case("no own records", "hostile", _random(2, own=0, D=256))
    yield Case("scores of 1e4", "hostile", _random(2, loudness=3000.0))
    yield Case("lists", "hostile", _lists)
    yield Case("sinks", "hostile", _sinks)
    yield Case("magnitudes", "hostile", _magnitudes)
    yield Case("strided", "hostile", _strided)
    for T in (1, 16, 64, 128, 384, 4096):
        yield Case(f"{T} rows", "released", _released(T))
    yield Case("17 rows, half the keys", "released", _released(17, share=0.5))
    yield Case("17 rows, window only", "released", _released(17, K=None))
    yield Case("17 rows, float32", "released", _released(17, dtype=torch.float32))
    yield Case("17 rows, 8 heads", "released", _released(17, N=8))
    yield Case("far records", "released", _far)


def _released(
    T: int,
    N: int = 64,
    K: int | None = 512,
    share: float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Make:
    return _random(T, N=N, D=512, W=128, K=K, ring=max(256, T), own=T, entries=16384, share=share,
                   dtype=dtype)  # fmt: skip


def _work(arguments: Arguments) -> Work:
    """Each record of a list is read once per query; two products over all entries of the lists."""
    queries, window_index = arguments["queries"], arguments["window_index"]
    compressed_index = arguments["compressed_index"]
    T, N, D = queries.shape
    W = window_index.shape[1]
    K = 0 if compressed_index is None else compressed_index.shape[1]
    records = T * (W * (D + D // 32) + K * (D // 2 + D // 16))
    lists = size_of(window_index, compressed_index)
    return Work(2 * size_of(queries) + records + lists + 4 * T * N, 4 * T * N * (W + K) * D)


_GLUON = "deepinfer.ops.sparse_attention.gluon"

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="sparse_attention",
        summary="Attention with a sink over listed window (FP8) and compressed (FP4) records.",
        arguments=(
            Argument("queries", "T N D", "bf16 | fp32", "in", "queries; keys are values too"),
            Argument("window", "R D+D/32", "uint8", "in", "FP8 records of the ring"),
            Argument("own", "T2 D+D/32", "uint8", "in", "FP8 records of this step"),
            Argument("window_index", "T W", "int32", "in", "i < R ring, else own i - R; < 0 none"),
            Argument("compressed", "E D/2+D/16", "uint8 | None", "in", "FP4 records"),
            Argument("compressed_index", "T K", "int32 | None", "in", "records; < 0 none"),
            Argument("sink", "N", "fp32", "in", "logit that only enlarges the denominator"),
            Argument("scale", "", "float", "in", "factor of q . k"),
            Argument("out", "T N D", "as queries", "out", "0 for a query without keys"),
            Argument("lse", "T N", "fp32", "out", "log2 of the keys' sum, without the sink"),
        ),
        reference=sparse_attention,
        backends=(
            Backend("triton", "deepinfer.ops.sparse_attention.triton:sparse_attention"),
            Backend(
                "triton_halves", "deepinfer.ops.sparse_attention.decode:sparse_attention_halves"
            ),
            Backend("gluon", f"{_GLUON}:sparse_attention", narrow=True),
            Backend("gluon_halves", f"{_GLUON}:sparse_attention_halves", narrow=True),
            Backend("gluon_split", f"{_GLUON}:sparse_attention_split", narrow=True),
            Backend("triton_split", "deepinfer.ops.sparse_attention.decode:sparse_attention_split"),
        ),
        cases=_cases,
        work=_work,
        # P is rounded relative to another maximum than the reference's: an error of 2^-9 of each
        # weight, then bf16. Scores of 1e4 carry 1e-3 of float32 rounding into the weights.
        tolerance={"out": Tolerance("close", 2.0**-6), "lse": Tolerance("close", 5e-4)},
        stands_for=(
            "flash_mla.flash_mla_sparse_fwd",
            "flash_mla.flash_mla_with_kvcache",
            "load_paged_kv_cache",
        ),
    ),
)

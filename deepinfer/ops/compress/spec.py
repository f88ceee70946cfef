"""Contracts of compress_groups and store_groups, as data."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from deepinfer.ops.compress.reference import compress_groups, store_groups
from deepinfer.ops.rms_norm.spec import EPS, exact_rows, weights
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Tolerance, Work, size_of

Make = Callable[[torch.Generator, torch.device], Arguments]


def _state(rows: int, dim: int, device: torch.device, step: int | None = None) -> Tensor:
    """Never-written state [rows, 2, dim]: NaN. Rows lie `step` numbers apart."""
    step = 2 * dim if step is None else step
    memory = torch.empty(max(0, (rows - 1) * step + 2 * dim), device=device)
    return memory.as_strided((rows, 2, dim), (step, dim, 1)).fill_(float("nan"))


def _gates(generator: torch.Generator, rows: int, dim: int, kind: str) -> Tensor:
    """Gates [rows, dim]: random, equal, or so far apart that a softmax is one-hot exactly."""
    if kind == "random":
        return torch.randn(rows, dim, generator=generator) * 3
    if kind == "equal":
        return torch.full((rows, dim), 1.5)
    order = torch.arange(rows).unsqueeze(-1).float()
    sign = torch.randint(0, 2, (1, dim), generator=generator) * 2.0 - 1.0
    return order * sign * 300.0


def _compress(
    groups: int,
    tokens: int,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    gates: str = "random",
    step: int | None = None,
    padded: bool = False,
    strided: bool = False,
) -> Make:
    """About half of the groups begin in the state, whose other rows are poisoned."""

    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        begun = (groups + 1) // 2
        kept = begun + 3 if step is None else 4
        rows = max(groups * tokens - begun, 1)
        total = begun + rows
        drawn = exact_rows(generator, total, dim, torch.float32)
        gate = _gates(generator, total, dim, gates)
        old = torch.randperm(kept, generator=generator)[:begun]
        state = _state(kept, dim, device, step)
        state[old.to(device)] = torch.stack([drawn[:begun], gate[:begun]], 1).to(device)
        fresh = torch.randperm(rows, generator=generator)[: groups * tokens - begun] + kept
        places = torch.cat([old, fresh])
        places = places[torch.arange(groups * tokens).view(tokens, groups).T]
        if padded:
            places[1::2] = -1
        own, own_gate = drawn[begun:].to(device), gate[begun:].to(device)
        if strided:
            both = torch.cat([own, own_gate], dim=1)
            own, own_gate = both[:, :dim], both[:, dim:]
        return {
            "values": own,
            "gates": own_gate,
            "state": state,
            "places": places.to(device),
            "weight": weights(generator, dim).to(device),
            "eps": EPS,
            "dtype": dtype,
        }

    return make


def _compress_cases() -> Iterator[Case]:
    fp32 = torch.float32
    yield Case("5x2x64", "tiny", _compress(5, 2, 64))
    yield Case("3x4x64", "tiny", _compress(3, 4, 64))
    yield Case("5x2x64-fp32-one-hot", "tiny", _compress(5, 2, 64, fp32, "one-hot"))
    yield Case("no-groups", "hostile", _compress(0, 2, 64))
    yield Case("1x2x512", "hostile", _compress(1, 2, 512))
    yield Case("3x3x96", "hostile", _compress(3, 3, 96))
    yield Case("4x1x64", "hostile", _compress(4, 1, 64))
    yield Case("equal-gates", "hostile", _compress(5, 2, 64, gates="equal"))
    yield Case("one-hot", "hostile", _compress(5, 2, 64, gates="one-hot"))
    yield Case("padded", "hostile", _compress(5, 2, 64, padded=True))
    yield Case("strided", "hostile", _compress(5, 2, 64, strided=True))
    yield Case("past-2GiB", "hostile", _compress(7, 2, 64, step=2**28 + 16))
    for groups in (1, 64, 2048):
        yield Case(f"{groups}x2x512", "released", _compress(groups, 2, 512))
    yield Case("2048x2x512-padded", "released", _compress(2048, 2, 512, padded=True))


def _store(count: int, dim: int, skipped: float = 0.25, step: int | None = None) -> Make:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        kept, rows = (count + 3 if step is None else 4), count + 2
        targets = torch.randperm(kept, generator=generator)[:count]
        skip = torch.rand(count, generator=generator) < skipped
        chosen = torch.randint(0, rows, (count,), generator=generator)
        both = torch.randn(rows, 2 * dim, generator=generator).to(device)
        return {
            "values": both[:, :dim],
            "gates": both[:, dim:],
            "state": _state(kept, dim, device, step),
            "rows": chosen.to(device),
            "targets": torch.where(skip, -1, targets).to(device),
        }

    return make


def _store_cases() -> Iterator[Case]:
    yield Case("5x64", "tiny", _store(5, 64))
    yield Case("nothing", "hostile", _store(0, 64))
    yield Case("1x512", "hostile", _store(1, 512, 0.0))
    yield Case("7x96", "hostile", _store(7, 96))
    yield Case("nothing-kept", "hostile", _store(5, 64, 1.1))
    yield Case("past-2GiB", "hostile", _store(4, 64, 0.0, 2**28 + 16))
    for count in (1, 64, 4096):
        yield Case(f"{count}x512", "released", _store(count, 512))


def _compress_work(arguments: Arguments) -> Work:
    """Every token of every group is read once; latents are written."""
    places, values = arguments["places"], arguments["values"]
    dim, tokens = values.shape[-1], places.numel()
    written = places.shape[0] * dim * arguments["dtype"].itemsize
    moved = tokens * 2 * dim * values.element_size() + size_of(places, arguments["weight"])
    return Work(bytes=moved + written, flops=(8 * tokens + 5 * places.shape[0]) * dim)


def _store_work(arguments: Arguments) -> Work:
    rows, values = arguments["rows"], arguments["values"]
    return Work(bytes=rows.numel() * (4 * values.shape[-1] * values.element_size() + 16))


_VALUES = Argument("values", "T D", "fp32", "in", "compressor values of this step's rows")
_GATES = Argument("gates", "T D", "fp32", "in", "compressor gates of this step's rows")

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="compress_groups",
        summary="softmax pooling of token groups across steps, with the latent's norm",
        arguments=(
            _VALUES,
            _GATES,
            Argument("state", "R 2 D", "fp32", "in", "value and gate of rows of earlier steps"),
            Argument("places", "G r", "int64", "in", "below R: state; else R + row; negative: 0"),
            Argument("weight", "D", "fp32", "in", "of the norm"),
            Argument("latents", "G D", "bf16 | fp32", "out", "normalised"),
        ),
        reference=compress_groups,
        backends=(Backend("triton", "deepinfer.ops.compress.triton:compress_groups"),),
        cases=_compress_cases,
        work=_compress_work,
        # exp differs in its last bits between libraries.
        tolerance={"latents": Tolerance("rounding", limit=2.0**-6, share=0.02)},
        stands_for=("compress",),
    ),
    OpSpec(
        name="store_groups",
        summary="keep compressor inputs of rows for later steps",
        arguments=(
            _VALUES,
            _GATES,
            Argument("state", "R 2 D", "fp32", "inout", "value and gate of kept rows"),
            Argument("rows", "n", "int64", "in", "of this step"),
            Argument("targets", "n", "int64", "in", "rows of the state, distinct; negative: none"),
        ),
        reference=store_groups,
        backends=(Backend("triton", "deepinfer.ops.compress.triton:store_groups"),),
        cases=_store_cases,
        work=_store_work,
        stands_for=("compress", "state_cache"),
    ),
)

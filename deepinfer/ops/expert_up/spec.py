"""Contract of expert_up, as data, and what expert_down's cases are drawn with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.ops.act_quant.reference import fp8_quantise
from deepinfer.ops.expert_up.prepare import ExpertMatrices, prepare
from deepinfer.ops.expert_up.reference import expert_up
from deepinfer.ops.moe_plan.reference import moe_plan, plan_block
from deepinfer.ops.spec import (
    Argument,
    Arguments,
    Backend,
    Case,
    OpSpec,
    Tolerance,
    Work,
    size_of,
)


@dataclass(frozen=True)
class Setting:
    """What a case is made of.

    Attributes:
        scales: exponent bytes of weights, from the first to before the second.
        spread: rows and groups of activations are multiplied by 2^-spread to 2^spread.
        far: one group of every other matrix row is 2^-30 of the others.
        block: rows of a tile, 0: as the model chooses.
    """

    tokens: int
    experts: int
    selected: int
    hidden: int
    width: int
    scales: tuple[int, int] = (118, 124)
    spread: int = 3
    far: bool = False
    block: int = 0


def draw_matrices(
    setting: Setting, rows: int, columns: int, generator: torch.Generator, device: torch.device
) -> ExpertMatrices:
    """Random matrices [E, rows, columns], with groups of zeros whose scale is the smallest."""
    shape = (setting.experts, rows, columns // 2)
    # Bytes are drawn on the device: those of a layer take a minute on one processor core.
    seeded = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
    packed = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=seeded)
    scales = torch.randint(
        *setting.scales, (*shape[:2], columns // 32), dtype=torch.uint8, device=device,
        generator=seeded,
    )  # fmt: skip
    if columns >= 64:
        packed[:, ::3, :16] = 0x80
        scales[:, ::3, 0] = 0
    if setting.far:
        scales[:, ::2, -1] -= 30
    return prepare(packed, scales)


def draw_rows(
    setting: Setting, count: int, width: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Codes [count, width] and scales of rows whose groups differ in size."""
    x = torch.randn(count, width // 32, 32, generator=generator)
    limits = (-setting.spread, setting.spread + 1)
    power = torch.randint(*limits, (count, width // 32, 1), generator=generator)
    x = x * torch.exp2(power.float())
    x[:, :, ::9] = 0.0
    return fp8_quantise(x.flatten(1))


def draw_plan(
    setting: Setting, generator: torch.Generator, device: torch.device
) -> tuple[dict[str, Tensor], int]:
    """The plan of tokens with different experts each, and the rows of a tile."""
    s = setting
    keys = torch.rand(s.tokens, s.experts, generator=generator)
    ids = keys.topk(s.selected, dim=-1).indices.to(device)
    block = s.block or plan_block(s.tokens * s.selected, s.experts)
    order, ends, tiles = moe_plan(ids, s.experts, block)
    return {"order": order, "ends": ends, "tiles": tiles}, block


def _make(setting: Setting) -> Callable[[torch.Generator, torch.device], Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        s = setting
        x, x_scales = draw_rows(s, s.tokens, s.hidden, generator)
        plan, block = draw_plan(s, generator, device)
        return {
            "x": x.to(device),
            "x_scales": x_scales.to(device),
            "weights": draw_matrices(s, 2 * s.width, s.hidden, generator, device),
            **plan,
            "route": torch.rand(s.tokens, s.selected, generator=generator).to(device),
            "block": block,
            "limit": 10.0,
        }

    return make


SETTINGS: tuple[tuple[str, Setting], ...] = (
    ("3 tokens", Setting(3, 4, 2, 128, 64)),
    ("odd groups", Setting(2, 3, 2, 96, 32)),
    ("one group", Setting(2, 2, 1, 32, 32)),
    ("no tokens", Setting(0, 4, 2, 64, 32)),
    ("groups far apart", Setting(2, 2, 2, 192, 96, far=True)),
    ("two tiles", Setting(20, 2, 1, 64, 32, block=16)),
    ("small scales", Setting(1, 2, 1, 160, 32, scales=(1, 4))),
)


def cases(
    make: Callable[[Setting], Callable[[torch.Generator, torch.device], Arguments]],
) -> Iterator[Case]:
    """Cases of both halves of the experts."""
    for number, (name, setting) in enumerate(SETTINGS):
        yield Case(name, "tiny" if number < 2 else "hostile", make(setting))
    # Few of the 384 experts: the reference holds them in bfloat16.
    for tokens in (1, 8, 64, 1024):
        yield Case(f"{tokens} of 24", "released", make(Setting(tokens, 24, 6, 5120, 2304)))
    for tokens in (1, 8, 32, 64, 128, 1024, 8192):
        yield Case(f"{tokens} of 384", "large", make(Setting(tokens, 384, 6, 5120, 2304)))
    yield Case("64 far of 24", "released", make(Setting(64, 24, 6, 5120, 2304, far=True)))
    yield Case("tiles of 128", "released", make(Setting(1024, 24, 6, 5120, 2304, block=128)))


def matrix_work(arguments: Arguments, row_bytes: int) -> Work:
    """Every matrix that is touched once, and `row_bytes` for each routed row."""
    weights: ExpertMatrices = arguments["weights"]
    ends = arguments["ends"]
    touched = int((torch.diff(ends, prepend=ends.new_zeros(1)) > 0).sum())
    one = size_of(weights.codes, weights.shifts, weights.base) // weights.experts
    rows = len(arguments["order"])
    flops = 2 * rows * weights.rows * weights.width
    return Work(bytes=touched * one + rows * row_bytes, flops=flops)


def _work(arguments: Arguments) -> Work:
    half = arguments["weights"].rows // 2
    x = size_of(arguments["x"], arguments["x_scales"])
    work = matrix_work(arguments, half + half // 8)
    return Work(bytes=work.bytes + x, flops=work.flops)


PLAN = (
    Argument("order", "T*K", "int32", "in", "slot of each row, see moe_plan"),
    Argument("ends", "E", "int32", "in", "row after each expert's last"),
    Argument("tiles", "L 2", "int32", "in", "expert and first row of each tile"),
)

SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="expert_up",
        summary="w1, w3 and SwiGLU of the routed experts, from FP4 matrices",
        arguments=(
            Argument("x", "T H", "e4m3", "in", "codes, uint8 or float8_e4m3fn"),
            Argument("x_scales", "T H/32", "fp32", "in", "powers of two"),
            Argument("weights", "E 2I H", "FP4", "in", "what prepare returns for w1 and w3"),
            *PLAN,
            Argument("route", "T K", "fp32", "in", "route weights"),
            Argument("hidden", "T*K I", "e4m3", "out", "float8_e4m3fn codes in plan order"),
            Argument("scales", "T*K I/32", "fp32", "out", "powers of two"),
        ),
        reference=expert_up,
        backends=(
            Backend("triton", "deepinfer.ops.expert_up.triton:expert_up"),
            Backend("triton_exact", "deepinfer.ops.expert_up.triton:expert_up_exact"),
        ),
        cases=lambda: cases(_make),
        work=_work,
        # A tensor core's sums keep 14 bits: some bfloat16 values round the other way, and with them
        # codes by a step, or all codes of a group with its scale by a factor of two.
        tolerance={
            "hidden": Tolerance("rounding", limit=0.75, share=0.1),
            "scales": Tolerance("rounding", limit=1.0, share=0.02),
        },
        stands_for=(
            "deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous",
            "deep_gemm.fp8_fp4_mega_moe",
            "tile_kernels.quant.swiglu_forward_and_per_token_cast",
        ),
    ),
)

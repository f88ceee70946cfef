"""Contract of expert_down, as data."""

from collections.abc import Callable

import torch

from deepinfer.ops.expert_down.reference import expert_down
from deepinfer.ops.expert_up.spec import (
    PLAN,
    Setting,
    cases,
    draw_matrices,
    draw_plan,
    draw_rows,
    matrix_work,
)
from deepinfer.ops.spec import Argument, Arguments, Backend, OpSpec, Tolerance, Work


def _make(setting: Setting) -> Callable[[torch.Generator, torch.device], Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        s = setting
        hidden, scales = draw_rows(s, s.tokens * s.selected, s.width, generator)
        plan, block = draw_plan(s, generator, device)
        return {
            "hidden": hidden.to(device),
            "scales": scales.to(device),
            "weights": draw_matrices(s, s.hidden, s.width, generator, device),
            **plan,
            "block": block,
        }

    return make


def _work(arguments: Arguments) -> Work:
    weights = arguments["weights"]
    return matrix_work(arguments, weights.width + weights.width // 8 + 2 * weights.rows)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="expert_down",
        summary="w2 of the routed experts, from FP4 matrices",
        arguments=(
            Argument("hidden", "R I", "e4m3", "in", "codes in plan order, see expert_up"),
            Argument("scales", "R I/32", "fp32", "in", "powers of two"),
            Argument("weights", "E H I", "FP4", "in", "what prepare returns for w2"),
            *PLAN,
            Argument("y", "R H", "bf16", "out", "row t K + k: choice k of token t"),
        ),
        reference=expert_down,
        backends=(
            Backend("triton", "deepinfer.ops.expert_down.triton:expert_down"),
            Backend("triton_exact", "deepinfer.ops.expert_down.triton:expert_down_exact"),
        ),
        cases=lambda: cases(_make),
        work=_work,
        # A tensor core's sums keep 14 bits, which decides how some values round.
        tolerance={"y": Tolerance("rounding", limit=2.0**-6, share=0.25)},
        stands_for=(
            "deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous",
            "deep_gemm.fp8_fp4_mega_moe",
        ),
    ),
)

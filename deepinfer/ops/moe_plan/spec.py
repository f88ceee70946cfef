"""Contract of moe_plan, as data."""

from collections.abc import Callable, Iterator

import torch

from deepinfer.ops.moe_plan.reference import moe_plan, plan_block, plan_tiles
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def draw_ids(generator: torch.Generator, tokens: int, experts: int, selected: int) -> torch.Tensor:
    """[T, K] different experts of each token."""
    keys = torch.rand(tokens, experts, generator=generator)
    return keys.topk(selected, dim=-1).indices


def _make(
    tokens: int, experts: int, selected: int, block: int = 0, strided: bool = False
) -> Callable[[torch.Generator, torch.device], Arguments]:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        ids = draw_ids(generator, tokens, experts, selected).to(device)
        if strided:
            ids = torch.stack([ids, ids.flip(0)], dim=-1)[..., 0]
        rows = block or plan_block(tokens * selected, experts)
        return {"ids": ids, "experts": experts, "block": rows}

    return make


def _crowded(generator: torch.Generator, device: torch.device) -> Arguments:
    """Every token visits the same two experts, the last ones."""
    ids = torch.tensor([[15, 14]]).repeat(150, 1).to(device)
    return {"ids": ids, "experts": 16, "block": 16}


def _cases() -> Iterator[Case]:
    yield Case("5 tokens", "tiny", _make(5, 8, 2))
    yield Case("40 tokens", "tiny", _make(40, 8, 6))
    yield Case("70 tokens", "tiny", _make(70, 16, 4, 32))
    yield Case("no tokens", "hostile", _make(0, 8, 2))
    yield Case("1 token", "hostile", _make(1, 5, 1))
    yield Case("all experts", "hostile", _make(3, 33, 33))
    yield Case("crowded", "hostile", _crowded)
    yield Case("strided", "hostile", _make(9, 8, 3, strided=True))
    for tokens in (1, 8, 42, 43, 128, 1024, 8192):
        yield Case(f"{tokens} of 384", "released", _make(tokens, 384, 6))
    yield Case("40 of 128", "released", _make(40, 128, 3))
    yield Case("4096 in 16s", "released", _make(4096, 384, 6, 16))


def _work(arguments: Arguments) -> Work:
    ids, experts = arguments["ids"], int(arguments["experts"])
    tiles = plan_tiles(ids.numel(), experts, int(arguments["block"]))
    return Work(bytes=size_of(ids) + 4 * ids.numel() + 4 * experts + 8 * tiles)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="moe_plan",
        summary="rows sorted by expert, and the tiles of a product grouped by expert",
        arguments=(
            Argument("ids", "T K", "int64", "in", "experts of each token"),
            Argument("order", "T*K", "int32", "out", "slot t K + k of each row"),
            Argument("ends", "E", "int32", "out", "row after each expert's last"),
            Argument("tiles", "L 2", "int32", "out", "expert and first row of each tile, then -1"),
        ),
        reference=moe_plan,
        backends=(Backend("triton", "deepinfer.ops.moe_plan.triton:moe_plan"),),
        cases=_cases,
        work=_work,
        stands_for=("deep_gemm.fp8_fp4_mega_moe",),
    ),
)

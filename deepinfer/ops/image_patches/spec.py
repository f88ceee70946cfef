"""Contracts of the operators around the image encoder, as data."""

from collections.abc import Iterator

import torch

from deepinfer.ops.image_patches.reference import (
    image_cells,
    image_patches,
    replace_image_rows,
)
from deepinfer.ops.spec import Argument, Arguments, Backend, Case, OpSpec, Work, size_of


def _patch_case(name: str, kind: str, h: int, w: int, height: int, width: int, patch: int) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        pixels = torch.arange(h * w * 3, dtype=torch.int64) % 256
        pixels = pixels[torch.randperm(h * w * 3, generator=generator)]
        pixels = pixels.to(torch.uint8).view(h, w, 3)
        return {"pixels": pixels.to(device), "height": height, "width": width, "patch": patch}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _patch_cases() -> Iterator[Case]:
    yield _patch_case("all values", "tiny", 14, 28, 14, 28, 14)
    yield _patch_case("padded", "tiny", 9, 13, 12, 16, 4)
    yield _patch_case("odd padding", "hostile", 3, 4, 6, 9, 3)
    yield _patch_case("1 pixel", "hostile", 1, 1, 14, 14, 14)
    yield _patch_case("no pixel", "hostile", 0, 5, 4, 8, 4)
    yield _patch_case("544x544", "released", 540, 531, 546, 546, 14)
    yield _patch_case("1344x1344", "released", 1344, 1340, 1344, 1344, 14)


def _cell_case(
    name: str, kind: str, rows: int, columns: int, D: int, dtype: torch.dtype = torch.bfloat16
) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        features = torch.randn(rows * columns, D, generator=generator).to(dtype)
        return {"features": features.to(device), "rows": rows, "columns": columns}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _cell_cases() -> Iterator[Case]:
    yield _cell_case("3x6", "tiny", 3, 6, 16)
    yield _cell_case("padded", "tiny", 4, 5, 33, torch.float32)
    yield _cell_case("1x1", "hostile", 1, 1, 7)
    yield _cell_case("96x96", "released", 96, 96, 1024)
    yield _cell_case("39x40", "released", 39, 40, 1024)


def _row_case(
    name: str, kind: str, T: int, F: int, H: int, first: int, dtype: torch.dtype = torch.bfloat16
) -> Case:
    def make(generator: torch.Generator, device: torch.device) -> Arguments:
        x, features, delimiters = (
            torch.randn(size, H, generator=generator).to(dtype) for size in (T, F, 3)
        )
        wide = torch.zeros(T, H + 8, dtype=dtype, device=device)[:, :H]
        named = {
            "kinds": torch.randint(-1, 4, (T,), generator=generator).to(torch.int8),
            "features": features,
            "delimiters": delimiters,
            "first": torch.tensor([first]),
        }
        return {"x": wide.copy_(x), **{k: v.to(device) for k, v in named.items()}}

    return Case(name, kind, make)  # type: ignore[arg-type]


def _row_cases() -> Iterator[Case]:
    yield _row_case("20x64", "tiny", 20, 9, 64, 0)
    yield _row_case("later chunk", "tiny", 40, 20, 33, 7, torch.float32)
    yield _row_case("0 rows", "hostile", 0, 3, 16, 0)
    yield _row_case("no features", "hostile", 12, 0, 16, 0)
    yield _row_case("too few features", "hostile", 30, 3, 16, 1)
    yield _row_case("8192x5120", "released", 8192, 2000, 5120, 100)


def _patch_work(arguments: Arguments) -> Work:
    canvas = 3 * int(arguments["height"]) * int(arguments["width"])
    return Work(size_of(arguments["pixels"]) + 2 * canvas, 3 * canvas)


def _cell_work(arguments: Arguments) -> Work:
    return Work(2 * size_of(arguments["features"]))


def _row_work(arguments: Arguments) -> Work:
    return Work(2 * size_of(arguments["features"]) + size_of(arguments["kinds"]))


def _backend(name: str) -> tuple[Backend, ...]:
    return (Backend("triton", f"deepinfer.ops.image_patches.triton:{name}"),)


SPECS: tuple[OpSpec, ...] = (
    OpSpec(
        name="image_patches",
        summary="Normalised patches of an image in the middle of a canvas",
        arguments=(
            Argument("pixels", "h w 3", "uint8", "in", "red, green, blue"),
            Argument("patches", "N 3 p p", "bf16", "out", "row by row"),
        ),
        reference=image_patches,
        backends=_backend("image_patches"),
        cases=_patch_cases,
        work=_patch_work,
        stands_for=("image_embed_ops",),
    ),
    OpSpec(
        name="image_cells",
        summary="Square cells of the encoder's grid, channel by channel",
        arguments=(
            Argument("features", "N D", "bf16 | fp32", "in", "patches row by row"),
            Argument("cells", "C 9D", "as features", "out", "zeros outside of the grid"),
        ),
        reference=image_cells,
        backends=_backend("image_cells"),
        cases=_cell_cases,
        work=_cell_work,
        stands_for=("image_embed_ops",),
    ),
    OpSpec(
        name="replace_image_rows",
        summary="Image features and delimiters put into token rows",
        arguments=(
            Argument("x", "T H", "bf16 | fp32", "inout", "text rows stay"),
            Argument("kinds", "T", "int8", "in", "-1 text, 0 start, 1 image, 2 newline, 3 end"),
            Argument("features", "F H", "as x", "in", "of the image tokens in order"),
            Argument("delimiters", "3 H", "as x", "in", "start, newline, end"),
            Argument("first", "1", "int64", "in", "features that earlier rows have taken"),
        ),
        reference=replace_image_rows,
        backends=_backend("replace_image_rows"),
        cases=_row_cases,
        work=_row_work,
        stands_for=("image_embed_ops",),
    ),
)

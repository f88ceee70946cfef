"""Operators around the image encoder, the drafter's features, and context parallelism."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import Unsupported
from deepinfer.ops.cp_mirror import cp_mirror
from deepinfer.ops.cp_mirror import triton as mirrors
from deepinfer.ops.image_patches import image_cells, image_patches, replace_image_rows
from deepinfer.ops.image_patches import triton as kernels
from deepinfer.ops.stream_mean import stream_mean
from deepinfer.ops.stream_mean import triton as means

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normalised(value: int) -> float:
    return float(torch.tensor(value / 127.5 - 1).to(torch.bfloat16))


@pytest.mark.parametrize("function", [image_patches, kernels.image_patches])
@pytest.mark.parametrize(("h", "w"), [(5, 6), (4, 5), (3, 7), (8, 8)])
def test_patches_pixel_by_pixel(function: Any, h: int, w: int) -> None:
    """Odd room goes where Python's rounding puts it: 0.5 becomes 0, and 1.5 becomes 2."""
    pixels = torch.randint(0, 256, (h, w, 3), dtype=torch.uint8)
    patches = function(pixels.to(DEVICE), 8, 8, 4).cpu()
    top, left = round((8 - h) / 2), round((8 - w) / 2)
    assert patches.shape == (4, 3, 4, 4)
    for y in range(8):
        for x in range(8):
            inside = top <= y < top + h and left <= x < left + w
            expected = pixels[y - top, x - left].tolist() if inside else [127] * 3
            found = patches[y // 4 * 2 + x // 4, :, y % 4, x % 4].tolist()
            assert found == pytest.approx([normalised(v) for v in expected], abs=2**-8)


@pytest.mark.parametrize("function", [image_cells, kernels.image_cells])
def test_cells_are_those_of_unfold(function: Any) -> None:
    features = torch.randn(4 * 5, 6, device=DEVICE)
    grid = features.view(4, 5, 6).permute(2, 0, 1)
    padded = torch.nn.functional.pad(grid, (0, 1, 0, 2))
    unfolded = torch.nn.functional.unfold(padded.unsqueeze(0), 3, stride=3)
    assert torch.equal(function(features, 4, 5), unfolded[0].t())


def test_a_span_in_two_chunks_is_a_span_in_one() -> None:
    """Start, two lines of three cells, end: rows by hand, whole and cut in the middle."""
    kinds = torch.tensor([-1, 0, 1, 1, 1, 2, 1, 1, 1, 2, 3, -1], dtype=torch.int8, device=DEVICE)
    features, delimiters = (torch.randn(n, 20, device=DEVICE) for n in (6, 3))
    text = torch.randn(12, 20, device=DEVICE)
    f, d = list(features), list(delimiters)
    rows = [text[0], d[0], *f[:3], d[1], *f[3:], d[1], d[2], text[11]]
    expected = torch.stack(rows)
    for function in (replace_image_rows, kernels.replace_image_rows):
        for cut in (0, 4, 7, 12):
            x = text.clone()
            for part, first in (
                (slice(0, cut), 0),
                (slice(cut, 12), int((kinds[:cut] == 1).sum())),
            ):
                start = torch.tensor([first], device=DEVICE)
                function(x[part], kinds[part], features, delimiters, start)
            assert torch.equal(x, expected)


def test_rows_count_images_far_back() -> None:
    T = 1100
    kinds = torch.full((T,), -1, dtype=torch.int8, device=DEVICE)
    kinds[[3, 700, 1050, T - 1]] = 1
    features = torch.arange(5.0, device=DEVICE).unsqueeze(-1) + 1
    first = torch.tensor([1], device=DEVICE)
    expected, x = torch.zeros(2, T, 1, device=DEVICE)
    replace_image_rows(expected, kinds, features, features[:3], first)
    kernels.replace_image_rows(x, kinds, features, features[:3], first)
    assert torch.equal(x, expected)
    assert x[[3, 700, 1050, T - 1], 0].tolist() == [2, 3, 4, 5]


def shares(function: Any, sizes: list[int], ranks: int) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)
    length = sum(2 * -(-q // (2 * ranks)) for q in sizes)
    found = [function(starts, ranks, r, sum(sizes), length) for r in range(ranks)]
    for _, reverse in found:
        assert torch.equal(reverse, found[0][1])
    return torch.stack([mirror for mirror, _ in found]).cpu(), found[0][1].cpu()


@pytest.mark.parametrize("function", [cp_mirror, mirrors.cp_mirror])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_has_one_place(function: Any, ranks: int) -> None:
    sizes = [12, 0, 5, 1, 30]
    mirror, reverse = shares(function, sizes, ranks)
    rows = mirror.flatten()
    assert sorted(rows[rows >= 0].tolist()) == list(range(sum(sizes)))
    assert torch.equal(rows[reverse], torch.arange(sum(sizes)))


def test_work_is_balanced() -> None:
    """A row attends to all rows before it: the sums of positions are about equal."""
    mirror, _ = shares(cp_mirror, [1600], 4)
    work = mirror.double().sum(-1)
    assert float(work.max() / work.min()) < 1.001
    assert mirror[1, :200].tolist() == list(range(200, 400))
    assert mirror[1, 200:].tolist() == list(range(1200, 1400))


@pytest.mark.parametrize("function", [stream_mean, means.stream_mean])
def test_means_go_into_their_columns_only(function: Any) -> None:
    streams = torch.randn(3, 4, 10, device=DEVICE).to(torch.bfloat16)
    features = torch.full((3, 30), 7.0, dtype=torch.bfloat16, device=DEVICE)
    function(streams, features[:, 10:20])
    assert bool((features[:, :10] == 7).all())
    assert bool((features[:, 20:] == 7).all())
    exact = streams.double().mean(1)
    torch.testing.assert_close(features[:, 10:20].double(), exact, rtol=2**-8, atol=1e-6)


def test_refused() -> None:
    with pytest.raises(Unsupported, match="pixels"):
        kernels.image_patches(torch.zeros(4, 4, 3, device=DEVICE), 4, 4, 4)
    with pytest.raises(Unsupported, match="float64"):
        means.stream_mean(torch.zeros(1, 4, 8, dtype=torch.float64, device=DEVICE))

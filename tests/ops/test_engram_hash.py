"""engram_hash: the rows of the model description, tokens by themselves, refusals."""

from types import ModuleType

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.engram_hash import engram_hash
from deepinfer.ops.engram_hash.spec import draw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Layer 1 of the released model, classes (5, 17, 99091, 42).
MULTIPLIERS = [76632096046245, 4839876093313, 35959672319349, 73987337458391]
PRIMES = [
    [57, 79, 81, 97, 121, 129, 133, 183],
    [189, 207, 211, 253, 277, 289, 307, 321],
    [339, 381, 393, 399, 403, 409, 447, 463],
]
ROWS = [
    3889985, 30570021, 40268302, 53854578, 74235168, 81029010, 100426120, 118891433, 143562967,
    153520896, 165847521, 186163984, 201532732, 215229454, 227289662, 255349519, 268223190,
    272362309, 293997170, 314318703, 333756862, 339748996, 352980399, 374793280,
]  # fmt: skip


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from deepinfer.ops.engram_hash import triton

    return triton


def test_rows_of_the_released_model(kernels: ModuleType) -> None:
    primes = 16_000_000 + torch.tensor(PRIMES, device=DEVICE)
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
    classes = torch.tensor([5, 17, 99091, 42], device=DEVICE)
    multipliers = torch.tensor(MULTIPLIERS, device=DEVICE)
    for function in (engram_hash, kernels.engram_hash):
        assert function(classes, multipliers, primes, offsets).tolist() == ROWS


def test_leading_axes_and_tokens_by_themselves(kernels: ModuleType) -> None:
    a = draw(torch.Generator().manual_seed(1), DEVICE, 18, 4, 8)
    together = kernels.engram_hash(**a)
    alone = kernels.engram_hash(**{**a, "classes": a["classes"][17]})
    assert torch.equal(alone, together[17])
    nested = kernels.engram_hash(**{**a, "classes": a["classes"].view(2, 9, 4)})
    assert torch.equal(nested.view(18, -1), together)


def test_refuses_other_integers(kernels: ModuleType) -> None:
    a = draw(torch.Generator(), DEVICE, 2, 4, 8)
    with pytest.raises(Unsupported, match="int64"):
        kernels.engram_hash(**{**a, "classes": a["classes"].int()})

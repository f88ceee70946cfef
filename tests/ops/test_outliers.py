"""count_outliers by example, and refusals."""

import pytest
import torch

from deepinfer.errors import Unsupported
from deepinfer.ops.outliers import count_outliers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_counts(dtype: torch.dtype) -> None:
    from deepinfer.ops.outliers import triton

    x = torch.zeros(20, 37)
    x[0, 0], x[19, 36], x[3, 5] = torch.nan, torch.inf, -torch.inf
    x[7, 7], x[8, 8], x[9, 9] = 3.0, -2.5, 2.0
    x = x.to(DEVICE, dtype)
    for function in (count_outliers, triton.count_outliers):
        counts = function(x, 2.0)
        assert counts.dtype == torch.int32
        assert counts.tolist() == [3, 4]


def test_counts_start_anew() -> None:
    from deepinfer.ops.outliers import triton

    x = torch.full((2, 3), torch.nan, device=DEVICE)
    assert triton.count_outliers(x, 1.0).tolist() == [6, 0]
    assert triton.count_outliers(x.T, 1.0).tolist() == [6, 0]


def test_refuses_float64() -> None:
    from deepinfer.ops.outliers import triton

    with pytest.raises(Unsupported, match="float64"):
        triton.count_outliers(torch.zeros(2, 2, dtype=torch.float64, device=DEVICE), 1.0)

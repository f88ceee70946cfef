"""The sync guard, and the references under it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepinfer.ops.registry import specs
from deepinfer.ops.spec import OpSpec
from deepinfer.testing.sync import forbid_sync

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x.sum().item(), lambda x: bool((x > 0).any()), lambda x: x[x > 0],
        torch.nonzero, lambda x: int(x[0]),
    ],
)  # fmt: skip
def test_the_guard_sees_syncs(act: Callable[[Tensor], object]) -> None:
    x = torch.ones(3, device=DEVICE)
    act(x)
    with pytest.raises((AssertionError, RuntimeError)), forbid_sync():
        act(x)
    act(x)


def test_the_guard_lets_the_rest_pass() -> None:
    x = torch.ones(3, device=DEVICE)
    with forbid_sync():
        y = torch.where(x > 0, x * 2, x)[torch.arange(2, device=DEVICE)]
    assert y.tolist() == [2, 2]


@pytest.mark.parametrize("spec", specs().values(), ids=lambda spec: spec.name)
def test_references_do_not_sync(spec: OpSpec) -> None:
    for case in spec.cases():
        if case.kind == "tiny":
            arguments = case.arguments(DEVICE)
            spec.reference(**case.arguments(DEVICE))  # what is made once may wait
            with forbid_sync():
                spec.reference(**arguments)

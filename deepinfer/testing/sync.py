"""Finding operations that make the host wait for the device.

Knows which operations bring values to the host; must not know operators.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What reads a value, or makes a shape that depends on values.
_SYNCING = (
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "unique_dim", "_unique2", "unique_consecutive",
)  # fmt: skip


class SyncError(AssertionError):
    """Something waited for the device where nothing may."""


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)
            for i in args[1]
        )  # fmt: skip
        if name in _SYNCING or by_mask:
            raise SyncError(f"{func} brings values to the host")
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the device raises.

    With a GPU, CUDA itself watches (copies from pageable memory and everything else); without one,
    operations are judged by their names, so that a reference can be checked on any machine.

    Raises:
        SyncError: on a CPU. RuntimeError: on a GPU.
    """
    if not torch.cuda.is_available():
        with _Watch():  # type: ignore[no-untyped-call]
            yield
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says once that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

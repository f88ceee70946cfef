"""Triton kernel of entry_places.

Knows page tables; must not know what an entry holds. Nothing is read for a missing entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.kernels.launch import require_gpu
from deepinfer.kernels.signature import Signature

COLUMNS = 512  # entries of one program


@triton.jit(do_not_specialize=["pages"])
def _entry_places(
    entries,
    sequence,
    page_table,
    out,
    width,
    pages,
    PER_PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    entry = tl.load(entries + row * width + column, mask=inside, other=-1).to(tl.int64)
    exists = entry >= 0
    entry = tl.maximum(entry, 0)
    table = page_table + tl.load(sequence + row) * pages
    page = tl.load(table + entry // PER_PAGE, mask=exists, other=0)
    place = tl.where(exists, page * PER_PAGE + entry % PER_PAGE, -1)
    tl.store(out + row * width + column, place.to(tl.int32), mask=inside)


def entry_places(
    entries: Tensor, sequence: Tensor, page_table: Tensor, entries_per_page: int
) -> Tensor:
    """See the reference. Arguments that are not contiguous are copied first.

    Raises:
        Unsupported: no GPU.
    """
    require_gpu(entries)
    rows, width = entries.shape
    out = torch.empty((rows, width), dtype=torch.int32, device=entries.device)
    if out.numel():
        grid = (rows, triton.cdiv(width, COLUMNS))
        tensors = (entries.contiguous(), sequence.contiguous(), page_table.contiguous(), out)
        sizes = (width, page_table.shape[1])
        _entry_places[grid](*tensors, *sizes, PER_PAGE=entries_per_page, COLUMNS=COLUMNS)
    return out


SIGNATURES: tuple[Signature, ...] = tuple(
    Signature(
        f"entry_places {dtype}",
        _entry_places,
        {
            "entries": f"*{dtype}",
            "sequence": "*i64",
            "page_table": "*i64",
            "out": "*i32",
            "width": "i32",
            "pages": "i32",
        },
        {"PER_PAGE": 64, "COLUMNS": COLUMNS},
        divisible=("width",),
    )
    for dtype in ("i64", "i32")
)

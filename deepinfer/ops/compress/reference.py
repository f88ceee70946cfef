"""Reference of the compressor's pooling, and of the inputs it keeps for later steps.

Knows groups of tokens and rows of the kept state; must not know sequences or slots.
"""

import torch
from torch import Tensor

from deepinfer.ops.rms_norm import rms_norm


def pool_groups(values: Tensor, gates: Tensor) -> Tensor:
    """z[c] = sum_k softmax_k(g_k[c]) * a_k[c] per channel (model description 3.6).

    Args:
        values: a [..., r, D]; gates: g [..., r, D]; float32 or wider, r tokens of one group.

    Returns:
        [..., D] in the same dtype; the caller rounds it.
    """
    return (torch.softmax(gates, dim=-2) * values).sum(-2)


def compress_groups(
    values: Tensor,
    gates: Tensor,
    state: Tensor,
    places: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Latents of groups whose tokens lie in the kept state or among this step's rows.

    Token k of group g is row p = places[g, k] of the state if p < R, else row p - R of this step;
    a negative place has value 0 and gate 0, so a group of negative places gives zeros. The pooled
    group is rounded to `dtype`, then normalised as `ops.rms_norm` does.

    Args:
        values: [T, D], gates: [T, D]; float32 or wider, of this step's rows.
        state: [R, 2, D], value and gate of rows of earlier steps, in the dtype of `values`.
        places: [G, r] int64 below R + T.
        weight: [D] of the norm; eps: see `rms_norm`.

    Returns:
        [G, D] in `dtype`.
    """
    kept, present = state.shape[0], (places >= 0)[..., None, None]
    old = places < kept
    stored = state[torch.where(old, places, 0).clamp_min(0)] if kept else None
    fresh = torch.stack([values, gates], dim=1)
    if len(fresh):
        own = fresh[torch.where(old, 0, places - kept)]
        both = own if stored is None else torch.where(old[..., None, None], stored, own)
    else:
        assert stored is not None, "groups of nothing"
        both = stored
    both = torch.where(present, both, 0.0)
    return rms_norm(pool_groups(both[:, :, 0], both[:, :, 1]).to(dtype), weight, eps)


def store_groups(
    values: Tensor, gates: Tensor, state: Tensor, rows: Tensor, targets: Tensor
) -> None:
    """state[targets[i]] = (values[rows[i]], gates[rows[i]]) where targets[i] >= 0.

    Args:
        values: [T, D], gates: [T, D]; state: [R, 2, D] of the same dtype, changed in place.
        rows: [n] int64 from 0 to T - 1; targets: [n] int64, distinct where they are not negative.
    """
    if rows.numel() == 0:
        return
    both = torch.stack([values, gates], dim=1)[rows]
    # Without a device sync: rows without a target repeat the first write that there is; if there
    # is none, they write what row 0 holds already.
    valid = targets >= 0
    first = valid.to(torch.uint8).argmax(0, keepdim=True)
    target = targets[first].clamp_min(0)
    kept = torch.where(valid[first][:, None, None], both[first], state[target])
    state[torch.where(valid, targets, target)] = torch.where(valid[:, None, None], both, kept)

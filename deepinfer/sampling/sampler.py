"""From logits to tokens: temperature, top-k, top-p, min-p and the seeded draw, for a batch.

Knows logits, parameters, seeds and positions; must not know requests, tokens' text or the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.philox import uniforms

# Probabilities are summed as whole multiples of 2^-52. Integer sums come out the same in any order
# (a float scan on a GPU does not), and a sum of a distribution still fits a float64 exactly.
_UNIT = 2.0**52
# Philox stream of draws from the model's own distribution.
_STREAM_TOKEN = 0


class LogitsError(RequestError):
    """Logits of some rows are no distribution: NaN, +inf, or nothing but -inf.

    Attributes:
        rows: their row numbers, so that the other requests of the batch can go on.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"logits of rows {', '.join(map(str, rows))} cannot be sampled: expected a finite "
            "largest logit, found NaN, +inf or only -inf; end these requests and check the "
            "checkpoint, or what masked the logits"
        )


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> Tensor:
    """Draws one token per row from `filtered_probabilities` by inverse CDF in vocabulary order.

    The token is the first id whose cumulative mass exceeds u * total, u the uniform number of
    (seed, position, stream 0). Temperature 0 is the exact argmax, the lowest id of equals.

    Args:
        logits: [B, V] float32.
        params: B parameters; a row's result depends on its own entries only.
        seeds: B whole numbers in [0, 2^64), used where the row's own are resolved already.
        positions: B token positions.

    Returns:
        [B] int64. A logit of -inf is never drawn.

    Raises:
        LogitsError: rows hold NaN, +inf or nothing but -inf.
    """
    assert len(params) == len(seeds) == len(positions) == logits.shape[0]
    if all(row.temperature == 0 for row in params):
        _checked_max(logits)
        return logits.argmax(-1)
    cumulative = _masses(logits, params).cumsum(-1)  # [B, V] int64
    u = torch.from_numpy(uniforms(seeds, positions, _STREAM_TOKEN)).to(logits.device)
    # u <= 1 - 2^-53, so the rounded product stays below the total and an id is always found; for
    # whole numbers "more than x" and "more than floor(x)" are the same.
    target = (u * cumulative[:, -1]).floor().long().unsqueeze(-1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)


def filtered_probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The distribution that `sample` draws from.

    p = softmax(logits / temperature). In descending order of logits, the lower id first among
    equals, a token stays while fewer than top_k tokens and less than top_p mass of p precede it;
    tokens with p < min_p * max(p) go. What stays is divided by its sum. Temperature 0 gives 1 to
    the largest logit, the lowest id of equals. The most likely token always stays.

    Args:
        logits: [B, V] float32.
        params: B parameters; a row's result depends on its own entry only.

    Returns:
        [B, V] float32; probabilities below 2^-52 are 0.

    Raises:
        LogitsError: rows hold NaN, +inf or nothing but -inf.
    """
    masses = _masses(logits, params)
    return (masses.double() / masses.sum(-1, keepdim=True).double()).float()


def _masses(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Kept probabilities in units of 2^-52, not renormalised; [B, V] float32 -> [B, V] int64."""
    assert len(params) == logits.shape[0]
    largest = _checked_max(logits)
    # Outside float32's normal range a temperature would turn 0 / T or -inf / T into NaN; at its
    # ends the distribution already is one-hot or flat.
    ends = torch.finfo(torch.float32)
    temperatures = [min(max(row.temperature, ends.tiny), ends.max) for row in params]
    temperature = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
    scaled = (logits - largest) / temperature.unsqueeze(-1)
    masses = (torch.softmax(scaled, -1).double() * _UNIT).long()

    # Sorting is the expensive part, so only the rows that need it are sorted.
    cut = [i for i, row in enumerate(params) if row.top_k > 0 or row.top_p < 1]
    if cut:
        rows = torch.tensor(cut, device=logits.device)
        kept = _first_in_order(logits[rows], masses[rows], [params[i] for i in cut])
        masses[rows] = masses[rows] * kept
    faint = [i for i, row in enumerate(params) if row.min_p > 0]
    if faint:
        rows = torch.tensor(faint, device=logits.device)
        floor = [[params[i].min_p] for i in faint]
        share = torch.tensor(floor, dtype=torch.float64, device=logits.device)
        kept = masses[rows] >= share * masses[rows].amax(-1, keepdim=True)
        masses[rows] = masses[rows] * kept
    greedy = [i for i, row in enumerate(params) if row.temperature == 0]
    if greedy:
        rows = torch.tensor(greedy, device=logits.device)
        masses[rows] = 0
        masses[rows, logits[rows].argmax(-1)] = int(_UNIT)
    return masses


def _first_in_order(logits: Tensor, masses: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which tokens top-k and top-p keep, both measured on the same masses; [R, V] bool.

    Sorts by logit, not by mass: float32 probabilities tie where logits do not.
    """
    vocabulary = logits.shape[-1]
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    in_order = masses.gather(-1, order)
    before = in_order.cumsum(-1) - in_order  # mass of the tokens that come earlier
    counts = [[row.top_k if 0 < row.top_k < vocabulary else vocabulary] for row in params]
    # "off" is no bound at all: rounded masses may add up to a little more than 1.
    bounds = [[row.top_p * _UNIT if row.top_p < 1 else torch.inf] for row in params]
    count = torch.tensor(counts, device=logits.device)
    bound = torch.tensor(bounds, dtype=torch.float64, device=logits.device)
    kept = (torch.arange(vocabulary, device=logits.device) < count) & (before < bound)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _checked_max(logits: Tensor) -> Tensor:
    """The largest logit of every row, [B, 1]; amax passes NaN on, so one test finds all faults."""
    assert logits.dim() == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    largest = logits.amax(-1, keepdim=True)
    usable = largest.isfinite().squeeze(-1)
    if not bool(usable.all()):
        raise LogitsError((~usable).nonzero().flatten().tolist())
    return largest

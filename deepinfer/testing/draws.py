"""Tokens and log-probabilities of given rows, at once: what batches are compared with.

Knows logits, parameters, seeds and positions; must not know requests, tokens' text or the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.errors import RequestError
from deepinfer.ops.select import Operators, references
from deepinfer.ops.token_masses import token_masses
from deepinfer.sampling.logprobs import LogprobRows, TokenLogprobs
from deepinfer.sampling.params import SamplingParams


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
    operators: Operators | None = None,
) -> Tensor:
    """Draws one token per row from `filtered_probabilities` by inverse CDF in vocabulary order.

    The token is the first id whose cumulative mass exceeds u * total, u the uniform number of
    (seed, position, stream 0). Temperature 0 is the exact argmax, the lowest id of equals.

    Args:
        logits: [B, V] float32.
        params: B parameters; a row's result depends on its own entries only.
        seeds: B whole numbers in [0, 2^64), used where the row's own are resolved already.
        positions: B token positions.
        operators: default their references.

    Returns:
        [B] int64. A logit of -inf is never drawn.

    Raises:
        LogitsError: rows hold NaN, +inf or nothing but -inf.
    """
    assert len(params) == len(seeds) == len(positions) == logits.shape[0]
    if all(row.temperature == 0 for row in params):
        _refuse_faulty(logits)
        return logits.argmax(-1)
    # The bits of unsigned numbers.
    keys = torch.tensor([seeds, positions], dtype=torch.uint64).view(torch.int64)
    operator = (operators or references()).sample_tokens
    tokens: Tensor
    tokens, status = operator(logits, *_tensors(params, logits), *keys.to(logits.device))
    faulty = status.nonzero().flatten().tolist()
    if faulty:
        raise LogitsError(faulty)
    return tokens


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
    assert len(params) == logits.shape[0]
    _refuse_faulty(logits)
    masses, _ = token_masses(logits, *_tensors(params, logits))
    return (masses.double() / masses.sum(-1, keepdim=True).double()).float()


def _tensors(params: Sequence[SamplingParams], logits: Tensor) -> tuple[Tensor, ...]:
    """Temperature (float32), top-k, top-p and min-p (float64) of every row, in one copy."""
    assert logits.dim() == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    # Too small for float32, a temperature would become 0, which means something else.
    ends = torch.finfo(torch.float32)
    temperatures = [t and min(max(t, ends.tiny), ends.max) for t in (r.temperature for r in params)]
    # More than there are tokens is no limit, however many digits it has.
    counts = [min(row.top_k, logits.shape[-1]) for row in params]
    others = ([getattr(row, name) for row in params] for name in ("top_p", "min_p"))
    columns = torch.tensor([temperatures, counts, *others], dtype=torch.float64).to(logits.device)
    temperature, top_k, top_p, min_p = columns.unbind(0)
    return temperature.float(), top_k.long(), top_p, min_p


def _refuse_faulty(logits: Tensor) -> None:
    """Refuse rows that are no distribution; amax passes NaN on, so one test finds all faults."""
    assert logits.dim() == 2 and logits.dtype == torch.float32, (logits.shape, logits.dtype)
    usable = logits.amax(-1).isfinite()
    if not bool(usable.all()):
        raise LogitsError((~usable).nonzero().flatten().tolist())


def token_logprobs(
    logits: Tensor, tokens: Tensor, k: int | Sequence[int], operators: Operators | None = None
) -> list[TokenLogprobs]:
    """log_softmax of unprocessed logits at the tokens and at the k most likely ones.

    Temperature and filters have no part in it. Rank and `top` share one order: logits
    descending, the lower id first among equals.

    Args:
        logits: [B, V] float32.
        tokens: [B] int64 token ids.
        k: alternatives, of all rows or of each; more than V gives V.
        operators: default their references.

    Returns:
        One entry per row.
    """
    wanted = [k] * len(tokens) if isinstance(k, int) else k
    rows = LogprobRows.of(logits, tokens, wanted, operators or references())
    return rows.read(rows.pack().cpu())

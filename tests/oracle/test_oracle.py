"""Outputs of NVIDIA's NeMo-AutoModel on the checkpoint in this folder, and ours.

The files hold fp32 and bf16 results, with and without FP8 activations. Two correct programs differ
by rounding, and a difference of one bit can move a value to another FP4 or FP8 code, a token to
another expert, a query to another entry: most positions agree to the last digits, a few are far
off. So shares of positions and medians are compared, and maxima only for short cases.
"""

import pytest
import torch
from torch import Tensor

from deepinfer import LLM, SamplingParams
from deepinfer.config import DtypeName, EngineOptions
from deepinfer.engine.loading import Loaded, load
from deepinfer.model.recompute import recompute, recompute_draft
from deepinfer.testing.compare import distances, largest_difference
from tests.oracle.conftest import CASES, FOLDER, Dump, oracle_file

MODES = ["recompute", "cached", "chunked:7"]
SHORT = 16  # tokens up to which no position may be off

# Cases that may be off, by act_quant. With FP8 activations one value of case 6 lies 2e-7 from the
# middle of two codes: it rounds the other way here and moves everything that follows. The sums of
# another CPU may do that to one more case.
MAY_BE_OFF = {True: 2, False: 0}


def _own_streams(dump: dict[str, Tensor], positions: int) -> Tensor:
    """[layers, positions, S * H] of the last positions, as the oracle's files hold them."""
    layers = sum(name.startswith("streams.") for name in dump)
    streams = torch.stack([dump[f"streams.{layer}"] for layer in range(layers)])
    return streams[:, -positions:].flatten(2)


def _streams(dumped: Dump, act_quant: bool, mode: str, case: int) -> tuple[Tensor, Tensor]:
    expected = oracle_file("float32", act_quant)[f"case{case}.streams"]
    dump = dumped("float32", act_quant, mode, case)
    return _own_streams(dump, expected.shape[1]), expected.flatten(2)


def _agrees(actual: Tensor, expected: Tensor, tokens: int) -> bool:
    """Cosine of at least 0.9999 at 95 % of the rows, no value off in a short case."""
    share = (distances(actual, expected) <= 1e-4).double().mean().item()
    return share >= 0.95 and (tokens > SHORT or largest_difference(actual, expected) <= 1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act_quant", [False, True])
def test_float32_logits(dumped: Dump, act_quant: bool, mode: str) -> None:
    expected = oracle_file("float32", act_quant)
    off = []
    for case in range(CASES):
        logits = dumped("float32", act_quant, mode, case)["logits"]
        if not _agrees(logits, expected[f"case{case}.logits"], len(logits)):
            off.append(case)
    assert len(off) <= MAY_BE_OFF[act_quant], off


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act_quant", [False, True])
def test_float32_streams(dumped: Dump, act_quant: bool, mode: str) -> None:
    off = []
    for case in range(CASES):
        actual, expected = _streams(dumped, act_quant, mode, case)
        tokens = len(oracle_file("float32", act_quant)[f"case{case}.input_ids"])
        if not _agrees(actual, expected, tokens):
            off.append(case)
    assert len(off) <= MAY_BE_OFF[act_quant], off


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("act_quant", [False, True])
def test_most_positions_agree_to_the_last_digits(dumped: Dump, act_quant: bool, mode: str) -> None:
    """Measured: 1e-13. A constant that is wrong in its seventh digit shows here."""
    expected = oracle_file("float32", act_quant)
    medians = []
    for case in range(CASES):
        logits = dumped("float32", act_quant, mode, case)["logits"]
        medians.append(distances(logits, expected[f"case{case}.logits"]).median().item())
    off = [median for median in medians if median > 1e-11]
    assert len(off) <= MAY_BE_OFF[act_quant], medians


def _bfloat16_distances(dumped: Dump, act_quant: bool, case: int) -> tuple[Tensor, ...]:
    """How far our bf16 logits and the oracle's are from its fp32 logits, per position."""
    exact = oracle_file("float32", act_quant)[f"case{case}.logits"]
    theirs = oracle_file("bfloat16", act_quant)[f"case{case}.logits"]
    ours = dumped("bfloat16", act_quant, "cached", case)["logits"]
    return distances(ours, exact), distances(theirs, exact)


@pytest.mark.parametrize("act_quant", [False, True])
def test_bfloat16_costs_no_more_than_it_costs_the_oracle(dumped: Dump, act_quant: bool) -> None:
    """All positions: medians (measured ratio 0.93 to 1.09). A case: geometric means.

    The median of a single case jumps between positions in which something flipped and positions in
    which nothing did (33 positions: ratio 1.0 of the means, 1.6 of the medians); cases below 16
    positions are decided by one expert that another rounding chooses.
    """
    pairs = [_bfloat16_distances(dumped, act_quant, case) for case in range(CASES)]
    ours, theirs = (torch.cat(side) for side in zip(*pairs, strict=True))
    assert ours.median() <= 1.5 * theirs.median()
    for own, other in pairs:
        if len(own) >= SHORT:
            assert own.log().mean().exp() <= 1.5 * other.log().mean().exp()


def _greedy_ids(llm: LLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_greedy_tokens() -> None:
    """Token by token the oracle's, except where its own first two choices are 0.01 apart or less.

    After such a step the sequence goes on from the oracle's token. The prompt runs in chunks of 4.
    """
    file = oracle_file("float32", False)
    prompt, expected = file["greedy.prompt_ids"].tolist(), file["greedy.output_ids"].tolist()
    margins = file["greedy.margins"].tolist()
    llm = LLM(FOLDER, dtype="float32", act_quant=False, threads=1, max_num_seqs=1,
              max_num_batched_tokens=4)  # fmt: skip
    done, undecided = 0, 0
    while done < len(expected):
        ids = _greedy_ids(llm, prompt + expected[:done], len(expected) - done)
        same = [a == b for a, b in zip(ids, expected[done:], strict=True)]
        step = done + (same.index(False) if False in same else len(same))
        if step < len(expected):
            assert margins[step] <= 0.01, f"token {step}"
            undecided += 1
        done = step + 1
    assert len(expected) == 64
    assert undecided <= 3


@pytest.fixture(scope="module", params=[("float32", False), ("float32", True)])
def drafting(request: pytest.FixtureRequest) -> tuple[Loaded, dict[str, Tensor]]:
    dtype: DtypeName
    dtype, act_quant = request.param
    options = EngineOptions(model=str(FOLDER), dtype=dtype, act_quant=act_quant, threads=1)
    return load(options), oracle_file(dtype, act_quant)


@pytest.mark.parametrize("case", ["draft0", "draft1"])
def test_draft_rounds(drafting: tuple[Loaded, dict[str, Tensor]], case: str) -> None:
    loaded, file = drafting
    with torch.inference_mode():
        ids = file[f"{case}.input_ids"].long()
        taps = recompute(loaded.model, ids, loaded.token_map).taps
        assert taps is not None
        draft = recompute_draft(loaded.model, taps, file[f"{case}.next_id"].long()[0])
    assert largest_difference(taps, file[f"{case}.taps"]) < 1e-4
    assert largest_difference(draft.base_logits[0], file[f"{case}.base_logits"]) < 1e-4
    assert draft.token_ids[0].tolist() == file[f"{case}.draft_ids"].tolist()
    assert largest_difference(draft.confidence[0], file[f"{case}.confidence"]) < 1e-5

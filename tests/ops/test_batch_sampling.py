"""Batches draw with kernels what they draw with references; on a GPU the host waits for nothing."""

import torch

from deepinfer.ops.select import Wishes, references, select
from deepinfer.sampling.batch import Drawn, Masks, SamplingBatch
from deepinfer.sampling.params import SamplingParams
from deepinfer.testing.sync import forbid_sync

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
V, EOS = 300, 1
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.01, logprobs=3),
    SamplingParams(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0, 299: -4.0}, logprobs=0),
    SamplingParams(temperature=0.7, allowed_token_ids=[7, 14, 280, 299]),
    SamplingParams(temperature=0.0, banned_token_ids=[3, 7], min_tokens=3, stop_token_ids=[9]),
    SamplingParams(presence_penalty=-1.0, banned_token_ids=[0, 299], logprobs=2),
]


def draw(device: torch.device, backend: str) -> list[Drawn]:
    """Three steps of all rows in turn, a slot used again, masks, and a row of NaN."""
    operators = references()
    if backend == "triton":
        operators = select(Wishes(device=device.type, backend="triton", strict=True))
    slots = list(range(len(PARAMS)))
    batch = SamplingBatch(len(PARAMS), V, EOS, device, operators)
    prompt, outputs = [5, 5, 9, 299], [[7] for _ in slots]
    for slot in slots:
        batch.open(slot, PARAMS[slot], 100 + slot, prompt, outputs[slot])
    found = []
    for step in range(3):
        if step == 1:
            batch.close(2)
            batch.open(2, PARAMS[2], 7, prompt)
            outputs[2] = []
        order = slots[step:] + slots[:step]
        logits = torch.randn(len(order), V, generator=torch.Generator().manual_seed(step)) * 6
        if step == 2:
            logits[2, 11] = torch.nan
        bits = torch.full((1, (V + 31) // 32), -1 << 16, dtype=torch.int32)
        masks = Masks(bits.pin_memory() if ON_GPU else bits, [1]) if step % 2 else None
        logits = logits.to(device)
        positions = [len(prompt) + len(outputs[slot]) for slot in order]
        with forbid_sync():
            sampled = batch.sample(logits, order, positions, masks)
            packed = sampled.pack()
        drawn = sampled.read(packed.cpu())
        for slot, token in zip(order, drawn.tokens, strict=True):
            outputs[slot] += [token] if token >= 0 else []
        found.append(drawn)
    return found


def test_kernels_and_references_draw_the_same() -> None:
    """Logits lie so far apart that the last place of an exponential decides nothing."""
    expected = draw(torch.device("cpu"), "ref")
    found = draw(DEVICE, "triton")
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.faulty) == (other.tokens, other.faulty)
        assert one.logprobs.keys() == other.logprobs.keys()
        for row, entry in one.logprobs.items():
            same = other.logprobs[row]
            assert (entry.token_id, entry.rank) == (same.token_id, same.rank)
            assert [token for token, _ in entry.top] == [token for token, _ in same.top]
            assert abs(entry.logprob - same.logprob) < 1e-4
    assert expected[2].faulty == [2]

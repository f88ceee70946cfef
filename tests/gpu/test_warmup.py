"""After warming up nothing is compiled any more, whatever is asked, and graphs change no token."""

import importlib
import random
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

from deepinfer import LLM, SamplingParams
from deepinfer.testing.compilation import kernel_modules

DEMO = Path(__file__).parents[2] / "models" / "demo"


def loaded_kernels() -> dict[str, int]:
    """Compiled forms in memory of every kernel."""
    device = torch.cuda.current_device()
    counts = {}
    for module in kernel_modules():
        for name, value in vars(importlib.import_module(module)).items():
            if isinstance(value, JITFunction):
                counts[f"{module}.{name}"] = len(value.device_caches[device][0])
    return counts


def test_nothing_is_compiled_after_warming_up() -> None:
    llm = LLM(DEMO, device="cuda", max_num_batched_tokens=1024, ops_strict=True, enforce_eager=True)
    assert llm.warm_up() > 20
    before = loaded_kernels()
    draw = random.Random(5)
    prompts = [
        [draw.randrange(20, 4000) for _ in range(length)]
        for length in (1, 2, 15, 16, 17, 63, 64, 65, 100, 333, 700, 1025, 2900)
    ]
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.8, top_p=0.9)
    llm.generate(prompts, params)
    llm.generate(prompts[3], params)
    after = loaded_kernels()
    assert after == before, {name: after[name] - before[name] for name in after}


def test_decode_graphs_give_the_tokens_of_eager_steps() -> None:
    """One sequence: the rows of a step, and so the kernels, are the same in both."""
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompt = "Once upon a time there was a fox"
    tokens = []
    for eager in (True, False):
        llm = LLM(DEMO, device="cuda", max_num_seqs=2, max_model_len=1024, enforce_eager=eager)
        tokens.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert tokens[0] == tokens[1]

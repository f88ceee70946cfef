"""Random requests with every sampling parameter, and engines of random sizes to run them in."""

import random
from collections.abc import Callable
from typing import Any

from deepinfer import SamplingParams
from tests.cpu.engine_helpers import Asked

LONGEST = 60  # prompt; replies are up to 20 tokens


def random_params(rng: random.Random) -> SamplingParams:
    """A few of all parameters, a seed always."""
    tokens = rng.choice([1, 2, 3, 5, 9, 20])
    some: dict[str, Callable[[], Any]] = {
        "n": lambda: rng.choice([2, 3, 4]),
        "logprobs": lambda: rng.choice([0, 2]),
        "prompt_logprobs": lambda: rng.choice([0, 2]),
        "presence_penalty": lambda: 0.5,
        "repetition_penalty": lambda: 1.3,
        "frequency_penalty": lambda: 0.7,
        "stop_token_ids": lambda: rng.sample(range(512), 40),
        "stop": lambda: rng.sample(["e", "t", "in", "an", " "], 2),
        "include_stop_str_in_output": lambda: True,
        "min_tokens": lambda: rng.randint(0, tokens),
        "banned_token_ids": lambda: rng.sample(range(512), 60),
        "logit_bias": lambda: {rng.randrange(512): 5.0},
        "top_k": lambda: 5,
        "top_p": lambda: 0.8,
        "min_p": lambda: 0.05,
        "ignore_eos": lambda: True,
    }
    chosen = {name: value() for name, value in some.items() if rng.random() < 0.25}
    temperature = rng.choice([0.0, 0.7, 1.0])
    return SamplingParams(
        max_tokens=tokens, seed=rng.randrange(5), temperature=temperature, **chosen
    )


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts of three families, which begin alike, with ends of their own."""
    family = random.Random(rng.randrange(3))
    ids = [family.randrange(20, 500) for _ in range(rng.randint(1, LONGEST))]
    if rng.random() < 0.5:
        kept = rng.randint(0, len(ids) - 1)
        ids = ids[:kept] + [rng.randrange(20, 500) for _ in range(rng.randint(1, 8))]
    return ids[:LONGEST]


def random_story(rng: random.Random, most: int = 10) -> list[Asked]:
    """Up to `most` requests, some of them later than others."""
    step, story = 0, []
    for _ in range(rng.randint(1, most)):
        step += rng.choice([0, 0, 1, 5])
        story.append(Asked(random_prompt(rng), random_params(rng), step, rng.choice([0, 0, 1])))
    return story


def random_sizes(rng: random.Random) -> dict[str, int]:
    """Settings of an engine that may run such stories."""
    sequences = rng.choice([1, 2, 3, 4])
    return {
        "page_tokens": rng.choice([1, 2, 4, 8]), "max_num_seqs": sequences,
        "max_num_batched_tokens": sequences + rng.choice([0, 1, 6, 40]),
        "max_model_len": 80, "cache_tokens": rng.choice([80, 80, 96, 160, 400]),
        "prefix_checkpoints": rng.choice([0, 1, 3, 8]),
    }  # fmt: skip

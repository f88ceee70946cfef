"""The scheduler: everybody ends, with the tokens that a run alone would have given.

A made-up model on a device of lists runs what is planned (`scheduler_helpers`); it checks that
every row finds its own prefix in the pages and its own window in the slot, and the books are
audited after every step.
"""

import random

import pytest

from deepinfer.engine.sequence import Sequence
from tests.cpu.scheduler_helpers import Setting, World, expected


def random_setting(rng: random.Random) -> Setting:
    sequences = rng.randint(1, 4)
    return Setting(
        pages=rng.randint(4, 12),
        page_tokens=rng.choice([1, 2, 4]),
        window=rng.randint(1, 5),
        max_num_seqs=sequences,
        checkpoints=rng.choice([0, 1, 2, 4]),
        tokens=rng.randint(sequences, sequences + 12),
        interval=rng.choice([1, 4, 8]),
        overlap=rng.random() < 0.5,
    )


def random_group(rng: random.Random, name: str, capacity: int) -> list[Sequence]:
    """Sequences of one request; prompts have long common beginnings."""
    most = rng.randint(2, capacity)
    length = rng.randint(1, most - 1)
    family = random.Random(rng.randint(0, 2))
    prompt = [family.randrange(2) for _ in range(length)]
    if length > 1 and rng.random() < 0.5:
        prompt[-1] = 2
    count, priority = rng.choice([1, 1, 1, 2, 3]), rng.choice([0, 0, 1])
    deadline, reuse = rng.choice([None, None, 7.0]), rng.random() < 0.9
    return [
        Sequence(name, list(prompt), most, i, priority, deadline, reuse=reuse) for i in range(count)
    ]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_walks(first: int) -> None:
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        world = World(random_setting(rng))
        prompts: dict[Sequence, list[int]] = {}
        capacity = world.setting.pages * world.setting.page_tokens
        requests = 0
        for _ in range(40):
            for _ in range(rng.choice([0, 0, 1, 2])):
                group = random_group(rng, str(requests), capacity)
                prompts.update((sequence, list(sequence.tokens)) for sequence in group)
                world.scheduler.add(*group)
                requests += 1
            if requests and rng.random() < 0.1:
                world.abort(str(rng.randrange(requests)))
            world.now += rng.choice([0, 1])
            world.step()
        world.drain()
        assert set(world.ended) == set(prompts)
        assert len(world.ended) == len(prompts)
        for sequence, prompt in prompts.items():
            alone = expected(prompt, sequence.index, sequence.most_tokens - len(prompt))
            assert sequence.tokens == alone[: len(sequence.tokens)]
            assert sequence.ended_by or len(sequence.tokens) == sequence.most_tokens

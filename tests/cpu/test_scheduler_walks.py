"""The scheduler under random load: everybody ends, with the tokens that a run alone would give.

Tiny caches, so that hits, evictions, preemptions and refusals happen all the time; what is checked
after every step is in `scheduler_helpers`.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.sequence import Sequence
from deepinfer.errors import RequestError
from tests.cpu.scheduler_helpers import Setting, World, expected


def random_setting(rng: random.Random) -> Setting:
    sequences = rng.randint(1, 4)
    return Setting(
        pages=rng.randint(3, 12),
        page_tokens=rng.choice([1, 2, 4]),
        window=rng.randint(1, 5),
        max_num_seqs=sequences,
        checkpoints=rng.choice([0, 1, 2, 4]),
        tokens=rng.randint(sequences, sequences + 12),
        queue=rng.choice([3, 100]),
        interval=rng.choice([1, 4, 8]),
        spare_slots=rng.randint(0, 1),
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


def disturb(world: World, rng: random.Random) -> None:
    """What may happen between two steps."""
    if rng.random() < 0.1 and world.prompts:
        world.abort(rng.choice(list(world.prompts)).request_id)
    if rng.random() < 0.05 and world.scheduler.running:
        failed = rng.choice(list(world.scheduler.running))
        world.scheduler.finish(failed, keep=False)
        failed.ended_by = "abort"
        world.ended.append(failed)
    if rng.random() < 0.02:
        plan = world.scheduler.plan()
        world.ended += plan.ended
        world.begin_anew()  # before its copies have run
    world.now += rng.choice([0, 1])
    world.audit()


def walk(rng: random.Random, steps: int) -> World:
    world = World(random_setting(rng))
    capacity = world.setting.pages * world.setting.page_tokens
    for _ in range(steps):
        for _ in range(rng.choice([0, 0, 1, 2])):
            group = random_group(rng, str(len(world.prompts)), capacity)
            if len(world.scheduler.waiting) < world.setting.queue:
                world.scheduler.add(*group)
                world.prompts.update((sequence, list(sequence.tokens)) for sequence in group)
            else:
                with pytest.raises(RequestError, match="queue is full"):
                    world.scheduler.add(*group)
        disturb(world, rng)
        world.step()
    world.drain()
    return world


def check(world: World) -> None:
    """Everybody has one outcome, and the tokens that led there are right."""
    assert len(world.ended) == len(set(world.ended))
    assert set(world.ended) == set(world.prompts)
    for sequence, prompt in world.prompts.items():
        alone = expected(prompt, sequence.index, sequence.most_tokens - len(prompt))
        assert sequence.tokens == alone[: len(sequence.tokens)]
        assert sequence.ended_by or len(sequence.tokens) == sequence.most_tokens
    assert world.manager.available_pages == world.setting.pages
    world.manager.tree.clear()
    world.audit()
    assert world.manager.allocator.free_slots == world.manager.allocator.slots


@pytest.mark.parametrize("part", range(4))
def test_random_walks(part: int) -> None:
    rng = random.Random(part)
    counted = dict.fromkeys(("hits", "preempted", "forked", "expired", "evicted", "replaced"), 0)
    steps = 0
    while steps < 25_000:
        world = walk(rng, 60)
        tree, counters = world.manager.tree.counters, world.scheduler.counters
        seen = (tree.hits, counters.preempted, counters.forked, counters.expired,
                tree.pages_evicted, tree.checkpoints_evicted)  # fmt: skip
        counted = {name: n + more for (name, n), more in zip(counted.items(), seen, strict=True)}
        steps += world.steps
        check(world)
    assert min(counted.values()) > 100, counted  # the walk goes where it is to go


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_random_walks_that_shrink(rng: random.Random) -> None:
    check(walk(rng, 12))


def test_a_storm_of_10_000_requests_and_aborts() -> None:
    rng = random.Random(1)
    setting = Setting(
        pages=40, max_num_seqs=8, tokens=32, checkpoints=6, queue=20_000, overlap=True
    )
    world = World(setting)
    for number in range(10_000):
        group = random_group(rng, str(number), 60)
        world.scheduler.add(*group)
        world.prompts.update((sequence, list(sequence.tokens)) for sequence in group)
        # Most are gone before they run, some while they do, some are long over.
        world.abort(str(rng.choice([number, number, number - 1, rng.randrange(number + 1)])))
        if rng.random() < 0.2:
            world.step()
        world.now += 0.1
    for number in range(10_000):
        world.abort(str(number))
    assert not world.scheduler.has_work
    world.drain()
    check(world)

"""The scheduler, one rule at a time: budgets, order, prefix reuse, room, deadlines, endings.

A made-up model on a device of lists runs what is planned (`scheduler_helpers`); it checks that
every row finds its own prefix in the pages and its own window in the slot, and the books are
audited after every step.
"""

from itertools import pairwise
from typing import Any

import pytest

from deepinfer.engine.sequence import Sequence, State
from deepinfer.errors import RequestError
from tests.cpu.scheduler_helpers import Setting, World, expected, planned

BOTH_LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def ids(count: int, start: int = 0) -> list[int]:
    """A prompt that shares nothing with one of another start."""
    return [(start + number) % 200 for number in range(count)]


def test_a_prompt_runs_in_chunks_and_only_its_last_row_samples() -> None:
    world = World(Setting(tokens=5))
    world.add("a", ids(12), 2)
    steps = [world.step() for _ in range(4)]
    rows = [plan.rows[0] for plan in steps]
    assert [(row.start, row.count, row.samples) for row in rows] == [
        (0, 5, False), (5, 5, False), (10, 2, True), (12, 1, True),
    ]  # fmt: skip
    assert [plan.decodes for plan in steps] == [0, 0, 0, 1]
    assert world.ended[0].tokens == expected(ids(12), 0, 2)


def test_decodes_come_first_and_chunks_share_what_is_left_in_order() -> None:
    world = World(Setting(tokens=10, pages=32))
    world.add("a", ids(3), 9)
    world.add("b", ids(4, 50), 9)
    assert planned(world.step()) == [("a", 0, 3), ("b", 0, 4)]
    world.add("c", ids(11, 100), 9)
    world.add("d", ids(20, 150), 9)
    assert planned(world.step()) == [("a", 3, 1), ("b", 4, 1), ("c", 0, 8)]
    plan = world.step()
    assert sorted(planned(plan)[:2]) == [("a", 4, 1), ("b", 5, 1)]
    assert planned(plan)[2:] == [("c", 8, 3), ("d", 0, 5)]


def test_no_more_sequences_run_than_allowed() -> None:
    world = World(Setting(max_num_seqs=2, tokens=50))
    for number in range(4):
        world.add(str(number), ids(4, 50 * number), 3)
    assert planned(world.step()) == [("0", 0, 4), ("1", 0, 4)]
    assert len(world.scheduler.waiting) == 2
    world.drain()
    assert [sequence.request_id for sequence in world.ended] == ["0", "1", "2", "3"]


def test_priority_goes_before_arrival() -> None:
    world = World(Setting(max_num_seqs=1))
    for name, priority in (("a", 1), ("b", 1), ("c", 0), ("d", 2)):
        world.add(name, ids(4), 2, priority=priority)
    world.drain()
    assert [sequence.request_id for sequence in world.ended] == ["c", "a", "b", "d"]


def test_the_next_step_is_planned_before_tokens_are_known() -> None:
    world = World(Setting(overlap=True))
    sequence = world.add("a", ids(3), 3)
    flags = []
    for _ in range(3):
        plan = world.step()
        flags.append([(row.start, row.from_device) for row in plan.rows])
    assert flags == [[(0, False)], [(3, True)], [(4, True)]]
    assert sequence.pending == 1
    plan = world.step()  # its last token is on its way, no row is wasted on it
    assert plan.rows == []
    assert sequence.tokens == expected(ids(3), 0, 3)
    assert sequence.state is State.ENDED


@BOTH_LOOPS
def test_a_long_running_sequence_takes_pages_as_it_goes(overlap: bool) -> None:
    world = World(Setting(overlap=overlap))
    sequence = world.add("a", ids(2), 40)
    while sequence.state is not State.ENDED:
        world.step()
        held = len(sequence.blocks.pages) if sequence.blocks else 0
        assert held <= world.manager.pages_for(sequence.computed)


# --- prefix reuse ---


def test_the_same_prompt_again_computes_only_its_last_tokens() -> None:
    world = World(Setting(tokens=32))
    for length in (9, 11, 12, 13):  # around a page border
        name, prompt = str(length), ids(length, length)
        world.add(name, prompt, 2)
        world.drain()
        again = world.add(name, prompt, 2)
        first = (length - 1) // 4 * 4
        assert planned(world.step()) == [(name, first, length - first)]
        world.drain()
        assert again.cached_tokens == first
        assert again.tokens == expected(prompt, 0, 2)


def test_a_conversation_goes_on_from_the_end_of_the_last_answer() -> None:
    world = World(Setting(tokens=32))
    first = world.add("a", ids(6), 7)
    world.drain()
    prompt = [*first.tokens, *ids(3, 90)]
    second = world.add("b", prompt, 4)
    world.drain()
    assert second.cached_tokens == 12
    assert second.tokens == expected(prompt, 0, 4)


def test_the_third_request_with_a_common_beginning_hits_where_they_part() -> None:
    """The second one finds pages and no state; its prefill stops there to leave one."""
    world = World(Setting(tokens=32, pages=32))
    system = ids(10)
    plans, sequences = [], []
    for number in range(3):
        sequences.append(world.add(str(number), [*system, *ids(6, 100 + 10 * number)], 2))
        plans.append(planned(world.step()))
        world.drain()
    assert plans == [[("0", 0, 16)], [("1", 0, 8)], [("2", 8, 8)]]
    assert [sequence.cached_tokens for sequence in sequences] == [0, 0, 8]
    counters = world.manager.tree.counters
    assert counters.misses == {"empty": 1, "no_checkpoint": 1}
    assert (counters.hits, counters.tokens_reused) == (1, 8)


def test_running_sequences_are_reused_too() -> None:
    world = World(Setting(tokens=32, pages=32))
    prompt = ids(10)
    world.add("a", prompt, 20)
    world.step()
    second = world.add("b", prompt, 20)
    plan = world.step()
    assert planned(plan) == [("a", 10, 1), ("b", 8, 2)]
    assert len(plan.copies) == 2  # the checkpoint out of a, and from there into b
    world.drain()
    assert second.tokens == expected(prompt, 0, 20)


def test_a_long_prompt_leaves_checkpoints_on_its_way() -> None:
    world = World(Setting(tokens=8, pages=32, interval=16, checkpoints=8))
    prompt = ids(70)
    world.add("a", prompt, 2)
    world.drain()
    depths = sorted(node.depth for node in world.manager.tree.nodes() if node.slot >= 0)
    assert depths == [16, 32, 48, 64, 68]


def test_checkpoints_on_the_way_replace_none() -> None:
    world = World(Setting(tokens=8, pages=64, interval=8, checkpoints=2))
    world.add("a", ids(9), 2)
    world.drain()
    long = world.add("b", ids(100, 100), 2)
    while long.computed < 90:
        world.step()
    assert world.manager.tree.slots_owned == 2
    assert world.manager.tree.match(ids(9), (), 8).node.depth == 8


def test_who_needs_every_row_reuses_nothing() -> None:
    world = World(Setting(tokens=32))
    world.add("a", ids(9), 2)
    world.drain()
    world.add("b", ids(9), 2, reuse=False)
    assert planned(world.step()) == [("b", 0, 9)]
    assert world.manager.tree.counters.misses["disabled"] == 1


def test_without_checkpoints_nothing_is_kept() -> None:
    world = World(Setting(checkpoints=0))
    for _ in range(2):
        world.add("a", ids(9), 1)
        world.drain()
    assert world.manager.tree.counters.misses == {"disabled": 2}
    assert world.manager.allocator.free_pages == world.setting.pages


# --- several sequences of one request ---


@BOTH_LOOPS
def test_a_group_computes_its_prompt_once(overlap: bool) -> None:
    for length in (1, 4, 5, 7, 8):  # whole pages and parts
        world = World(Setting(tokens=32, pages=32, overlap=overlap))
        prompt = ids(length)
        group = world.add_group("a", prompt, 6, n=3)
        assert planned(world.step()) == [("a", 0, length)]
        plan = world.step()
        assert sorted((row.sequence.index, row.start) for row in plan.rows) == [
            (0, length), (1, length - 1), (2, length - 1),
        ]  # fmt: skip
        world.drain()
        assert world.scheduler.counters.forked == 2
        for sequence in group:
            assert sequence.tokens == expected(prompt, sequence.index, 6)


def test_who_finds_no_slot_waits_and_reuses_the_prompt() -> None:
    world = World(Setting(tokens=32, pages=32, max_num_seqs=2))
    group = world.add_group("a", ids(10), 6, n=4)
    world.drain()
    assert world.scheduler.counters.forked == 1
    assert [sequence.cached_tokens for sequence in group] == [0, 0, 8, 8]
    assert all(s.tokens == expected(ids(10), s.index, 6) for s in group)


def test_a_group_runs_no_more_sequences_than_allowed() -> None:
    world = World(Setting(tokens=32, pages=32, max_num_seqs=2, spare_slots=5))
    world.add_group("a", ids(10), 6, n=4)
    world.drain()
    assert world.scheduler.counters.forked == 1


def test_a_group_keeps_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(Setting(tokens=32, pages=32))
    kept = []
    checkpoint = world.manager.checkpoint

    def spy(blocks: Any, tokens: Any, depth: int, *args: Any, **options: Any) -> Any:
        kept.append(depth)
        return checkpoint(blocks, tokens, depth, *args, **options)

    monkeypatch.setattr(world.manager, "checkpoint", spy)
    world.add_group("a", ids(10), 6, n=4)
    world.drain()
    assert kept == [8]


def test_a_group_does_not_overtake_who_has_waited_longer() -> None:
    world = World(Setting(tokens=32, pages=32, max_num_seqs=2))
    group = world.add_group("a", ids(10), 6, n=2)
    world.step()
    urgent = world.add("b", ids(5, 90), 1, priority=-1)
    plan = world.step()
    assert planned(plan) == [("a", 10, 1), ("b", 0, 5)]
    assert group[1].state is State.WAITING
    world.drain()
    assert urgent in world.ended


def test_a_group_outlives_its_first_sequence() -> None:
    """It failed before its prompt was complete: the others compute it themselves."""
    world = World(Setting(tokens=4))
    group = world.add_group("a", ids(10), 3, n=3)
    world.step()
    world.scheduler.finish(group[0], keep=False)
    world.ended.append(group[0])
    world.drain()
    assert len(world.ended) == 3
    assert all(s.tokens == expected(ids(10), s.index, 3) for s in group[1:])


# --- room ---


def test_the_lowest_priority_makes_way_then_the_latest() -> None:
    """Three sequences of 4 pages fill 12; the first to need a page takes it from its inferiors."""
    setting = Setting(pages=12, tokens=64, checkpoints=0)
    for priorities, victim in (((0, 0, 0), 2), ((0, 1, 0), 1), ((1, 1, 0), 1), ((2, 1, 0), 0)):
        world = World(setting)
        sequences = [
            world.add(str(i), ids(16, 60 * i), 8, priority=priority)
            for i, priority in enumerate(priorities)
        ]
        world.step()
        plan = world.step()
        assert plan.preempted == [sequences[victim]]
        assert sequences[victim].state is State.WAITING
        assert sequences[victim].preemptions == 1
        assert all(row.sequence is not sequences[victim] for row in plan.rows)
        world.drain()
        assert all(s.tokens == expected(ids(16, 60 * i), 0, 8) for i, s in enumerate(sequences))


def test_cached_prefixes_go_before_anybody_has_to_make_way() -> None:
    world = World(Setting(pages=8, tokens=64))
    world.add("old", ids(12, 100), 1)
    world.drain()
    assert world.manager.tree.idle_pages == 3
    world.add("a", ids(14), 8)
    world.add("b", ids(6, 50), 2)
    world.drain()
    assert world.preempted == 0
    assert world.manager.tree.counters.pages_evicted > 0


def test_who_made_way_comes_back_when_others_have_room_to_grow() -> None:
    """Otherwise it would have to go again at the next page border."""
    world = World(Setting(pages=8, tokens=64, checkpoints=0, max_num_seqs=2))
    first = world.add("a", ids(16), 12)
    second = world.add("b", ids(15, 50), 12)
    while not world.preempted:
        world.step()
    assert second.state is State.WAITING
    while second.state is State.WAITING:
        world.step()
        assert second.preemptions == 1
    assert first.state is State.ENDED
    world.drain()
    assert second.preemptions == 1
    assert second.tokens == expected(ids(15, 50), 0, 12)


def test_who_made_way_leaves_a_page_to_each_of_the_others() -> None:
    """Its own pages are free when c ends, but a would take one of them back two tokens later."""
    world = World(Setting(pages=8, tokens=64, checkpoints=0))
    first = world.add("a", ids(12), 8)
    world.add("c", ids(8, 100), 2)
    second = world.add("b", ids(12, 50), 8)
    world.step()
    assert world.step().preempted == [second]
    while first.state is not State.ENDED:
        assert second.state is State.WAITING
        world.step()
    world.drain()
    assert second.preemptions == 1


@pytest.mark.parametrize("common", [8, 24], ids=["when it comes in", "later"])
def test_pages_that_a_running_prompt_still_needs_are_not_given_away(common: int) -> None:
    """a stops where it parts from an earlier prompt; what it leaves for now would do for b."""
    world = World(Setting(pages=15, tokens=16))
    world.add("old", ids(common + 6), 1)
    world.drain()
    world.add("a", [*ids(common), *ids(45 - common, 50)], 2)
    world.add("b", ids(16, 100), 2)
    rows = []
    while ("a", common, 16) not in rows:
        rows += planned(world.step())
    assert {name for name, _, _ in rows} == {"a"}
    world.drain()
    assert world.preempted == 0


def test_prompts_under_way_go_on_in_their_order() -> None:
    world = World(Setting(pages=32, tokens=16))
    world.add("old", ids(14), 1)
    world.drain()
    world.add("a", [*ids(8), *ids(20, 50)], 2)
    world.add("b", ids(16, 100), 2)
    assert planned(world.step()) == [("a", 0, 8), ("b", 0, 8)]
    assert planned(world.step()) == [("a", 8, 16)]
    assert planned(world.step()) == [("a", 24, 4), ("b", 8, 8)]


def test_an_answer_goes_on_after_making_way_from_where_it_was_kept() -> None:
    world = World(Setting(pages=9, tokens=64, max_num_seqs=2))
    world.add("a", ids(16), 3)
    second = world.add("b", ids(15, 50), 9)
    world.drain()
    assert second.preemptions == 1
    assert second.tokens == expected(ids(15, 50), 0, 9)
    assert world.manager.tree.counters.hits >= 1
    assert second.cached_tokens == 0  # of its prompt, when it first ran


@BOTH_LOOPS
@pytest.mark.parametrize("checkpoints", [0, 3])
def test_everybody_ends_whatever_the_number_of_pages(overlap: bool, checkpoints: int) -> None:
    """The first of those left advances at every step: steps are bounded by the tokens in all."""
    lengths = [(9, 11), (1, 19), (17, 3), (5, 9), (2, 18), (12, 8)]
    for pages in range(5, 16):
        setting = Setting(pages=pages, checkpoints=checkpoints, tokens=6, overlap=overlap)
        world = World(setting)
        sequences = [
            world.add(str(i), ids(prompt, 30 * i), generated)
            for i, (prompt, generated) in enumerate(lengths)
        ]
        world.drain(most=sum(map(sum, lengths)) + 2 * len(lengths))
        for i, (sequence, (prompt, generated)) in enumerate(zip(sequences, lengths, strict=True)):
            assert sequence.tokens == expected(ids(prompt, 30 * i), 0, generated)
        assert world.preempted or pages > 8


def test_a_waiting_long_prompt_is_not_overtaken_for_ever() -> None:
    world = World(Setting(pages=12, tokens=16))
    for number in range(3):
        world.add(f"short {number}", ids(8, 10 * number), 6)
    world.step()
    long = world.add("long", ids(40, 100), 2)
    for number in range(40):
        world.add(f"later {number}", ids(4, 3 * number), 6)
    for _ in range(40):
        world.step()
    assert long.state is State.ENDED


# --- who is not let in ---


def test_a_full_queue_refuses() -> None:
    world = World(Setting(queue=2, max_num_seqs=1))
    world.add("a", ids(4), 4)
    world.step()
    world.add("b", ids(4), 4)
    world.add_group("c", ids(4), 4, n=3)  # one request
    with pytest.raises(RequestError, match=r"queue is full: 2 requests wait, max_queue = 2; try"):
        world.add("d", ids(4), 4)
    assert world.scheduler.counters.refused == 1
    assert world.abort("d") == []
    world.drain()
    assert len(world.ended) == 5


def test_what_can_never_fit_is_refused() -> None:
    world = World(Setting(pages=4))
    world.add("a", ids(15), 1)
    with pytest.raises(RequestError, match=r"make 17 tokens, the cache holds 16; ask for less or"):
        world.add("b", ids(15), 2)
    world.drain()
    assert len(world.ended) == 1


def test_an_id_in_use_is_refused() -> None:
    world = World(Setting())
    world.add("a", ids(4), 1)
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        world.add("a", ids(4), 1)
    world.drain()
    world.add("a", ids(4), 1)
    world.drain()


# --- deadlines ---


@BOTH_LOOPS
def test_deadlines_end_who_waits_and_who_runs(overlap: bool) -> None:
    world = World(Setting(max_num_seqs=1, overlap=overlap))
    running = world.add("a", ids(6), 40, deadline_s=5.0)
    waiting = world.add("b", ids(6), 40, deadline_s=3.0)
    patient = world.add("c", ids(6), 4)
    seen: dict[float, list[Sequence]] = {}
    for now in range(8):
        world.now = float(now)
        seen[now] = world.step().ended
    assert {now: gone for now, gone in seen.items() if gone} == {3: [waiting], 5: [running]}
    assert running.ended_by == waiting.ended_by == "deadline"
    assert waiting.tokens == ids(6)
    assert len(running.tokens) > 6
    world.drain()
    assert patient.ended_by is None
    assert world.scheduler.counters.expired == 2


def test_a_deadline_ends_a_whole_group() -> None:
    world = World(Setting(tokens=4))
    most = 20
    group = [Sequence("a", ids(10), most, index=i, deadline_s=1.0) for i in range(3)]
    world.scheduler.add(*group)
    world.step()
    world.now = 1.0
    assert world.step().ended == group
    assert not world.scheduler.has_work


# --- endings ---


@BOTH_LOOPS
@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_moment_frees_everything(overlap: bool, steps: int) -> None:
    """While it waits, in its prompt, before and after it forked, with a row under way."""
    for length in (10, 12):
        world = World(Setting(tokens=5, overlap=overlap))
        group = world.add_group("a", ids(length), 9, n=2)
        other = world.add("b", ids(5, 50), 9)
        for _ in range(steps):
            world.step()
        assert world.abort("a") == group
        assert {sequence.ended_by for sequence in group} == {"abort"}
        world.audit()
        assert world.abort("a") == []
        world.drain()
        assert other.tokens == expected(ids(5, 50), 0, 9)
        assert world.manager.available_pages == world.setting.pages
        assert world.scheduler.counters.aborted == 2


def test_what_an_aborted_request_computed_is_kept() -> None:
    world = World(Setting(tokens=32))
    world.add("a", ids(10), 9)
    world.step()
    world.abort("a")
    again = world.add("b", ids(10), 2)
    world.drain()
    assert again.cached_tokens == 8
    assert again.tokens == expected(ids(10), 0, 2)


def test_what_a_failed_sequence_computed_is_not_kept() -> None:
    world = World(Setting(tokens=32))
    sequence = world.add("a", ids(10), 9)
    plan = world.scheduler.plan()
    world.launch(plan)
    world.scheduler.finish(sequence, keep=False)
    world.scheduler.commit(plan)
    assert list(world.manager.tree.nodes()) == []
    assert world.manager.allocator.free_pages == world.setting.pages


def test_who_ends_while_a_step_is_launched_leaves_nothing() -> None:
    """The step may have overwritten the window of what would be kept."""
    world = World(Setting(tokens=8, interval=100))
    world.add("a", ids(30), 9)
    world.step()
    plan = world.scheduler.plan()
    world.abort("a")
    world.scheduler.commit(plan)
    world.audit()
    assert list(world.manager.tree.nodes()) == []


@pytest.mark.parametrize("committed", [False, True])
def test_everybody_begins_anew_after_a_step_that_broke_off(committed: bool) -> None:
    """In the middle of a launch, or after it, when tokens are still on their way."""
    world = World(Setting(tokens=12, pages=32, overlap=True))
    world.add("old", ids(9), 2)
    world.drain()
    group = world.add_group("a", ids(9), 5, n=2)
    other = world.add("b", ids(15, 50), 5)
    for _ in range(3):
        world.step()
    plan = world.scheduler.plan()
    assert plan.rows
    if committed:
        world.launch(plan)
        world.scheduler.commit(plan)
    world.begin_anew()
    assert all(row.sequence.state is State.WAITING for row in plan.rows)
    assert list(world.manager.tree.nodes()) == []
    assert world.manager.allocator.free_pages == 32
    world.drain()
    assert all(s.tokens == expected(ids(9), s.index, 5) for s in group)
    assert other.tokens == expected(ids(15, 50), 0, 5)


@pytest.mark.parametrize("keep", [False, True])
def test_who_fails_takes_back_what_it_has_kept(keep: bool) -> None:
    """But not what it took over, nor what others have computed after that."""
    world = World(Setting(tokens=40, pages=64, interval=4))
    world.add("before", ids(12), 1)
    world.drain()
    other = world.add("other", [*ids(12), *ids(8, 60)], 9)
    failing = world.add("failing", ids(30), 9)
    for _ in range(4):
        world.step()
    assert failing.cached_tokens == other.cached_tokens == 12
    world.scheduler.finish(failing, keep=keep)
    world.audit()
    match = world.manager.tree.match
    assert match(ids(30), (), 30).known == (28 if keep else 12)
    assert match([*ids(12), *ids(8, 60)], (), 20).known == 16
    world.drain()


def test_a_sequence_may_have_to_compute_everything_again_in_small_chunks() -> None:
    """It leaves nothing behind for others, and the rest of its step goes on."""
    world = World(Setting(tokens=20, interval=100))
    other = world.add("b", ids(3, 50), 9)
    world.step()
    sequence = world.add("a", ids(30), 3)
    world.step()
    plan = world.scheduler.plan()
    assert planned(plan) == [("b", 4, 1), ("a", 19, 11)]
    world.scheduler.repeat(sequence, 4)
    plan.rows = plan.rows[:1]
    world.launch(plan)
    world.scheduler.commit(plan)
    world.read()
    assert list(world.manager.tree.nodes()) == []
    assert [planned(world.step())[-1] for _ in range(3)] == [("a", 0, 4), ("a", 4, 4), ("a", 8, 4)]
    world.drain()
    assert sequence.tokens == expected(ids(30), 0, 3)
    assert other.tokens == expected(ids(3, 50), 0, 9)


def test_steps_come_in_order() -> None:
    world = World(Setting())
    sequence = world.add("a", ids(4), 4)
    plan = world.scheduler.plan()
    with pytest.raises(AssertionError, match="was not committed"):
        world.scheduler.plan()
    world.scheduler.commit(plan)
    with pytest.raises(AssertionError, match="another step"):
        world.scheduler.commit(plan)
    with pytest.raises(AssertionError, match="nothing is being launched"):
        world.scheduler.repeat(sequence, 1)
    world.scheduler.append(sequence, 1)
    with pytest.raises(AssertionError, match="no launched row"):
        world.scheduler.append(sequence, 1)
    world.scheduler.finish(sequence)
    with pytest.raises(AssertionError, match="ENDED sequence ended"):
        world.scheduler.finish(sequence)


def test_an_idle_scheduler_plans_nothing() -> None:
    world = World(Setting())
    plan = world.step()
    assert (plan.rows, plan.copies, plan.ended, plan.preempted) == ([], [], [], [])
    assert not world.scheduler.has_work


def test_ranks_are_in_the_order_of_arrival() -> None:
    world = World(Setting())
    sequences = [world.add(str(number), ids(2), 1) for number in range(5)]
    assert all(first.rank < second.rank for first, second in pairwise(sequences))

"""First tokens within a time: as many as possible, nobody for ever, and everybody their own."""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import SchedulerConfig
from scheduler.deadlines import PATIENCE, Deadlines, StepTimes
from scheduler.plan import StepPlan
from scheduler.sequence import Sequence
from tests.scheduler import test_scheduler_traces, test_tier_traces
from tests.support.drive import VOCAB, Driver, request
from tests.support.tier_drive import TierDriver

TARGET_S = 1.0
RATE = 128.0  # prompt tokens per second: sums of times are exact
STEP = 8  # prompt tokens of a step


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticks(Clock):
    """A clock that goes on whenever it is read."""

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def prompts(*lengths: int, arrived: tuple[float, ...] = (), priority: int = 0) -> list[Sequence]:
    seqs: list[Sequence] = []
    for number, length in enumerate(lengths):
        one = request(f"r{number}", length, priority=priority)
        seq = Sequence(one, np.asarray(one.prompt_token_ids, np.int32), number, 10_000)
        seq.arrived = arrived[number] if arrived else 0.0
        seqs.append(seq)
    return seqs


def deadlines(now: float = 0.0) -> Deadlines:
    clock = Clock()
    clock.now = now
    made = Deadlines(TARGET_S, clock)
    made.times.saw(STEP, STEP, STEP / RATE)
    return made


def ids(seqs: list[Sequence]) -> list[int]:
    return [seq.seq_id for seq in seqs]


def order(made: Deadlines, seqs: list[Sequence], ahead: Iterable[StepPlan] = ()) -> list[int]:
    """The ids in the order in which they are served, in steps of `STEP` prompt tokens."""
    return ids(made.order(seqs, ahead, STEP))


def num_in_time(seqs: list[Sequence], now: float) -> int:
    """How many have their first token in time when they are computed one after the other."""
    count = tokens = 0
    for seq in seqs:
        tokens += seq.num_tokens
        ends = now + math.ceil(tokens / STEP) * STEP / RATE
        count += ends <= seq.arrived + TARGET_S
    return count


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    gaps=st.lists(st.integers(0, 60), min_size=6, max_size=6),
    wait=st.integers(0, 120),
)
def test_no_other_order_has_more_first_tokens_in_time(
    lengths: list[int], gaps: list[int], wait: int
):
    arrived = list(itertools.accumulate(gap / RATE for gap in gaps))[: len(lengths)]
    seqs, now = prompts(*lengths, arrived=tuple(arrived)), arrived[-1] + wait / RATE
    ordered = deadlines(now).order(seqs, [], STEP)
    assert sorted(ids(ordered)) == ids(seqs)
    best = max(num_in_time(list(other), now) for other in itertools.permutations(seqs))
    assert num_in_time(ordered, now) == best


def test_who_can_be_in_time_is_served_in_order_of_arrival():
    assert order(deadlines(), prompts(30, 10, 20, 40)) == [0, 1, 2, 3]


def test_the_longest_is_put_off_when_not_all_can_be_in_time():
    assert order(deadlines(), prompts(60, 30, 30, 20)) == [1, 2, 3, 0]


def test_a_step_that_ends_after_the_deadline_helps_nobody():
    """16 steps end within the target, 15 of them from half a step on: 121 tokens need 16."""
    seqs = prompts(61, 60)
    assert order(deadlines(), seqs) == [0, 1]
    assert order(deadlines(STEP / RATE / 2), seqs) == [1, 0]


def test_steps_with_less_room_for_prompts_compute_fewer_in_time():
    made, seqs = deadlines(), prompts(60, 40)
    made.times.saw(0, 3, STEP / RATE / 2)  # decodes take half of the time
    assert ids(made.order(seqs, [], STEP)) == [0, 1]
    assert ids(made.order(seqs, [], STEP // 2)) == [1, 0]  # 21 steps, of three quarters of the time
    assert ids(made.order(seqs, [], 0)) == [0, 1]  # there is nothing to share


def test_what_the_device_still_has_to_do_counts():
    assert order(deadlines(), prompts(40, 30)) == [0, 1]
    assert order(deadlines(), prompts(40, 30), [plan_of(80, 0)]) == [1, 0]


def test_what_the_device_has_done_of_a_step_does_not_count():
    made, plan = deadlines(), plan_of(80, 0)
    made.took(plan, next_began=True)
    assert order(made, prompts(40, 30), [plan]) == [1, 0]
    made = deadlines(0.5)
    made.took(plan, next_began=True)
    made.clock.now = 1.0
    assert order(made, prompts(40, 30, arrived=(1.0, 1.0)), [plan]) == [0, 1]


def test_priorities_come_before_deadlines():
    urgent, others = prompts(90, 90), prompts(10, 10, priority=1)
    for number, seq in enumerate(others, 2):
        seq.seq_id = number
    assert order(deadlines(), [*urgent, *others]) == [0, 1, 2, 3]


def test_who_has_waited_too_long_or_has_had_its_first_token_is_first():
    seqs = prompts(50, 500, 50, 60, arrived=(9.9, 0.0, 9.9, 9.9))
    seqs[3].outputs.append(7)  # it was preempted, and computes its prompt again
    seqs[3].num_known += 1
    assert order(deadlines(9.9), seqs)[:2] == [1, 3]
    assert order(deadlines(PATIENCE * TARGET_S), seqs)[0] == 3


def decodes_of(count: int) -> StepPlan:
    """The plan of a step that decodes."""
    config = SchedulerConfig(num_blocks=100, max_model_len=1024, max_num_batched_tokens=512)
    driver = Driver(config, pipelined=False)
    driver.add(*[request(f"d{number}", 1, 8) for number in range(count)])
    driver.step()
    plan = driver.step()
    assert plan is not None and plan.num_tokens == plan.num_decodes == count
    return plan


def plan_of(chunk: int, decodes: int) -> StepPlan:
    """The plan of a step with so many prompt tokens of one sequence, and so many decodes."""
    config = SchedulerConfig(num_blocks=100, max_model_len=1024, max_num_batched_tokens=512)
    driver = Driver(config, pipelined=False)
    driver.add(*[request(f"d{number}", 1, 8) for number in range(decodes)])
    if decodes:
        driver.step()
    driver.add(request("prompt", chunk, 2))
    plan = driver.scheduler.schedule()
    assert plan is not None and plan.num_tokens == chunk + decodes
    return plan


def test_a_step_takes_what_steps_took_that_followed_each_other():
    clock = Clock()
    made = Deadlines(TARGET_S, clock)
    long, short, decodes = plan_of(100, 3), plan_of(2, 3), decodes_of(3)
    seqs = prompts(60, 30, 30, 20)
    assert order(made, seqs) == [0, 1, 2, 3]  # none is known yet
    for plan, seconds, next_began in (
        (long, 9.0, True),  # began nobody knows when
        (long, 0.5, True),
        (short, 7.0, True),  # says nothing of prompts
        (decodes, 0.25, False),
        (long, 5.0, False),  # the device was idle
        (decodes, 5.0, True),
    ):
        clock.now += seconds
        made.took(plan, next_began=next_began)
    assert [made.times.seconds(n) for n in (0, 50, 100, 200)] == [0.25, 0.375, 0.5, 0.75]
    for _ in range(40):
        clock.now += 1.0
        made.took(long, next_began=True)
    assert made.times.seconds(100) == pytest.approx(1.0, rel=0.01)
    assert made.times.seconds(0) == 0.25


def test_time_in_which_nobody_waited_for_a_step_is_no_step_time():
    """Steps of a request that was ended lie on the device until another one comes."""
    driver, clock = burst_driver(1.0)
    made = driver.scheduler._deadlines
    assert made is not None
    before = made.times.seconds(100)
    for number in range(3):
        driver.add(request(f"left{number}", 600, 1))
        turns(driver, clock, 3)
        driver.finish(f"left{number}")
        clock.now += 60.0
    driver.add(request("next", 600, 1))
    turns(driver, clock, 8)
    driver.verify()
    assert made.times.seconds(100) == pytest.approx(before)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 300), st.floats(1e-4, 1e2)), min_size=1
    ),
    tokens=st.lists(st.integers(0, 5000), min_size=2, max_size=2),
)
def test_a_step_with_more_prompt_tokens_is_never_expected_to_be_shorter(
    steps: list[tuple[int, int, float]], tokens: list[int]
):
    times = StepTimes()
    times.saw(1, 1, 0.01)
    for prompt, others, seconds in steps:
        times.saw(prompt, prompt + others, seconds)
    fewer, more = sorted(tokens)
    assert 0 <= times.seconds(fewer) <= times.seconds(more)
    assert times.seconds(1) > 0


def burst_driver(target_s: float | None) -> tuple[Driver, Clock]:
    """A device that computes 100 tokens in 0.2 s, and has shown so."""
    clock = Clock()
    config = SchedulerConfig(
        num_blocks=400, max_model_len=2048, max_num_batched_tokens=100, ttft_target_s=target_s
    )
    driver = Driver(config, clock=clock)
    driver.add(request("first", 600, 1))
    turns(driver, clock, 8)
    assert driver.end_order == ["first"]
    return driver, clock


def turns(driver: Driver, clock: Clock, count: int) -> None:
    for _ in range(count):
        clock.now += 0.2
        driver.step()


@pytest.mark.parametrize("target_s", [None, 1.0])
def test_in_a_burst_short_prompts_need_not_wait_for_a_long_one(target_s: float | None):
    driver, clock = burst_driver(target_s)
    driver.add(request("long", 900, 1), *[request(f"short{n}", 90, 1) for n in range(3)])
    turns(driver, clock, 16)
    driver.verify()
    shorts = ["short0", "short1", "short2"]
    assert driver.end_order[1:] == ([*shorts, "long"] if target_s else ["long", *shorts])


def test_a_long_prompt_is_served_though_short_ones_keep_coming():
    driver, clock = burst_driver(1.0)
    driver.add(request("long", 900, 1))
    for number in range(60):
        driver.add(request(f"short{number}", 99, 1))
        turns(driver, clock, 1)
    patient = round(
        PATIENCE * 1.0 / 0.2
    )  # turns that it may be put off; then it needs 9 of its own
    assert patient - 2 < driver.end_order.index("long") < patient + 15


def test_who_loses_its_blocks_before_its_turn_has_nothing_to_swap():
    config = SchedulerConfig(
        num_blocks=14, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=192,
        num_host_blocks=20, preemption="swap", ttft_target_s=TARGET_S,
    )  # fmt: skip
    driver = TierDriver(config, clock=Clock())
    driver.add(request("grows", 15, 30))
    driver.step()
    driver.add(request("long", 160, 2), request("waits", 30, 2))
    while not driver.scheduler.num_preemptions:
        driver.step()
    (seq,) = (s for s in driver.scheduler.sequences() if s.request.request_id == "waits")
    assert (driver.scheduler.num_swaps, seq.saved, seq.blocks) == (0, None, [])
    driver.run()
    driver.verify()


def random_driver(rng: np.random.Generator, target_s: float) -> Driver:
    """With tiers below the pool or without."""
    options: dict[str, Any] = {"pipelined": bool(rng.integers(2)), "clock": Ticks()}
    options["num_priorities"] = int(rng.choice([1, 1, 3]))
    if rng.random() < 0.5:
        config = test_scheduler_traces.random_config(rng)
        return Driver(dataclasses.replace(config, ttft_target_s=target_s), **options)
    config = test_tier_traces.random_config(rng)
    driver = TierDriver(
        dataclasses.replace(config, ttft_target_s=target_s),
        seed=int(rng.integers(1 << 32)),
        disk_failures=0.05,
        disk_delays=0.3,
        **options,
    )
    driver.scheduler.swap_cost = test_tier_traces.SOME_COST
    return driver


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), target_s=st.sampled_from([1e-3, 0.1, 1.0, 100.0]))
def test_random_traces_with_a_target_give_everybody_their_own_tokens(seed: int, target_s: float):
    rng = np.random.default_rng(seed)
    driver = random_driver(rng, target_s)
    longest = driver.scheduler.max_seq_len
    shared = [rng.integers(VOCAB, size=int(rng.integers(1, longest))).tolist() for _ in range(3)]
    for _ in range(300):
        if isinstance(driver, TierDriver):
            test_tier_traces.random_operation(driver, rng, shared)
        else:
            test_scheduler_traces.random_operation(driver, rng, shared)
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests)
    assert driver.scheduler.num_used_blocks == 0


def shared_burst(target_s: float | None, **options: Any) -> tuple[int, int]:
    """Tokens that are computed for prompts with one beginning, and tokens found in the cache."""
    config = SchedulerConfig(
        num_blocks=400, max_model_len=512, max_num_batched_tokens=64, ttft_target_s=target_s
    )
    kind = TierDriver if options.get("num_host_blocks") else Driver
    driver = kind(dataclasses.replace(config, **options), clock=Clock())
    beginning = np.random.default_rng(0).integers(VOCAB, size=200).tolist()
    driver.add(*[request(f"r{n}", [*beginning, n, n + 1], 2) for n in range(8)])
    computed = 0
    while driver.scheduler.has_unfinished():
        if (plan := driver.step()) is not None:
            computed += plan.num_tokens
    driver.verify()
    return computed, driver.scheduler.blocks.admission.num_hit_tokens


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_burst_with_one_beginning_has_it_computed_once(num_host_blocks: int):
    """All are admitted before the first has computed it: they look again when it is their turn."""
    computed, found = shared_burst(TARGET_S, num_host_blocks=num_host_blocks)
    assert (computed, found) == shared_burst(None, num_host_blocks=num_host_blocks)
    assert found > 7 * 128


def test_without_a_cache_nobody_looks_again():
    assert shared_burst(TARGET_S, prefix_caching=False) == (8 * (202 + 1), 0)


def test_a_request_is_told_what_it_found_when_it_was_its_turn():
    config = SchedulerConfig(
        num_blocks=400, max_model_len=512, max_num_batched_tokens=64, ttft_target_s=TARGET_S
    )
    driver = Driver(config, clock=Clock())
    driver.add(request("first", range(200), 2), request("second", range(201), 2))
    driver.run()
    driver.verify()
    cached = [driver.last_updates[seq_id].num_cached_tokens for seq_id in sorted(driver.ends)]
    assert cached == [0, 192]  # of the steps before that in which it begins


def small_pool_over_host_memory(num_blocks: int) -> tuple[TierDriver, list[int]]:
    """A driver, and a prompt of ten blocks."""
    config = SchedulerConfig(
        num_blocks=num_blocks, max_model_len=300, max_num_batched_tokens=32, num_host_blocks=40,
        ttft_target_s=TARGET_S,
    )  # fmt: skip
    prompt = np.random.default_rng(0).integers(VOCAB, size=160).tolist()
    return TierDriver(config, clock=Clock(), pipelined=False), prompt


def test_who_finds_more_again_than_there_is_room_for_goes_on_with_what_it_has():
    """Its blocks were shared before the cache was emptied, and what it finds is in host memory."""
    driver, prompt = small_pool_over_host_memory(27)
    driver.add(request("shares", prompt[:64], 40, priority=-1))
    for _ in range(3):
        driver.step()
    driver.add(request("waits", prompt, 2, priority=1), request("before it", 64, 1))
    driver.step()
    (seq,) = (s for s in driver.scheduler.sequences() if s.request.request_id == "waits")
    driver.scheduler.reset_prefix_cache()
    driver.add(request("same beginning", prompt[:91], 1))
    while "same beginning" not in driver.end_order:
        driver.step()
    driver.add(request("the rest", 16 * driver.scheduler.num_free_blocks - 24, 8))
    while seq.num_computed == 64:
        found = driver.scheduler.blocks.admission.find_prefix(seq)
        driver.step()
    assert len(found) > 4 and not all(isinstance(block, int) for block in found)
    assert seq.num_cached_tokens == 64
    driver.run()
    driver.verify()


def test_what_is_found_in_host_memory_when_it_is_its_turn_counts_as_found_there():
    """It is admitted before the pool has it, and its turn comes when the pool has dropped it."""
    driver, prompt = small_pool_over_host_memory(32)
    driver.add(request("same beginning", prompt[:130], 1), request("before it", 80, 1))
    (waits,) = driver.add(request("waits", prompt, 2, priority=1))
    while "same beginning" not in driver.end_order:
        driver.step()
    (seq,) = (s for s in driver.scheduler.sequences() if s.seq_id == waits)
    assert (seq.num_cached_tokens, seq.num_computed, len(seq.blocks)) == (0, 0, 10)
    driver.add(request("all that is free", 16 * driver.scheduler.num_free_blocks - 8, 1))
    driver.run()
    driver.verify()
    counts, found = driver.tiers.counts, driver.scheduler.blocks.admission.num_hit_tokens
    assert found == seq.num_cached_tokens == 128 == 16 * counts.host_hits
    assert (counts.host_prompt_hits, counts.disk_prompt_hits) == (8, 0)

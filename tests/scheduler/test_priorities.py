"""Who is served first: by priority, and among equals by arrival."""

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler import SchedulerConfig, StepPlan
from scheduler.sequence import Sequence, Status
from scheduler.siblings import is_to_wait
from tests.scheduler import test_scheduler_traces, test_tier_traces
from tests.support.drive import VOCAB, Driver, request
from tests.support.tier_drive import TierDriver

both_ways = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def make(pipelined: bool = True, **options: int | None) -> Driver:
    sizes: dict[str, int | None] = {"num_blocks": 200, "max_model_len": 2048}
    return Driver(SchedulerConfig(**(sizes | options)), pipelined)  # type: ignore[arg-type]


def served(plan: StepPlan | None) -> set[str]:
    return set() if plan is None else {planned.request_id for planned in plan.seqs}


def running(driver: Driver) -> list[str]:
    seqs = driver.scheduler.sequences()
    return [s.request.request_id for s in seqs if s.status is Status.RUNNING]


@both_ways
def test_an_urgent_request_takes_the_place_of_the_last_that_is_less_urgent(pipelined: bool):
    """SC15: both places are taken by long requests of priority 10, one of priority 0 arrives."""
    driver = make(pipelined, max_num_seqs=2)
    low = [request(name, 20, 60, priority=10) for name in ("low0", "low1")]
    driver.add(*low)
    for _ in range(10):
        driver.step()
    driver.add(request("urgent", 20, 5, priority=0))
    assert served(driver.step()) == {"low0", "urgent"}
    driver.run()
    driver.verify()
    assert driver.end_order == ["urgent", "low0", "low1"]
    assert driver.scheduler.num_preemptions == 1


@both_ways
def test_less_urgent_requests_finish_though_urgent_ones_keep_coming(pipelined: bool):
    """SC15: one urgent request every 8 steps, each for 4 of them, beside two long ones."""
    driver = make(pipelined, max_num_seqs=2)
    driver.add(*[request(name, 20, 60, priority=10) for name in ("low0", "low1")])
    for number in range(30):
        driver.add(request(f"urgent{number}", 10, 4))
        assert f"urgent{number}" in served(driver.step()), "it waits behind less urgent ones"
        for _ in range(7):
            driver.step()
    assert {"low0", "low1"} < set(driver.end_order[:-1]), "they starve under a bounded load"
    driver.run()
    driver.verify()


@both_ways
def test_an_urgent_request_takes_as_much_memory_as_it_needs_and_no_more(pipelined: bool):
    driver = make(pipelined, num_blocks=13)
    driver.add(*[request(name, 40, 8, priority=p) for name, p in (("a", 1), ("b", 3), ("c", 2))])
    driver.step()
    assert driver.scheduler.num_free_blocks == 3
    driver.add(request("urgent", 90, 5, priority=0))  # 6 blocks
    assert served(driver.step()) == {"a", "c", "urgent"}
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions == 1


@both_ways
def test_an_urgent_request_does_not_wait_for_the_tokens_of_a_long_prompt(pipelined: bool):
    driver = make(pipelined, max_num_batched_tokens=32, num_blocks=400)
    driver.add(request("long", 1500, 5, priority=1))
    driver.step()
    driver.add(request("urgent", 40, 5, priority=0))
    for _ in range(2):
        driver.step()
    assert driver.plans[1].seqs[0].request_id == "urgent" and driver.plans[1].counts[0] == 32
    assert driver.plans[2].seqs[0].request_id == "urgent"
    assert driver.scheduler.num_preemptions == 0
    driver.run()
    driver.verify()


@both_ways
def test_memory_is_taken_from_the_least_urgent_and_of_equals_from_the_last(pipelined: bool):
    driver = make(pipelined, num_blocks=10)
    order = (("a", 0), ("b", 2), ("c", 1), ("d", 2))
    driver.add(*[request(name, 30, 60, priority=p) for name, p in order])
    lost: list[str] = []
    while len(lost) < 3:
        before = running(driver)
        driver.step()
        lost += [name for name in before if name not in running(driver)]
    assert lost == ["d", "b", "c"]
    driver.run()
    driver.verify()
    assert driver.end_order == ["a", "c", "b", "d"]


def test_what_waits_for_a_sibling_takes_nobodys_place():
    driver = make(max_num_seqs=3, max_num_batched_tokens=16)
    driver.add(request("low0", 5, 50, priority=1), request("low1", 5, 50, priority=1))
    driver.step()
    first = request("a#0", 100, 5)
    driver.add(first, dataclasses.replace(first, request_id="a#1", sibling_of="a#0"))
    driver.step()
    assert running(driver) == ["a#0", "low0", "low1"]
    for _ in range(9):
        driver.step()
    assert running(driver) == ["a#0", "a#1", "low0"]
    driver.run()
    driver.verify()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), priority=st.integers(-5, 5))
def test_requests_of_one_priority_are_served_like_those_of_none(seed: int, priority: int):
    """The same plans, sequence by sequence and block by block."""
    plans: list[list[object]] = []
    for value in (0, priority):
        rng = np.random.default_rng(seed)
        driver = Driver(test_scheduler_traces.random_config(rng), pipelined=bool(rng.integers(2)))
        longest = driver.scheduler.max_seq_len
        for index in range(12):
            length, count = int(rng.integers(1, longest)), int(rng.integers(1, 30))
            driver.add(request(f"r{index}", length, count, priority=value))
            for _ in range(int(rng.integers(0, 4))):
                driver.step()
        driver.run()
        plans.append([(p.seqs, p.block_tables.tolist(), p.preempted) for p in driver.plans])
    assert plans[0] == plans[1]


def check_order(driver: Driver, newest: int) -> None:
    """Nobody that a step could have served waits behind somebody strictly less urgent."""
    seqs = driver.scheduler.sequences()
    least = max((s.request.priority for s in seqs if s.status is Status.RUNNING), default=0)

    def could_run(seq: Sequence) -> bool:
        came_before = seq.seq_id < newest
        return came_before and not is_to_wait(seq, driver.scheduler.blocks)

    waiting = [s for s in seqs if s.status is Status.WAITING and could_run(s)]
    assert all(seq.request.priority >= least for seq in waiting), "priority inversion"


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=24)  # one that made way for another was overtaken by a later one of its priority
def test_random_priorities_are_never_inverted_and_everybody_gets_their_own_tokens(seed: int):
    rng = np.random.default_rng(seed)
    driver = Driver(test_scheduler_traces.random_config(rng), pipelined=bool(rng.integers(2)))
    driver.num_priorities = int(rng.integers(2, 6))
    longest = driver.scheduler.max_seq_len
    prompts = [rng.integers(VOCAB, size=int(rng.integers(1, longest))).tolist() for _ in range(3)]
    for _ in range(500):
        newest, steps = len(driver.requests), len(driver.plans)
        test_scheduler_traces.random_operation(driver, rng, prompts)
        if len(driver.plans) > steps:
            check_order(driver, newest)
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests) > 0
    assert driver.scheduler.num_used_blocks == 0


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_priorities_with_samples_beams_and_tiers_change_no_token(seed: int):
    """Who gives way may be a beam, be swapped out, or be waited for by its siblings."""
    rng = np.random.default_rng(seed)
    driver: TierDriver = test_tier_traces.random_driver(rng)
    driver.num_priorities = 4
    longest = driver.scheduler.max_seq_len
    prompts = [rng.integers(VOCAB, size=longest // 2 + 1).tolist() for _ in range(3)]
    for _ in range(250):
        test_tier_traces.random_operation(driver, rng, prompts)
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests) > 0
    assert driver.scheduler.num_used_blocks == 0

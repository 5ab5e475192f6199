"""One test per rule of the scheduler."""

import numpy as np
import pytest

from scheduler import FinishReason, SchedulerConfig
from tests.support.drive import Driver, expected_tokens, request

BOTH_LOOPS = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def config(**options: int | None) -> SchedulerConfig:
    return SchedulerConfig(**({"num_blocks": 200, "max_model_len": 1000} | options))


def shares(driver: Driver) -> list[list[tuple[str, int, int]]]:
    """Per plan, what it computes: request, start, number of tokens."""
    return [[(s.request_id, s.start, s.num_tokens) for s in plan.seqs] for plan in driver.plans]


def test_nothing_to_do_is_no_plan():
    driver = Driver(config())
    assert driver.step() is None
    assert not driver.scheduler.has_unfinished()


def test_a_step_mixes_decodes_and_chunks_of_several_prompts():
    driver = Driver(config(max_num_batched_tokens=40))
    driver.add(request("a", 5, 10))
    driver.step()
    driver.add(request("b", 30, 10), request("c", 50, 10))
    driver.step()
    driver.step()
    assert shares(driver) == [
        [("a", 0, 5)],
        [("a", 5, 1), ("b", 0, 30), ("c", 0, 9)],
        [("a", 6, 1), ("b", 30, 1), ("c", 9, 38)],
    ]


def test_a_chunk_limit_leaves_room_for_others():
    driver = Driver(config(max_num_batched_tokens=40, max_prefill_chunk=16))
    driver.add(request("a", 50, 1), request("b", 20, 1), request("c", 20, 1))
    driver.run()
    assert shares(driver) == [
        [("a", 0, 16), ("b", 0, 16), ("c", 0, 8)],
        [("a", 16, 16), ("b", 16, 4), ("c", 8, 12)],
        [("a", 32, 16)],
        [("a", 48, 2)],
    ]


def test_no_chunk_but_the_last_samples():
    driver = Driver(config(max_prefill_chunk=16))
    driver.add(request("a", 40, 2))
    driver.run()
    assert [(s.num_tokens, s.num_samples) for p in driver.plans for s in p.seqs] == [
        (16, 0),
        (16, 0),
        (8, 1),
        (1, 1),
    ]


@BOTH_LOOPS
def test_an_end_by_length_wastes_no_step(pipelined: bool):
    driver = Driver(config(), pipelined)
    driver.add(request("a", 7, 5))
    assert driver.run() == 5
    assert sum(plan.num_samples for plan in driver.plans) == 5
    assert driver.ends == {0: FinishReason.LENGTH}


def test_an_end_by_length_frees_blocks_and_seat_before_its_last_token_is_read():
    driver = Driver(config(max_num_seqs=1))
    driver.add(request("a", 7, 2), request("b", 7, 2))
    assert driver.run() == 4  # no step in between without work
    driver.verify()


@BOTH_LOOPS
def test_a_stop_token_ends_a_sequence_and_what_was_sampled_behind_it_is_dropped(pipelined: bool):
    free = request("free", 7, 20)
    tokens, _ = expected_tokens(free, 1000)
    stop = tokens[6]
    first = tokens.index(stop)
    driver = Driver(config(), pipelined)
    driver.add(request("free", 7, 20, stop_token_ids=frozenset({stop, -1})))
    driver.run()
    assert driver.outputs[0] == tokens[: first + 1]
    assert driver.ends[0] is FinishReason.STOP
    assert driver.last_updates[0].stop_token_id == stop
    assert sum(plan.num_samples for plan in driver.plans) == first + 1 + pipelined


@BOTH_LOOPS
@pytest.mark.parametrize("min_tokens", [0, 2, 3, 5])
def test_a_stop_token_does_not_end_a_sequence_before_min_tokens(pipelined: bool, min_tokens: int):
    tokens, _ = expected_tokens(request("free", 7, 20), 1000)
    stops = frozenset({tokens[2], tokens[5]})
    driver = Driver(config(), pipelined)
    driver.add(request("free", 7, 20, stop_token_ids=stops, min_tokens=min_tokens))
    driver.run()
    driver.verify()
    assert len(driver.outputs[0]) == (3 if min_tokens <= 2 else 6)


def test_a_stop_token_in_the_last_place_counts_as_a_stop():
    tokens, _ = expected_tokens(request("free", 7, 4), 1000)
    driver = Driver(config())
    driver.add(request("free", 7, 4, stop_token_ids=frozenset({tokens[3]})))
    driver.run()
    assert driver.ends[0] is FinishReason.STOP


@BOTH_LOOPS
@pytest.mark.parametrize("steps", range(6))
def test_an_ended_request_gets_no_more_tokens_even_if_its_name_is_used_again(
    pipelined: bool, steps: int
):
    driver = Driver(config(max_prefill_chunk=16), pipelined)
    driver.add(request("a", 40, 3), request("b", 20, 10))
    for _ in range(steps):
        driver.step()
    driver.finish("a")
    before = [list(driver.outputs[0])]
    driver.add(request("a", 30, 4))
    driver.run()
    assert [driver.outputs[0]] == before
    assert len(driver.outputs[2]) == 4
    assert driver.outputs[2] == expected_tokens(driver.requests[2], 1000)[0]
    assert driver.scheduler.num_used_blocks == 0


def test_ending_an_unknown_request_does_nothing():
    driver = Driver(config())
    assert not driver.scheduler.finish("nobody")
    driver.add(request("a", 3, 1))
    driver.run()
    assert not driver.scheduler.finish("a")


def test_a_request_can_be_ended_once():
    driver = Driver(config())
    driver.add(request("a", 3, 5))
    assert driver.scheduler.finish("a")
    assert not driver.scheduler.finish("a") and driver.step() is None


def test_the_youngest_is_preempted_and_comes_back_before_those_that_never_ran():
    # Six blocks: the three prompts of two blocks fill the pool, the first to grow evicts "c".
    driver = Driver(config(num_blocks=7, max_num_seqs=3), pipelined=False)
    driver.add(*[request(name, 31, 20) for name in "abcd"])
    driver.step()
    assert driver.scheduler.num_running == 3
    while not driver.plans[-1].preempted:
        driver.step()
    assert driver.plans[-1].preempted == (2,)
    assert [s.request_id for s in driver.plans[-1].seqs] == ["a", "b"]
    assert [seq.request.request_id for seq in driver.scheduler.sequences()] == ["a", "b", "c", "d"]
    driver.run()
    driver.verify()
    assert driver.end_order == ["a", "b", "c", "d"]


def test_nothing_is_admitted_in_a_step_that_preempted():
    driver = Driver(config(num_blocks=7, max_num_seqs=8))
    driver.add(*[request(f"long{index}", 31, 40) for index in range(3)])
    driver.add(*[request(f"short{index}", 2, 3) for index in range(5)])
    running: set[int] = set()
    preempting = 0
    while driver.scheduler.has_unfinished():
        plan = driver.step()
        if plan is None:
            continue
        served = {planned.seq_id for planned in plan.seqs}
        if plan.preempted:
            preempting += 1
            assert served <= running - set(plan.preempted)
        running = (running | served) - set(plan.preempted)
    assert preempting > 0
    driver.verify()


def test_a_prompt_is_admitted_only_when_all_its_blocks_are_free():
    driver = Driver(config(num_blocks=8, max_num_batched_tokens=16))
    driver.add(request("a", 60, 30), request("b", 80, 4))  # 4 blocks, then 5 of the 3 that are left
    while driver.scheduler.has_unfinished():
        driver.step()
    assert driver.scheduler.num_preemptions == 0
    driver.verify()


def test_some_blocks_stay_free_for_the_growth_of_those_that_run():
    driver = Driver(config(num_blocks=201, max_num_batched_tokens=10_000, max_model_len=5000))
    driver.add(request("a", 16, 100))
    driver.step()
    driver.add(request("b", 16 * 198, 1))  # fits the 199 blocks that are free, but leaves only one
    driver.step()
    assert driver.scheduler.num_waiting == 1
    driver.run()
    assert driver.end_order == ["a", "b"]


def test_a_later_request_that_would_fit_does_not_overtake():
    driver = Driver(config(num_blocks=8))
    driver.add(request("a", 60, 20), request("b", 80, 4), request("c", 4, 4))
    driver.run()
    assert driver.end_order == ["a", "b", "c"]
    first = {}
    for index, plan in enumerate(driver.plans):
        for planned in plan.seqs:
            first.setdefault(planned.request_id, index)
    assert first["a"] < first["b"] <= first["c"]


def test_prompt_logprobs_take_a_sample_row_for_each_prompt_token_once():
    driver = Driver(config(max_num_seqs=8, num_blocks=9), pipelined=True)
    driver.add(request("plain", 40, 30), request("scored", 30, 60, prompt_logprobs=True))
    driver.add(request("other", 30, 60))
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions > 0
    scored = [s for plan in driver.plans for s in plan.seqs if s.request_id == "scored"]
    rows = [
        position
        for s in scored
        for position in range(s.start + s.num_tokens - s.num_samples, s.start + s.num_tokens)
    ]
    assert [row for row in rows if row < 29] == list(range(29))
    assert max(s.num_samples for s in scored) <= 7
    real = [s for s in scored if s.sample_row >= 0]
    assert len(real) == 60 and real[0].start + real[0].num_tokens == 30


def test_at_most_two_plans_are_in_flight():
    driver = Driver(config())
    driver.add(request("a", 3, 9))
    scheduler = driver.scheduler
    assert scheduler.schedule() is not None and scheduler.schedule() is not None
    with pytest.raises(RuntimeError, match="2 plans are in flight: update one first"):
        scheduler.schedule()


def test_plans_are_updated_once_each_and_in_order():
    driver = Driver(config())
    driver.add(request("a", 3, 9))
    first, second = driver.scheduler.schedule(), driver.scheduler.schedule()
    assert first is not None and second is not None
    tokens = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="once each, in the order"):
        driver.scheduler.update(second, tokens)
    with pytest.raises(ValueError, match=r"got tokens of shape \(2,\), want \(1,\)"):
        driver.scheduler.update(first, np.zeros(2, np.int32))
    driver.scheduler.update(first, tokens)
    with pytest.raises(ValueError, match="once each, in the order"):
        driver.scheduler.update(first, tokens)

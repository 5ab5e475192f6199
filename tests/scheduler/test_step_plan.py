"""The layout of a plan, computed a second time token by token."""

import numpy as np
import pytest

from scheduler import SchedulerConfig, StepPlan
from tests.support.drive import Driver, request

BLOCK_SIZES = (16, 32, 64, 128)


def mixed_plans(block_size: int) -> list[StepPlan]:
    """Decodes, chunks, last chunks, prompt logprobs and resumed sequences, one plan ahead."""
    config = SchedulerConfig(
        num_blocks=10,
        max_model_len=4 * block_size,
        block_size=block_size,
        max_num_seqs=20,
        max_num_batched_tokens=2 * block_size,
        max_prefill_chunk=block_size - 3,
    )
    driver = Driver(config)
    lengths = (1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size)
    for index, length in enumerate(lengths):
        driver.add(request(f"plain{index}", length, 2 * block_size))
        driver.add(request(f"scored{index}", length, 3, prompt_logprobs=True))
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions > 0
    return driver.plans


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_flat_arrays_agree_with_the_sequences_token_by_token(block_size: int):
    for plan in mixed_plans(block_size):
        positions, slots, sample_rows, starts = [], [], [], [0]
        for planned, table in zip(plan.seqs, plan.block_tables.tolist(), strict=True):
            for position in range(planned.start, planned.start + planned.num_tokens):
                positions.append(position)
                slots.append(table[position // block_size] * block_size + position % block_size)
            starts.append(len(positions))
            sample_rows += range(len(positions) - planned.num_samples, len(positions))
        assert plan.positions().tolist() == positions
        assert plan.slot_mapping(block_size).tolist() == slots
        assert plan.query_start().tolist() == starts
        assert plan.sample_rows().tolist() == sample_rows
        assert plan.seq_lens().tolist() == [seq.start + seq.num_tokens for seq in plan.seqs]
        arrays = (
            plan.positions(),
            plan.slot_mapping(block_size),
            plan.query_start(),
            plan.sample_rows(),
            plan.seq_lens(),
            plan.token_ids,
            plan.block_tables,
        )
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


def test_a_plan_does_not_change_when_later_ones_are_made():
    driver = Driver(SchedulerConfig(num_blocks=9, max_model_len=100, max_num_seqs=4))
    driver.add(*[request(f"r{index}", 30, 40) for index in range(6)])
    snapshots = []
    while driver.scheduler.has_unfinished():
        plan = driver.step()
        if plan is not None:
            snapshots.append((plan, plan.block_tables.copy(), plan.token_ids.copy()))
    assert driver.scheduler.num_preemptions > 0
    for plan, tables, tokens in snapshots:
        assert np.array_equal(plan.block_tables, tables)
        assert np.array_equal(plan.token_ids, tokens)


def test_a_token_still_on_the_device_is_named_by_its_row_in_the_plan_before():
    driver = Driver(SchedulerConfig(num_blocks=40, max_model_len=100, max_prefill_chunk=16))
    driver.add(request("a", 3, 10), request("b", 20, 10), request("c", 10, 10))
    driver.run()
    pairs = zip(driver.plans, driver.plans[1:], strict=False)
    fed = 0
    for before, plan in pairs:
        rows = {seq.seq_id: seq.sample_row for seq in before.seqs if seq.sample_row >= 0}
        for planned in plan.seqs:
            assert planned.feed_row == rows.get(planned.seq_id, -1)
            fed += planned.feed_row >= 0
    assert fed == 3 * 9  # all outputs but the last of each are fed on the device


def test_a_synchronous_loop_knows_every_token():
    driver = Driver(SchedulerConfig(num_blocks=40, max_model_len=100), pipelined=False)
    driver.add(request("a", 3, 10), request("b", 20, 10))
    driver.run()
    driver.verify()
    assert all((plan.feed_rows == -1).all() for plan in driver.plans)


def test_plans_of_the_same_sequences_share_the_lists_that_name_them_and_others_do_not():
    """Whoever looks something up by these lists may keep it for as long as they are the same."""
    driver = Driver(SchedulerConfig(num_blocks=40, max_model_len=100, max_prefill_chunk=16))
    driver.add(request("a", 3, 30), request("b", 20, 10), request("c", 10, 20))
    for _ in range(5):
        driver.step()
    driver.add(request("d", 40, 10))
    driver.finish("c")
    driver.run()
    driver.verify()
    shared = [
        (before.seq_ids is plan.seq_ids, before.request_ids is plan.request_ids)
        for before, plan in zip(driver.plans, driver.plans[1:], strict=False)
    ]
    named = [(tuple(plan.seq_ids), tuple(plan.request_ids)) for plan in driver.plans]
    same = [before == now for before, now in zip(named, named[1:], strict=False)]
    assert shared == [(is_same, is_same) for is_same in same]
    assert 4 <= same.count(False) < 0.3 * len(same)

"""Faults of other schedulers, as the kind of fault each one is. Ids refer to the case list."""

import numpy as np
import pytest

from scheduler import FinishReason, SchedulerConfig
from tests.support.drive import Driver, expected_tokens, request

pytestmark = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def make(num_blocks: int, pipelined: bool, **options: int | bool) -> Driver:
    """A driver whose pool has `num_blocks` blocks besides the null block."""
    sizes = {"num_blocks": num_blocks + 1, "max_model_len": 2048} | options
    return Driver(SchedulerConfig(**sizes), pipelined)


def test_a_prompt_larger_than_the_pool_fails_alone(pipelined: bool):
    """SC01, SC03: it is refused at once instead of blocking the head of the queue for ever."""
    driver = make(49, pipelined)
    for index in range(5):
        with pytest.raises(ValueError, match="the KV pool of 49 blocks of 16 tokens"):
            driver.add(request(f"huge{index}", 1002, 50))
    driver.add(request("a", 12, 50), request("b", 12, 50))
    assert driver.run(max_steps=200) <= 51
    driver.verify()
    assert len(driver.ends) == 2


def test_requests_behind_one_that_cannot_be_served_finish_in_order(pipelined: bool):
    """SC03: 20 followers of a refused request, first come first served."""
    driver = make(100, pipelined, max_model_len=1024, max_num_seqs=3)
    with pytest.raises(ValueError, match="the model's limit of 1024 tokens"):
        driver.add(request("head", 5000))
    names = [f"r{index:02}" for index in range(20)]
    driver.add(*[request(name, 20, 5) for name in names])
    driver.run()
    driver.verify()
    assert driver.end_order == names


def test_a_sequence_alone_in_a_full_pool_ends_at_the_pools_length(pipelined: bool):
    """SC06: it is never waiting and running at once; it stops where the pool does."""
    driver = make(2, pipelined)
    driver.add(request("a", 31, 10))
    driver.run()
    assert driver.ends == {0: FinishReason.LENGTH} and len(driver.outputs[0]) == 1
    assert driver.scheduler.num_preemptions == 0
    assert driver.scheduler.num_free_blocks == 2


def test_the_youngest_preempts_itself_and_waits(pipelined: bool):
    """SC06: the sequence that needs a block is the youngest itself."""
    driver = make(5, pipelined)
    driver.add(request("old", 40, 30), request("young", 31, 20))  # 3 + 2 blocks, none left
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions == 1
    assert driver.end_order == ["old", "young"]


def test_demand_beyond_the_pool_makes_progress_in_every_step(pipelined: bool):
    """SC07: no cycle of eviction and return."""
    driver = make(8, pipelined)
    driver.add(*[request(name, 40, 50) for name in "abcd"])
    while driver.scheduler.has_unfinished():
        plan = driver.step()
        assert plan is not None or driver.pipelined  # None only when awaiting the last tokens
    driver.verify()
    assert [len(tokens) for tokens in driver.outputs.values()] == [50] * 4
    assert 0 < driver.scheduler.num_preemptions < 10


@pytest.mark.parametrize("num_blocks", [200, 14, 6])
def test_preemption_loses_and_repeats_no_token(pipelined: bool, num_blocks: int):
    """SC10: the same tokens from an ample pool and from one that preempts."""
    driver = make(num_blocks, pipelined)
    driver.add(*[request(f"r{n}", 10 + 4 * n, 40) for n in range(8)])
    driver.run()
    driver.verify()
    assert [len(tokens) for tokens in driver.outputs.values()] == [40] * 8
    assert (driver.scheduler.num_preemptions > 0) == (num_blocks < 200)


def test_a_resumed_sequence_is_one_prefill_of_prompt_and_outputs(pipelined: bool):
    """SC11: having outputs does not make a sequence a decode."""
    driver = make(7, pipelined, max_prefill_chunk=16, prefix_caching=False)
    driver.add(request("old", 54, 20), request("young", 30, 40))
    driver.run()
    driver.verify()
    assert driver.scheduler.num_preemptions == 1
    young = [s for plan in driver.plans for s in plan.seqs if s.request_id == "young"]
    restart = max(index for index, s in enumerate(young) if s.start == 0)
    assert restart > 0
    at = 0
    for planned in young[restart:]:
        assert planned.start == at
        at += planned.num_tokens
    chunks = [s for s in young[restart:] if s.num_tokens > 1]
    assert len(chunks) == 3 and [s.num_samples for s in chunks] == [0, 0, 1]
    assert sum(s.num_tokens for s in chunks) > 30 + 5


def test_no_sequence_is_planned_and_preempted_in_one_step(pipelined: bool):
    """SC13: a victim has no work in the step, so its budget is never spent."""
    driver = make(6, pipelined, max_num_batched_tokens=20)
    driver.add(*[request(f"r{n}", 17, 40) for n in range(4)])
    driver.run()
    driver.verify()
    preempting = [plan for plan in driver.plans if plan.preempted]
    assert preempting
    for plan in preempting:
        assert not {s.seq_id for s in plan.seqs} & set(plan.preempted)


def test_the_context_limit_is_exact(pipelined: bool):
    """SC17: one token below the limit is served one token, the limit itself is refused."""
    driver = make(100, pipelined, max_model_len=64)
    for length in (64, 65, 640):
        with pytest.raises(ValueError, match="the model's limit of 64 tokens"):
            driver.add(request("long", length))
    driver.add(request("a", 63, 1), request("b", 63, 5), request("next", 5, 5))
    driver.run()
    driver.verify()
    assert [len(tokens) for tokens in driver.outputs.values()] == [1, 1, 5]


def test_several_half_done_prompts_at_the_edge_of_the_budget(pipelined: bool):
    """SC21: each position of each prompt is computed once, no step exceeds the budget."""
    driver = make(100, pipelined, max_num_batched_tokens=64)
    lengths = (60, 70, 63, 1, 64, 65)
    driver.add(*[request(f"r{n}", length, 3) for n, length in enumerate(lengths)])
    driver.run()
    driver.verify()
    computed: dict[int, list[int]] = {n: [] for n in range(len(lengths))}
    for plan in driver.plans:
        assert plan.num_tokens <= 64
        for s in plan.seqs:
            computed[s.seq_id] += range(s.start, s.start + s.num_tokens)
    assert computed == {n: list(range(length + 2)) for n, length in enumerate(lengths)}


def test_samples_of_one_prompt_count_as_sequences(pipelined: bool):
    """SC23: three requests of three samples each under a limit of four sequences."""
    driver = make(29, pipelined, max_num_seqs=4)
    prompts = [list(range(base, base + 20)) for base in (0, 100, 200)]
    driver.add(*[request(f"{i}-{k}", p, 20 + k) for i, p in enumerate(prompts) for k in range(3)])
    driver.run()
    driver.verify()
    assert len(driver.ends) == 9 and max(len(plan.seqs) for plan in driver.plans) == 4
    assert driver.scheduler.num_free_blocks == 29


def test_short_requests_one_after_the_other_do_not_drain_the_pool(pipelined: bool):
    """BM10: owners are counted back to zero after each of 200 requests."""
    driver = make(10, pipelined)
    for index in range(200):
        driver.add(request(f"r{index}", 40, 5))
        driver.run()
        assert driver.scheduler.num_free_blocks == 10
        assert all(driver.scheduler.blocks.pool.num_owners(b) == 0 for b in range(11))
    driver.verify()
    assert len(driver.ends) == 200


def test_ending_a_request_twice_is_harmless(pipelined: bool):
    """BM12: finish, abort, and free again through the block manager."""
    driver = make(6, pipelined)
    driver.add(request("r1", 40, 3))
    (seq,) = driver.scheduler.sequences()
    driver.run()
    assert not driver.scheduler.finish("r1")
    driver.scheduler.blocks.free(seq)
    driver.add(request("a", 40, 5), request("b", 40, 5))
    plan = driver.step()
    assert plan is not None
    tables = plan.block_tables[:, :3].ravel().tolist()
    assert sorted(tables) == [1, 2, 3, 4, 5, 6]
    driver.run()
    driver.verify()


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_an_abort_in_the_middle_of_a_prompt_gives_everything_back(pipelined: bool, chunks: int):
    """BM19: after each chunk, and in the step that samples."""
    driver = make(12, pipelined, max_prefill_chunk=32)
    for attempt in range(5):
        driver.add(request(f"a{attempt}", list(range(100)), 5), request(f"b{attempt}", 20, 3))
        for _ in range(chunks):
            driver.step()
        driver.finish(f"a{attempt}")
        driver.run()
        assert driver.scheduler.num_free_blocks == 12
    driver.add(request("again", list(range(100)), 5))
    driver.run()
    driver.verify()
    assert driver.outputs[10] == expected_tokens(driver.requests[10], 2048)[0]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("full", [1, 2])
def test_block_counts_are_exact_at_block_edges(
    pipelined: bool, block_size: int, extra: int, full: int
):
    """BM21: `k` tokens in the cache occupy `ceil(k / block_size)` blocks, no look-ahead."""
    length = full * block_size + extra
    driver = make(8, pipelined, block_size=block_size)
    (seq_id,) = driver.add(request("a", length, 18))
    (seq,) = driver.scheduler.sequences()
    while driver.scheduler.has_unfinished():
        driver.step()
        if seq.blocks:
            assert len(seq.blocks) == -(-seq.num_computed // block_size)
    driver.verify()
    assert len(driver.outputs[seq_id]) == 18
    tables = np.concatenate([plan.block_tables for plan in driver.plans])
    assert np.count_nonzero(tables[-1]) == -(-(length + 17) // block_size)

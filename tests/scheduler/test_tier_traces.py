"""Random traces over all tiers: everybody gets their own tokens, and every copy is checked.

There are samples and beams, which are siblings, and priorities, which siblings do not share.
`TIER_OPERATIONS` in the environment sets the number of operations; a million take a quarter of an
hour or more.
"""

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import SchedulerConfig
from scheduler.transfers import SwapCost, TierCounts
from tests.support.drive import VOCAB, random_prompt, request, samples
from tests.support.tier_drive import TierDriver

OPERATIONS_PER_TRACE = 500
NUM_TRACES = max(1, int(os.environ.get("TIER_OPERATIONS", 15_000)) // OPERATIONS_PER_TRACE)
SOME_COST = SwapCost(
    block_bytes=1 << 16,
    store_bytes_per_s=1e9,
    load_bytes_per_s=1e9,
    prefill_tokens_per_s=5e5,  # a swap pays from 66 computed tokens on for blocks of 16
    attention_tokens=math.inf,
)


def random_config(rng: np.random.Generator) -> SchedulerConfig:
    if rng.random() < 0.3:  # long prefixes, each tier several times smaller than the next
        return SchedulerConfig(
            num_blocks=20,
            max_num_seqs=6,
            max_num_batched_tokens=200,
            max_model_len=250,
            num_host_blocks=int(rng.integers(10, 25)),
            num_disk_blocks=300,
            preemption=str(rng.choice(["auto", "swap"])),
        )
    host = int(rng.choice([1, 5, 8, 12, 20, 100]))
    return SchedulerConfig(
        block_size=int(rng.choice([16, 16, 32])),
        num_blocks=int(rng.integers(3, 26)),
        max_num_seqs=int(rng.integers(1, 9)),
        max_num_batched_tokens=int(rng.choice([1, 16, 50, 200, 200, 200])),
        max_model_len=int(rng.integers(2, 300)),
        max_prefill_chunk=None if rng.random() < 0.3 else int(rng.integers(1, 40)),
        prefix_caching=bool(rng.random() < 0.85),
        contiguous_blocks=bool(rng.random() < 0.3),
        window=None if rng.random() < 0.8 else int(rng.integers(1, 100)),
        num_host_blocks=host,
        num_disk_blocks=int(rng.choice([0, 1, 30, 300, 300])),
        preemption=str(rng.choice(["auto", "swap", "swap", "recompute"])),
    )


def random_driver(rng: np.random.Generator) -> TierDriver:
    driver = TierDriver(
        random_config(rng),
        pipelined=bool(rng.integers(2)),
        seed=int(rng.integers(1 << 32)),
        disk_failures=float(rng.choice([0.0, 0.0, 0.05, 0.05, 0.3, 1.0])),
        disk_delays=float(rng.choice([0.0, 0.0, 0.3, 0.9])),
    )
    driver.scheduler.swap_cost = SOME_COST
    driver.num_priorities = int(rng.choice([1, 2, 5]))
    return driver


def random_operation(
    driver: TierDriver, rng: np.random.Generator, prompts: list[list[int]]
) -> None:
    """Add requests, end one, change the weights, lose files, or (mostly) take a step."""
    scheduler = driver.scheduler
    longest = scheduler.max_seq_len
    dice = rng.random()
    if dice < 0.12 and scheduler.num_waiting < 8:
        prompt = random_prompt(rng, prompts, longest, 0.3)
        max_tokens = int(rng.integers(1, 30))
        name = f"r{rng.integers(1 << 40)}"
        if rng.random() < 0.15:
            last = min(max_tokens, longest - 1 - len(prompt))
            driver.add_beams(name, int(rng.integers(1, 5)), prompt, last, seed=len(prompt))
        elif rng.random() < 0.15:
            driver.add(*samples(name, int(rng.integers(2, 4)), prompt, max_tokens))
        else:
            scored = bool(rng.random() < 0.1)
            driver.add(request(name, prompt, max_tokens, prompt_logprobs=scored))
    elif dice < 0.1206:
        scheduler.reset_prefix_cache()
    elif dice < 0.1212:
        driver.disk.files.clear()  # somebody deletes them
    elif dice < 0.15 and driver.requests:
        seq_id = int(rng.integers(max(0, len(driver.requests) - 12), len(driver.requests)))
        driver.finish(driver.requests[seq_id].request_id)
    else:
        driver.step()


def run_trace(seed: int) -> TierDriver:
    rng = np.random.default_rng(seed)
    driver = random_driver(rng)
    longest = driver.scheduler.max_seq_len
    prompts = [
        rng.integers(VOCAB, size=int(rng.integers(1 + longest // 2, 1 + longest))).tolist()
        for _ in range(4)
    ]
    for _ in range(OPERATIONS_PER_TRACE):
        random_operation(driver, rng, prompts)
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests) > 0
    assert driver.scheduler.num_used_blocks == 0
    return driver


@pytest.mark.timeout(0)
@settings(max_examples=NUM_TRACES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_traces_over_all_tiers_give_everybody_their_own_tokens(seed: int):
    """OF05, OF07, BM03, BM11, BM17, BM26 and SC10 with tiers below the pool."""
    run_trace(seed)


@pytest.mark.timeout(0)
def test_the_traces_reach_every_kind_of_transfer():
    """Else the property above would hold of nothing."""
    total = TierCounts()
    swaps = preemptions = 0
    for seed in range(30):
        driver = run_trace(seed)
        for name in TierCounts.__dataclass_fields__:
            count = getattr(total, name) + getattr(driver.tiers.counts, name)
            setattr(total, name, count)
        swaps += driver.scheduler.num_swaps
        preemptions += driver.scheduler.num_preemptions
    assert all(getattr(total, name) > 0 for name in TierCounts.__dataclass_fields__), total
    assert 10 < swaps < preemptions

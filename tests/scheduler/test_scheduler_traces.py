"""Random arrivals, ends and sizes: 100,000 operations with the books checked after each.

One operation adds or ends a request or makes one turn of the loop. The device of the driver
checks every read of the cache, the driver every plan against its budgets, `invariants.check` the
books; at the end every request must have exactly the tokens that it has alone.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import SchedulerConfig
from tests.support.drive import VOCAB, Driver, random_prompt, request

NUM_TRACES = 100
OPERATIONS_PER_TRACE = 1000


def random_config(rng: np.random.Generator) -> SchedulerConfig:
    """Sizes from starved to ample, so that each budget is the scarce one now and then."""
    return SchedulerConfig(
        block_size=int(rng.choice([16, 16, 16, 32])),
        num_blocks=int(rng.integers(2, 40)),
        max_num_seqs=int(rng.integers(1, 9)),
        max_num_batched_tokens=int(rng.choice([1, 7, 16, 50, 200])),
        max_model_len=int(rng.integers(2, 200)),
        max_prefill_chunk=None if rng.random() < 0.3 else int(rng.integers(1, 40)),
        prefix_caching=bool(rng.random() < 0.7),
        contiguous_blocks=bool(rng.random() < 0.5),
        window=None if rng.random() < 0.7 else int(rng.integers(1, 120)),
    )


def random_operation(driver: Driver, rng: np.random.Generator, prompts: list[list[int]]) -> None:
    """Add a request, end one, or (mostly) take a step."""
    scheduler = driver.scheduler
    dice = rng.random()
    if dice < 0.12 and scheduler.num_waiting < 8:
        prompt = random_prompt(rng, prompts, scheduler.max_seq_len, 0.7)
        max_tokens = int(rng.integers(1, 60))
        driver.add(
            request(
                f"r{rng.integers(1 << 40)}",
                prompt,
                max_tokens,
                min_tokens=int(rng.integers(0, max_tokens + 1)),
                stop_token_ids=frozenset(rng.integers(VOCAB, size=rng.integers(0, 30)).tolist()),
                prompt_logprobs=bool(rng.random() < 0.15),
            )
        )
    elif dice < 0.122:
        scheduler.reset_prefix_cache()
    elif dice < 0.15 and driver.requests:
        seq_id = int(rng.integers(max(0, len(driver.requests) - 12), len(driver.requests)))
        driver.finish(driver.requests[seq_id].request_id)
    else:
        driver.step()


@settings(max_examples=NUM_TRACES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_traces_give_everybody_their_own_tokens(seed: int):
    rng = np.random.default_rng(seed)
    driver = Driver(random_config(rng), pipelined=bool(rng.integers(2)))
    longest = driver.scheduler.max_seq_len
    prompts = [rng.integers(VOCAB, size=int(rng.integers(1, longest))).tolist() for _ in range(3)]
    for _ in range(OPERATIONS_PER_TRACE):
        random_operation(driver, rng, prompts)
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests) > 0
    assert driver.scheduler.num_used_blocks == 0


@settings(max_examples=60, deadline=None)
@given(
    pipelined=st.booleans(),
    num_blocks=st.integers(2, 12),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 64),
    lengths=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), min_size=1, max_size=8),
    steps_between=st.integers(0, 4),
    abort=st.integers(0, 7),
)
def test_small_cases_that_hypothesis_can_shrink(
    pipelined: bool,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    lengths: list[tuple[int, int]],
    steps_between: int,
    abort: int,
):
    config = SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
    )
    driver = Driver(config, pipelined)
    for index, (length, max_tokens) in enumerate(lengths):
        if length < driver.scheduler.max_seq_len:
            driver.add(request(f"r{index}", length, max_tokens))
        for _ in range(steps_between):
            driver.step()
    driver.finish(f"r{abort}")
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests)
    aborted = [r for r in driver.ends.values() if r is None]
    assert len(aborted) <= 1


def test_the_same_calls_make_the_same_plans():
    """Nothing depends on hashes, addresses or the clock."""

    def plans() -> list[list[tuple[int, ...]]]:
        driver = Driver(SchedulerConfig(num_blocks=12, max_model_len=150, max_num_seqs=5))
        driver.add(*[request(f"r{index}", 20 + 7 * index, 30) for index in range(9)])
        driver.run()
        return [
            [(*planned[2:], *row) for planned, row in zip(p.seqs, p.block_tables, strict=True)]
            for p in driver.plans
        ]

    assert plans() == plans()

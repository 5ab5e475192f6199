"""Samples and beams of one prompt: shared by reference, copied on write."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler import BeamChoice, FinishReason, Scheduler, SchedulerConfig
from tests.support.drive import VOCAB, Driver, request, samples

BOTH_LOOPS = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def make(num_blocks: int, pipelined: bool = True, **options: int | bool | None) -> Driver:
    """A driver whose pool has `num_blocks` blocks besides the null block."""
    sizes = {"num_blocks": num_blocks + 1, "max_model_len": 4096} | options
    return Driver(SchedulerConfig(**sizes), pipelined)


def prompt_work(driver: Driver, prompt_len: int) -> int:
    """Prompt tokens computed for the samples or beams `a#0`, `a#1` ..., over all plans."""
    shares = [s for plan in driver.plans for s in plan.seqs if s.request_id.startswith("a#")]
    shares = [s for s in shares if s.start < prompt_len]
    return sum(min(s.start + s.num_tokens, prompt_len) - s.start for s in shares)


def num_copies(driver: Driver) -> int:
    return sum(len(plan.copies) for plan in driver.plans)


@BOTH_LOOPS
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 32, 100])
def test_the_prompt_of_n_samples_is_computed_once(pipelined: bool, caching: bool, prompt_len: int):
    driver = make(200, pipelined, prefix_caching=caching)
    driver.add(*samples("a", 5, prompt_len, 20))
    driver.run()
    driver.verify()
    # Each of the others computes the last prompt token, which it samples at.
    assert prompt_work(driver, prompt_len) == prompt_len + 4
    # The first one writes on in the block itself, all others in a copy of it.
    assert num_copies(driver) == (4 if (prompt_len - 1) % 16 else 0)
    assert driver.scheduler.num_used_blocks == 0


def test_eight_samples_of_a_long_prompt_take_hardly_more_blocks_than_one():
    """At most 1.3 times the blocks of one sample at the prompt."""
    used = {}
    for count in (1, 8):
        driver = make(2000, max_num_batched_tokens=4096)
        driver.add(*samples("a", count, 2048, 100))
        for _ in range(3):
            driver.step()
        used[count] = driver.scheduler.num_used_blocks
        assert driver.scheduler.num_running == count
        driver.run()
        driver.verify()
    assert used[8] <= 1.3 * used[1]


def test_younger_requests_are_served_while_samples_wait_for_their_prompt():
    driver = make(200, max_num_batched_tokens=64, max_prefill_chunk=32)
    driver.add(*samples("a", 3, 90, 2), request("b", 20, 2))
    driver.step()
    assert [s.request_id for s in driver.plans[0].seqs] == ["a#0", "b"]
    driver.run()
    driver.verify()
    assert driver.end_order.index("b") < driver.end_order.index("a#0")


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_sample_takes_the_place_of_one_that_ends_early(steps: int):
    """Whenever the sample that computes the prompt is ended, the others get their tokens."""
    driver = make(200, max_prefill_chunk=32)
    driver.add(*samples("a", 4, 100, 8))
    for _ in range(steps):
        driver.step()
    driver.finish("a#0")
    driver.run()
    driver.verify()
    assert driver.ends == {0: None, **dict.fromkeys((1, 2, 3), FinishReason.LENGTH)}


@BOTH_LOOPS
@pytest.mark.parametrize("caching", [True, False])
def test_samples_in_a_pool_that_cannot_hold_them_all(pipelined: bool, caching: bool):
    """SC23: samples count as sequences; all arrive, and the pool returns to its start."""
    driver = make(29, pipelined, max_num_seqs=4, prefix_caching=caching)
    for name in "abc":
        driver.add(*samples(name, 3, 60, 90))
    driver.run()
    driver.verify()
    assert len(driver.ends) == 9 and max(len(plan.seqs) for plan in driver.plans) == 4
    assert driver.scheduler.num_preemptions > 0
    assert driver.scheduler.num_free_blocks == 29


def test_samples_admitted_after_a_reset_share_nothing_from_before_it():
    """BM26: what is computed later with other weights does not read what older ones wrote."""
    driver = make(200, max_num_seqs=1)
    driver.add(*samples("a", 2, 50, 5))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.run()
    first = next(s for p in driver.plans for s in p.seqs if s.request_id == "a#1")
    assert first.start == 0


def test_a_running_sample_from_before_a_reset_is_not_shared():
    driver = make(200, max_prefill_chunk=40)
    driver.add(*samples("a", 2, 50, 20))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.run()
    driver.verify()
    first = next(s for p in driver.plans for s in p.seqs if s.request_id == "a#1")
    assert (first.start, num_copies(driver)) == (0, 0)


@pytest.mark.parametrize(
    ("sibling", "changes", "message"),
    [
        ("nobody", {}, "is not live"),
        ("a", {"prompt_token_ids": [1, 2, 4]}, "another prompt or salt"),
        ("a", {"cache_salt": (("adapter", "x"),)}, "another prompt or salt"),
    ],
)
def test_a_sibling_must_be_live_and_alike(sibling: str, changes: dict[str, object], message: str):
    scheduler = Scheduler(SchedulerConfig(num_blocks=10, max_model_len=100))
    scheduler.add(request("a", [1, 2, 3]))
    options = {"prompt_token_ids": [1, 2, 3]} | changes
    prompt = options.pop("prompt_token_ids")
    with pytest.raises(ValueError, match=message):
        scheduler.add(request("b", prompt, sibling_of=sibling, **options))  # type: ignore[arg-type]
    assert scheduler.num_waiting == 1


@BOTH_LOOPS
@pytest.mark.parametrize("prompt_len", [1, 16, 33])
def test_beams_read_their_own_tokens_whatever_is_chosen(pipelined: bool, prompt_len: int):
    driver = make(200, pipelined)
    driver.add_beams("a", 4, prompt_len, 60, seed=prompt_len)
    driver.add(request("b", 20, 40))
    driver.run()
    driver.verify()
    assert prompt_work(driver, prompt_len) == prompt_len
    assert num_copies(driver) > 10
    assert driver.scheduler.num_used_blocks == 0


def test_beams_that_do_not_fit_together_take_turns():
    """Each beam needs 4 blocks at the end, the pool has 5."""
    driver = make(5)
    driver.add_beams("a", 3, 20, 40, seed=1)
    driver.run()
    assert driver.scheduler.num_preemptions > 0 and len(driver.ends) == 3


def test_more_beams_than_seats_take_turns():
    driver = make(50, max_num_seqs=2)
    driver.add_beams("a", 5, 20, 30, seed=2)
    driver.run()
    assert len(driver.ends) == 5


def test_choices_that_make_no_sense_change_nothing():
    driver = make(50, pipelined=False)
    scheduler = driver.scheduler
    first, second = samples("a", 2, 5, 10)
    for one in (first, second):
        scheduler.add(request(one.request_id, 5, 10, sibling_of=one.sibling_of, beam=True))
    for choices, message in (
        ([BeamChoice("a#0", "a#0", 1)], "'a#0' is no beam that waits"),  # it has yet to be computed
        ([BeamChoice("a#1", "x", 1)], "'x' is no beam that waits"),
        ([BeamChoice("a#1", "a#1", 1)] * 2, "chosen for twice"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.choose_beams(choices)
    assert [seq.num_known for seq in scheduler.sequences()] == [5, 5]


@settings(max_examples=150, deadline=None)
@given(
    pipelined=st.booleans(),
    caching=st.booleans(),
    num_blocks=st.integers(8, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 80),
    groups=st.lists(
        st.tuples(
            st.booleans(),  # beams or samples
            st.integers(1, 5),  # how many
            st.integers(1, 70),  # prompt
            st.integers(1, 40),  # tokens
            st.integers(0, 3),  # steps after it was added
        ),
        min_size=1,
        max_size=5,
    ),
    abort=st.integers(0, 20),
    reset=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 100)),
)
@example(  # the beam that is ended is the only one that still computes
    pipelined=False,
    caching=False,
    num_blocks=8,
    max_num_seqs=3,
    budget=3,
    groups=[(True, 5, 1, 1, 3)],
    abort=4,
    reset=False,
    window=None,
)
def test_random_groups_give_everybody_their_own_tokens(
    pipelined: bool,
    caching: bool,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    groups: list[tuple[bool, int, int, int, int]],
    abort: int,
    reset: bool,
    window: int | None,
):
    driver = Driver(
        SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=120,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefix_caching=caching,
            window=window,
        ),
        pipelined,
    )
    for index, (beams, count, length, num_tokens, steps) in enumerate(groups):
        prompt = np.random.default_rng(length).integers(VOCAB, size=length).tolist()
        if beams:
            driver.add_beams(f"r{index}", count, prompt, num_tokens, seed=index)
        else:
            driver.add(*samples(f"r{index}", count, prompt, num_tokens))
        for _ in range(steps):
            driver.step()
    live = sorted(r.request_id for r in driver.requests.values())
    driver.finish(live[abort % len(live)])
    if reset:
        driver.scheduler.reset_prefix_cache()
    driver.run()
    driver.verify()
    assert len(driver.ends) == len(driver.requests)
    assert driver.scheduler.num_used_blocks == 0

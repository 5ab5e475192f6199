"""Models whose every layer has an attention window: sequences give up what they no longer see."""

import pytest

from scheduler import SchedulerConfig
from tests.support.drive import Driver, request, samples

BOTH_LOOPS = pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "synchronous"])


def make(window: int, pipelined: bool = True, **options: int | bool | None) -> Driver:
    sizes = {"num_blocks": 101, "max_model_len": 1600, "window": window} | options
    return Driver(SchedulerConfig(**sizes), pipelined)


@BOTH_LOOPS
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [1, 16, 17, 40, 64, 256])
def test_a_long_answer_holds_no_more_blocks_than_its_window(
    pipelined: bool, caching: bool, window: int
):
    driver = make(window, pipelined, prefix_caching=caching)
    driver.add(request("a", 10, 500))
    held: list[int] = []
    while driver.step() is not None:
        held.append(driver.scheduler.num_used_blocks)
    driver.run()
    driver.verify()
    seen = max(window, 17)
    # The window at its worst place among the blocks, and blocks given up two plans later, an
    # eighth of the window at once.
    assert max(held) <= -(-(seen - 1) // 16) + 1 + max(window // 128, 1)
    assert driver.scheduler.num_used_blocks == 0


def test_a_prompt_gives_up_blocks_while_it_is_computed():
    driver = make(64, max_num_batched_tokens=64)
    driver.add(request("a", 1000, 5))
    for _ in range(12):
        driver.step()
    assert driver.scheduler.num_used_blocks <= 63 - 9 * 4 + 8
    driver.run()
    driver.verify()


def test_a_whole_prefix_is_found_again_as_long_as_all_of_it_is_cached():
    driver = make(40)
    driver.add(request("a", list(range(300)), 5))
    driver.run()
    driver.add(request("b", list(range(300)), 5))
    driver.run()
    driver.verify()
    assert driver.last_updates[1].num_cached_tokens == 288
    assert driver.outputs[0] == driver.outputs[1]


def test_a_late_sample_computes_the_prompt_that_others_have_left_behind():
    """The first sample is far beyond the prompt, and its blocks of it are gone."""
    driver = make(20, max_num_seqs=2, prefix_caching=False)
    driver.add(request("b", 5, 60), *samples("a", 2, 50, 100))
    driver.run()
    driver.verify()
    starts = [s.start for p in driver.plans for s in p.seqs if s.request_id == "a#1"]
    assert starts[0] == 0


def test_without_a_window_nothing_is_given_up():
    driver = Driver(SchedulerConfig(num_blocks=101, max_model_len=1600))
    driver.add(request("a", 10, 300))
    for _ in range(200):
        driver.step()
    assert driver.scheduler.num_used_blocks == -(-209 // 16)


def test_an_impossible_window_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        SchedulerConfig(num_blocks=10, max_model_len=100, window=0)

"""Requests and configurations that are refused, and the limits that follow from the sizes."""

import numpy as np
import pytest

from scheduler import Request, Scheduler, SchedulerConfig, StopRules
from tests.support.drive import Driver, request

SMALL = {"num_blocks": 5, "max_model_len": 64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 24}, r"block_size must be one of \(16, 32, 64, 128\), got 24"),
        ({"num_blocks": 1}, "num_blocks must be at least 2 .*, got 1"),
        ({"num_blocks": -3}, "num_blocks must be at least 2 .*, got -3"),
        ({"max_model_len": 1}, "max_model_len must be at least 2 .*, got 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1, got 0"),
        ({"max_prefill_chunk": 0}, "max_prefill_chunk must be at least 1, got 0"),
        ({"ttft_target_s": 0.0}, "ttft_target_s must be positive, got 0.0"),
    ],
)
def test_a_size_out_of_range_is_refused(options: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**(SMALL | options))


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_generating_no_token_is_refused(max_tokens: int):
    """SC19: a request for no tokens is a clear error."""
    with pytest.raises(ValueError, match=f"max_tokens must be at least 1, got {max_tokens}"):
        StopRules(max_tokens=max_tokens)


@pytest.mark.parametrize("min_tokens", [-1, 5])
def test_min_tokens_lies_between_zero_and_max_tokens(min_tokens: int):
    with pytest.raises(ValueError, match=f"between 0 and max_tokens .4., got {min_tokens}"):
        StopRules(max_tokens=4, min_tokens=min_tokens)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token, got shape .0,."),
        (np.empty((0,), np.int64), "at least one token"),
        ([[1, 2], [3, 4]], "flat list .* got shape .2, 2."),
        ([1.5, 2.0], "token ids are integers, got float64"),
        ([True], "token ids are integers, got bool"),
        (["a"], "token ids are integers"),
        ([3, -1], "token ids are from 0 to 2147483647, got -1 to 3"),
        ([2**31], "token ids are from 0 to 2147483647, got 2147483648 to 2147483648"),
    ],
)
def test_a_prompt_that_is_no_list_of_tokens_is_refused_alone(prompt: list[int], message: str):
    """SC20: an empty prompt fails by itself; later requests are served."""
    driver = Driver(SchedulerConfig(**SMALL))
    bad = Request(request_id="bad", prompt_token_ids=prompt, stop=StopRules(max_tokens=1))
    with pytest.raises(ValueError, match=message):
        driver.add(bad)
    driver.add(request("good", 5))
    driver.run()
    driver.verify()
    assert driver.end_order == ["good"]


@pytest.mark.parametrize(
    ("sizes", "longest", "which"),
    [
        ({"num_blocks": 100, "max_model_len": 64}, 64, "the model's limit of 64 tokens"),
        ({"num_blocks": 5, "max_model_len": 64}, 64, "the model's limit of 64 tokens"),
        ({"num_blocks": 4, "max_model_len": 64}, 48, "the KV pool of 3 blocks of 16 tokens"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused_with_the_limit_that_it_hits(
    sizes: dict[str, int], longest: int, which: str
):
    """SC17: at and above the limit an error, one below it exactly one token."""
    driver = Driver(SchedulerConfig(**sizes))
    assert driver.scheduler.max_seq_len == longest
    for length in (longest, longest + 1, 10 * longest):
        with pytest.raises(
            ValueError, match=f"has {length} tokens, at most {longest - 1} .*{which}"
        ):
            driver.add(request("long", length))
    driver.add(request("a", longest - 1, 1), request("b", longest - 1, 5), request("c", 4, 1000))
    driver.run()
    driver.verify()
    assert [len(tokens) for tokens in driver.outputs.values()] == [1, 1, longest - 4]


def test_a_live_request_id_is_unique_and_free_again_after_the_end():
    driver = Driver(SchedulerConfig(**SMALL))
    (first,) = driver.add(request("twin", 4))
    with pytest.raises(ValueError, match="request 'twin' is still being served"):
        driver.add(request("twin", 5))
    driver.run()
    (second,) = driver.add(request("twin", 6))
    driver.run()
    driver.verify()
    assert first != second and len(driver.outputs) == 2


def test_an_array_prompt_is_copied():
    prompt = np.arange(5, dtype=np.int32)
    scheduler = Scheduler(SchedulerConfig(**SMALL))
    scheduler.add(Request(request_id="a", prompt_token_ids=prompt, stop=StopRules(max_tokens=1)))
    prompt[:] = 0
    plan = scheduler.schedule()
    assert plan is not None and plan.token_ids.tolist() == [0, 1, 2, 3, 4]

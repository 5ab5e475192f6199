"""Deltas add up to the whole result."""

import dataclasses
import inspect

import pytest

from pagedjax.outputs import (
    CompletionOutput,
    RequestOutput,
    Timings,
    TokenLogprobs,
    completion_output,
    request_output,
)


def logprob(token):
    return TokenLogprobs(token_id=token, logprob=-float(token))


def piece(index, text, tokens, *, reason=None, stop=None, with_logprobs=True):
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=tuple(tokens),
        logprobs=tuple(map(logprob, tokens)) if with_logprobs else None,
        finish_reason=reason,
        stop_reason=stop,
    )


def delta(*outputs, finished=False, prompt_logprobs=None, ended=None, **times):
    return RequestOutput(
        request_id="r",
        prompt="hi",
        prompt_token_ids=(7, 8, 9),
        prompt_logprobs=prompt_logprobs,
        outputs=outputs,
        num_cached_tokens=2,
        timings=Timings(arrived=1.0, finished=ended, **times),
        finished=finished,
    )


DELTAS = (
    delta(prompt_logprobs=(None, logprob(8)), scheduled=2.0),
    delta(piece(1, "x", [10]), prompt_logprobs=(logprob(9),), scheduled=2.0, first_token=4.0),
    delta(piece(0, "", [20]), piece(1, "yz", [11, 12], reason="length"), scheduled=2.0),
    delta(
        piece(0, "tail", [21], reason="stop", stop="!"),
        finished=True,
        scheduled=2.0,
        first_token=4.0,
        ended=9.0,
    ),
)


def test_deltas_add_up_to_the_whole_result():
    whole = RequestOutput.joined(DELTAS)
    assert whole.outputs == (
        piece(0, "tail", [20, 21], reason="stop", stop="!"),
        piece(1, "xyz", [10, 11, 12], reason="length"),
    )
    assert whole.prompt_logprobs == (None, logprob(8), logprob(9))
    assert whole.finished
    assert whole.error is None
    assert (whole.num_prompt_tokens, whole.num_generated_tokens) == (3, 5)
    assert whole.num_cached_tokens == 2
    assert whole.timings == DELTAS[-1].timings


def test_adding_one_delta_at_a_time_gives_the_same():
    so_far = DELTAS[0]
    for step in DELTAS[1:]:
        so_far = so_far.extended(step)
    assert so_far == RequestOutput.joined(DELTAS)


def test_one_delta_is_a_result():
    assert RequestOutput.joined(DELTAS[:1]) == DELTAS[0]


def test_log_probabilities_that_were_not_asked_for_stay_none():
    parts = [delta(piece(0, t, [1], with_logprobs=False)) for t in "ab"]
    whole = RequestOutput.joined(parts)
    assert whole.outputs[0].logprobs is None
    assert whole.prompt_logprobs is None


def test_deltas_of_another_request_are_refused():
    with pytest.raises(ValueError, match="'r', 'other'"):
        DELTAS[0].extended(dataclasses.replace(DELTAS[1], request_id="other"))


def test_nothing_may_follow_the_end():
    with pytest.raises(ValueError, match="after it finished"):
        DELTAS[-1].extended(DELTAS[0])
    with pytest.raises(ValueError, match="at least one"):
        RequestOutput.joined(())


def test_times_are_differences_from_the_arrival_and_none_until_they_happened():
    times = RequestOutput.joined(DELTAS).timings
    assert (times.queued, times.time_to_first_token, times.total) == (1.0, 3.0, 8.0)
    waiting = Timings(arrived=5.0)
    assert (waiting.queued, waiting.time_to_first_token, waiting.total) == (None, None, None)


def test_a_failed_request_says_why_and_keeps_what_it_had():
    failed = RequestOutput.failed("too long", request_id="r", timings=Timings(arrived=1.0))
    whole = DELTAS[1].extended(dataclasses.replace(failed, prompt="hi"))
    assert whole.error == "too long"
    assert whole.finished
    assert [o.finish_reason for o in whole.outputs] == ["error", None]
    assert whole.outputs[1].text == "x"


@pytest.mark.parametrize("made", [completion_output, request_output])
def test_an_output_that_was_made_fast_is_like_any_other(made):
    """Equal, hashed and shown alike, with every field, and as frozen as one."""
    names = list(inspect.signature(made).parameters)
    values = {name: f"the {name}" for name in names}
    kind = {completion_output: CompletionOutput, request_output: RequestOutput}[made]
    fast, slow = made(**values), kind(**values)
    assert type(fast) is kind and fast == slow and repr(fast) == repr(slow)
    assert hash(fast) == hash(slow) and dataclasses.replace(fast) == slow
    assert {field.name for field in dataclasses.fields(kind)} - set(names) <= {"error"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(fast, names[0], "another")
    with pytest.raises(dataclasses.FrozenInstanceError):
        delattr(fast, names[0])

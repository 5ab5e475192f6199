"""Blocking generation on top of an engine without a model."""

import numpy as np
import pytest

from pagedjax.frontend import prompt_list
from pagedjax.llm import LLM
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from tests.support.echo_engine import EchoEngine


@pytest.fixture
def llm():
    return LLM.from_engine(EchoEngine())


def text_of(result):
    return result.outputs[0].text


def test_results_come_in_the_order_of_the_prompts(llm):
    lengths = [9, 1, 5, 3, 7, 2]  # so they finish in another order, and not all at once
    prompts = [f"{n}-long prompt" for n in lengths]
    params = [SamplingParams(max_tokens=n) for n in lengths]
    results = llm.generate(prompts, params, progress=False)
    assert [r.prompt for r in results] == prompts
    assert [text_of(r) for r in results] == [p[:n] for p, n in zip(prompts, lengths, strict=True)]
    assert all(r.finished and r.error is None for r in results)
    assert not llm.engine.has_unfinished()
    assert llm.engine.aborted == []  # SV03


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], [[97, 98]]),
        (np.array([97, 98]), [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["ab", [97]], ["ab", [97]]),
        ([np.int64(97)], [[97]]),
        ([], []),
        ([[]], [[]]),
        ([""], [""]),
    ],
)
def test_one_prompt_or_many_as_text_or_token_ids(prompts, wanted):
    assert prompt_list(prompts) == wanted


def test_token_ids_are_prompts_without_text(llm):
    (result,) = llm.generate([97, 98], SamplingParams(max_tokens=4), progress=False)
    assert (result.prompt, result.prompt_token_ids, text_of(result)) == (None, (97, 98), "abab")


def test_no_prompts_give_no_results(llm):
    assert llm.generate([], progress=False) == []


BYTES = [b"bytes", bytearray(b"bytes"), memoryview(b"bytes")]


@pytest.mark.parametrize("prompts", [None, 5, *BYTES, {"prompt": "x"}, {1, 2}])
def test_what_is_no_prompt_at_all_is_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompts are text"):
        llm.generate(prompts, progress=False)


BAD = ["", [], "x" * 64, "x" * 640, [1.5], [True], None, "half \ud83d", ["a", 1], *BYTES[:2]]


@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_request_that_cannot_be_served_fails_alone(llm, bad):
    """SC01, SC03, SC17, SC20: whatever is wrong with one, the others finish."""
    good = SamplingParams(max_tokens=3)
    results = llm.generate([bad, "abc", bad, "de"], good, progress=False)
    assert [r.outputs[0].finish_reason for r in results] == ["error", "length", "error", "length"]
    assert [text_of(r) for r in results] == ["", "abc", "", "ded"]
    assert all(r.finished for r in results)
    assert results[0].error
    assert results[1].error is None
    assert llm.generate("later", good, progress=False)[0].error is None


def test_a_long_queue_behind_a_bad_head_is_served(llm):
    """SC03."""
    results = llm.generate(["x" * 5000, *map(str, range(20))], progress=False)
    assert [r.error is None for r in results] == [False] + [True] * 20


def test_params_must_match_the_prompts(llm):
    with pytest.raises(ValueError, match="got 1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], progress=False)
    with pytest.raises(ValueError, match="wanted SamplingParams, got dict"):
        llm.generate(["a"], [{"temperature": 0}], progress=False)
    for wrong in (BeamSearchParams(beam_width=2), 5, iter([SamplingParams()])):
        with pytest.raises(ValueError, match=f"wanted SamplingParams, got {type(wrong).__name__}"):
            llm.generate(["a"], wrong, progress=False)


def test_priorities_are_handed_on_and_must_match_the_prompts(llm):
    one = SamplingParams(max_tokens=1)
    llm.generate(["a", "b"], one, priority=[2, -1], progress=False)
    llm.generate(["a", "b"], one, priority=np.array([4, 5]), progress=False)
    llm.chat([{"role": "user", "content": "x"}], one, priority=3, progress=False)
    list(llm.stream(["a", "b"], one, priority=7))
    llm.generate(["a"], one, progress=False)
    assert llm.engine.priorities == [2, -1, 4, 5, 3, 7, 7, 0]
    for wrong in ([1], 1.5, "ab", [1, True], None):
        with pytest.raises(ValueError, match="one for each of 2 prompts"):
            llm.generate(["a", "b"], one, priority=wrong, progress=False)


def test_without_params_the_checkpoints_own_are_used(llm):
    llm.generate("a", progress=False)
    assert llm.engine.seen_params == [SamplingParams.from_generation(llm.engine.generation)]


def test_chat_renders_one_conversation_or_several(llm):
    hello = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(hello, SamplingParams(max_tokens=2), progress=False)
    assert result.prompt == "<user>hi<assistant>"
    results = llm.chat([hello, [], hello], progress=False)
    assert [r.error is None for r in results] == [True, True, True]
    with pytest.raises(ValueError, match="list of messages"):
        llm.chat("hi", progress=False)


def test_a_stop_string_is_found_across_tokens(llm):
    (result,) = llm.generate("abcd", SamplingParams(stop="da", max_tokens=9), progress=False)
    assert text_of(result) == "abc"
    assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", "da")
    assert result.num_generated_tokens == 5


def test_stream_yields_what_generate_adds_up(llm):
    params = SamplingParams(max_tokens=4)
    parts = {0: "", 1: "", 2: ""}
    for index, delta in llm.stream(["ab", "cd", ""], params):
        parts[index] += text_of(delta)
    assert parts == {0: "abab", 1: "cdcd", 2: ""}


def test_closing_a_stream_early_aborts_what_runs(llm):
    stream = llm.stream(["ab", "cd"], SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert len(llm.engine.aborted) == 2
    assert text_of(llm.generate("ok", SamplingParams(max_tokens=2), progress=False)[0]) == "ok"
    assert not llm.engine.has_unfinished()


def test_two_streams_at_once_do_not_take_each_others_deltas(llm):
    params = SamplingParams(max_tokens=3)
    first, second = llm.stream("abc", params), llm.stream("xyz", params)
    texts = ["", ""]
    for (_, a), (_, b) in zip(first, second, strict=True):
        texts[0] += text_of(a)
        texts[1] += text_of(b)
    assert texts == ["abc", "xyz"]


def test_an_engine_failure_reaches_the_caller(llm):
    llm.engine.fail_at = 2
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(["ab", "cd"], progress=False)


def test_progress_is_shown_on_standard_error_only(llm, capsys):
    llm.generate(["ab", "cd"], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    assert "tokens/s" in shown.err
    llm.generate(["ab", "cd"], progress=False)
    assert capsys.readouterr().err == ""

"""Requests that are not streamed: one output, which is the sum of what a stream would bring."""

import dataclasses
import functools

import pytest

from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from tests.support.echo_engine import ByteTokenizer
from tests.support.tiny_engines import drain, random_prompts, tiny_engine

PROMPTS = random_prompts([5, 17, 33], seed=40)
FREE = SamplingParams(seed=3, temperature=1.3, max_tokens=30, ignore_eos=True)
WANTED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "samples": dataclasses.replace(FREE, n=3),
    "log-probabilities": dataclasses.replace(FREE, n=2, logprobs=2, prompt_logprobs=1),
    "stop strings": dataclasses.replace(FREE, n=4, stop=("a", "e", "x", "bc")),
    "kept stop strings": dataclasses.replace(
        FREE, n=4, stop=("a", "e", "xy"), include_stop_str_in_output=True
    ),
    "stop tokens": dataclasses.replace(FREE, n=4, stop_token_ids=tuple(range(0, 128, 9))),
    "kept stop tokens": dataclasses.replace(
        FREE, n=4, stop_token_ids=tuple(range(0, 128, 9)), include_stop_str_in_output=True
    ),
    "a token": dataclasses.replace(FREE, max_tokens=1),
    "beams": BeamSearchParams(beam_width=3, max_tokens=9),
}


@functools.cache
def engine_of(tokenizer):
    """One that remembers nothing from one test to the next."""
    return tiny_engine(tokenizer=ByteTokenizer() if tokenizer else None, prefix_caching=False)


def deltas_of(params, *, stream, tokenizer):
    """The deltas of each prompt's request, without times; and how many tokens were generated."""
    engine = engine_of(tokenizer)
    before = engine.stats().generated_tokens
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), f"prompt {index}", prompt, params, stream=stream)
    deltas = [[] for _ in PROMPTS]
    while engine.has_unfinished():
        for delta in engine.step():
            timings = dataclasses.replace(delta.timings, arrived=0, scheduled=0)
            assert None not in (timings.first_token, timings.finished) or not delta.finished
            timings = dataclasses.replace(timings, first_token=None, finished=None)
            delta = dataclasses.replace(delta, timings=timings)
            deltas[int(delta.request_id)].append(delta)
    return deltas, engine.stats().generated_tokens - before


@pytest.mark.parametrize(
    ("wanted", "tokenizer"),
    [(name, True) for name in WANTED]
    + [(name, False) for name in WANTED if "stop strings" not in name],
)
def test_what_comes_at_the_end_is_all_that_a_stream_brings(wanted, tokenizer):
    params = WANTED[wanted]
    streamed, count = deltas_of(params, stream=True, tokenizer=tokenizer)
    at_the_end, same_count = deltas_of(params, stream=False, tokenizer=tokenizer)
    assert [len(deltas) for deltas in at_the_end] == [1] * len(PROMPTS)
    assert [deltas[0] for deltas in at_the_end] == [RequestOutput.joined(d) for d in streamed]
    assert all(deltas[0].finished for deltas in at_the_end)
    assert count == same_count
    if params.max_tokens > 1 and not isinstance(params, BeamSearchParams):
        assert min(map(len, streamed)) > 1


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_token_is_in_the_text_only_if_it_is_to_be_kept(keep, stream):
    params = dataclasses.replace(
        FREE, n=4, stop_token_ids=tuple(range(0, 128, 9)), include_stop_str_in_output=keep
    )
    deltas, _ = deltas_of(params, stream=stream, tokenizer=True)
    outputs = [output for parts in deltas for output in RequestOutput.joined(parts).outputs]
    stopped = [output for output in outputs if output.finish_reason == "stop"]
    assert len(stopped) > 6
    for output in stopped:
        assert output.token_ids[-1] == output.stop_reason
        said = output.token_ids if keep else output.token_ids[:-1]
        assert output.text == ByteTokenizer().decode(said)


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_an_aborted_request_that_is_not_streamed_tells_all_it_has(steps):
    engine = engine_of(True)
    for name, stream in (("streamed", True), ("held", False)):
        engine.add_request(name, None, PROMPTS[0], FREE, stream=stream)
    deltas = [delta for _ in range(steps) for delta in engine.step()]
    engine.abort("streamed")
    engine.abort("held")
    while engine.has_unfinished():
        deltas += engine.step()
    held = [delta for delta in deltas if delta.request_id == "held"]
    streamed = RequestOutput.joined([d for d in deltas if d.request_id == "streamed"])
    assert len(held) == 1 and held[0].finished
    assert held[0].outputs == streamed.outputs
    assert held[0].outputs[0].finish_reason == "abort"
    assert len(held[0].outputs[0].token_ids) == max(steps - 2, 0)


def test_of_an_aborted_request_samples_that_had_ended_keep_their_own_end():
    params = dataclasses.replace(FREE, n=4, stop_token_ids=tuple(range(0, 128, 9)))
    deltas = {"streamed": [], "held": []}
    engine = tiny_engine(tokenizer=ByteTokenizer())
    for name in deltas:
        engine.add_request(name, None, PROMPTS[1], params, stream=name == "streamed")
    while not any(output.finish_reason for d in deltas["streamed"] for output in d.outputs):
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    for name in deltas:
        engine.abort(name)
    while engine.has_unfinished():
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    assert len(deltas["held"]) == 1
    outputs = RequestOutput.joined(deltas["streamed"]).outputs
    assert {output.finish_reason for output in outputs} == {"stop", "abort"}
    assert deltas["held"][0].outputs == outputs


def test_a_pool_that_is_too_small_for_all_changes_nothing_of_what_comes_at_the_end():
    """Preempted requests compute their tokens again, and tell none of them twice."""
    params = dataclasses.replace(FREE, n=3, stop=("a", "xy"))
    wanted, _ = deltas_of(params, stream=False, tokenizer=True)
    engine = tiny_engine(tokenizer=ByteTokenizer(), num_blocks=9)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), None, prompt, params, stream=index == 1)
    outputs = drain(engine)
    assert engine.stats().preemptions > 2
    found = [outputs[str(index)].outputs for index in range(len(PROMPTS))]
    assert found == [deltas[0].outputs for deltas in wanted]


def test_what_was_not_handed_out_yet_is_the_first_thing_that_a_restored_request_says(tmp_path):
    """A snapshot knows tokens, whether or not deltas have had them."""
    results = []
    for stream in (True, False):
        engine = tiny_engine(tokenizer=ByteTokenizer())
        engine.add_request("0", None, PROMPTS[1], FREE, stream=stream)
        for _ in range(7):
            engine.step()
        engine.snapshot(tmp_path / "snapshot")
        other = tiny_engine(tokenizer=ByteTokenizer())
        deltas = other.restore(tmp_path / "snapshot")
        assert [len(delta.outputs[0].token_ids) for delta in deltas] == [5]
        while other.has_unfinished():
            deltas += other.step()
        results.append(RequestOutput.joined(deltas).outputs)
    assert results[0] == results[1]

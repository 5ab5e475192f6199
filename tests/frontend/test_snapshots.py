"""Snapshots and other weights through `LLM` and `AsyncLLM`."""

import asyncio

import pytest

from pagedjax.async_llm import AsyncLLM
from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import plain_greedy, random_prompts, tiny_engine, tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = random_prompts([20, 7])


def wanted():
    return [plain_greedy(tiny_model(), prompt, 16) for prompt in PROMPTS]


def save_stream(path, deltas):
    """A snapshot of an engine whose stream has brought so many deltas."""
    llm = LLM.from_engine(tiny_engine())
    stream = llm.stream(PROMPTS, PARAMS)
    for _ in range(deltas):
        next(stream)
    llm.snapshot(path)
    stream.close()


def test_a_stream_goes_on_in_another_llm(tmp_path):
    save_stream(tmp_path / "s", 9)
    other = LLM.from_engine(tiny_engine())
    parts = {0: [], 1: []}
    with pytest.raises(ValueError, match="is no snapshot"):
        other.restore(tmp_path)
    for index, delta in other.restore(tmp_path / "s"):
        parts[index].append(delta)
    joined = [RequestOutput.joined(parts[index]) for index in (0, 1)]
    assert [output.outputs[0].token_ids for output in joined] == wanted()
    assert [list(output.prompt_token_ids) for output in joined] == PROMPTS
    assert parts[0][0].outputs[0].token_ids and not parts[0][0].finished
    # Its own requests get other names.
    (again,) = other.generate([PROMPTS[0]], PARAMS, progress=False)
    assert again.outputs[0].token_ids == wanted()[0]
    assert again.num_cached_tokens == 16


def test_others_may_run_before_a_restored_stream_begins(tmp_path):
    save_stream(tmp_path / "s", 9)
    other = LLM.from_engine(tiny_engine())
    restored = other.restore(tmp_path / "s")
    assert other.generate([PROMPTS[1]], PARAMS, progress=False)[0].finished
    parts = {0: [], 1: []}
    for index, delta in restored:
        parts[index].append(delta)
    joined = [RequestOutput.joined(parts[index]) for index in (0, 1)]
    assert [output.outputs[0].token_ids for output in joined] == wanted()


def test_a_restored_stream_that_is_closed_early_aborts_its_requests(tmp_path):
    save_stream(tmp_path / "s", 1)
    other = LLM.from_engine(tiny_engine())
    restored = other.restore(tmp_path / "s")
    next(restored)
    restored.close()
    assert other.generate([PROMPTS[1]], PARAMS, progress=False)[0].finished
    assert not other.engine.has_unfinished()
    assert other.engine.stats().blocks_used == 0


def test_an_async_engine_swaps_weights_and_writes_snapshots(tmp_path):
    second = tiny_model(seed=1)

    async def tokens(llm):
        deltas = [delta async for delta in llm.generate(PROMPTS[0], PARAMS)]
        return RequestOutput.joined(deltas).outputs[0].token_ids

    async def run():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            first = await tokens(llm)
            await llm.swap_params(second.params)
            with pytest.raises(ValueError, match="got None, wanted"):
                await llm.swap_params({})
            swapped = await tokens(llm)
            await llm.snapshot(tmp_path / "s")
            return first, swapped

    first, swapped = asyncio.run(run())
    assert first == wanted()[0]
    assert swapped == plain_greedy(second, PROMPTS[0], 16) != first
    with pytest.raises(ValueError, match="another model's weights"):
        tiny_engine().restore(tmp_path / "s")
    engine = tiny_engine(second)
    assert engine.restore(tmp_path / "s") == []
    assert engine.stats().blocks_cached == 2

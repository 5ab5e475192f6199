"""Snapshots and other weights through `LLM` and `AsyncLLM`."""

import asyncio
import dataclasses
import threading

import pytest

from pagedjax.async_llm import AsyncLLM
from pagedjax.llm import LLM
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
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


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_restored_stream_that_is_closed_early_aborts_its_requests(tmp_path, has_begun):
    save_stream(tmp_path / "s", 1)
    other = LLM.from_engine(tiny_engine())
    restored = other.restore(tmp_path / "s")
    if has_begun:
        next(restored)
    restored.close()
    assert not other._inboxes
    assert other.generate([PROMPTS[1]], PARAMS, progress=False)[0].finished
    assert not other.engine.has_unfinished()
    assert other.engine.stats().blocks_used == 0


def test_a_snapshot_is_restored_at_once_behind_a_stream_that_was_closed_early(tmp_path):
    """Though the engine has its last words still to say, which nobody waits for."""
    save_stream(tmp_path / "s", 9)
    other = LLM.from_engine(tiny_engine())
    stream = other.stream(PROMPTS, PARAMS)
    next(stream)
    with pytest.raises(ValueError, match="idle engine"):
        other.restore(tmp_path / "s")
    stream.close()
    assert len({index for index, _ in other.restore(tmp_path / "s")}) == 2

    async def run():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            stream = llm.generate(PROMPTS[0], PARAMS)
            await anext(stream)
            with pytest.raises(ValueError, match="idle engine"):
                await llm.restore(tmp_path / "s")
            await stream.aclose()
            streams = await llm.restore(tmp_path / "s")
            return [[delta async for delta in one][-1].finished for one in streams.values()]

    assert asyncio.run(run()) == [True, True]


def test_streams_go_on_in_an_async_engine(tmp_path):
    """Each under its own name; the engine refuses while anything runs, and is of use afterwards."""

    # So many that none is over before the snapshot, though the engine is ahead of its reader.
    params = dataclasses.replace(PARAMS, max_tokens=64)
    tokens = [plain_greedy(tiny_model(), prompt, 64) for prompt in PROMPTS]

    async def whole(stream):
        return RequestOutput.joined([delta async for delta in stream])

    async def before():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            streams = [
                llm.generate(prompt, params, request_id=name)
                for prompt, name in zip(PROMPTS, "ab", strict=True)
            ]
            for _ in range(4):
                for stream in streams:
                    await anext(stream)
            saved = asyncio.create_task(llm.snapshot(tmp_path / "s"))
            await asyncio.sleep(0)  # it is asked for first, and no step comes between the two
            with pytest.raises(ValueError, match=r"has requests: \['a', 'b'\]"):
                await llm.restore(tmp_path / "s")
            await saved
            return [(await whole(stream)).outputs[0].token_ids for stream in streams]

    async def after():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            with pytest.raises(ValueError, match="is no snapshot"):
                await llm.restore(tmp_path)
            streams = await llm.restore(tmp_path / "s")
            with pytest.raises(ValueError, match="'a' is in use"):
                await anext(llm.generate([1, 2], PARAMS, request_id="a"))
            outputs = {name: await whole(stream) for name, stream in streams.items()}
            again = await whole(llm.generate(PROMPTS[0], params, request_id="a"))
            return outputs, again

    async def left():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            streams = await llm.restore(tmp_path / "s")
            said = await anext(streams["a"])
            await streams["a"].aclose()
            rest = await whole(streams["b"])
            return said, rest, await llm.stats()

    late = asyncio.run(before())
    assert all(rest and want[-len(rest) :] == rest
               for rest, want in zip(late, tokens, strict=True))  # fmt: skip
    outputs, again = asyncio.run(after())
    assert list(outputs) == ["a", "b"]
    assert [output.outputs[0].token_ids for output in outputs.values()] == tokens
    assert [list(output.prompt_token_ids) for output in outputs.values()] == PROMPTS
    assert again.outputs[0].token_ids == tokens[0]
    said, rest, stats = asyncio.run(left())
    assert 0 < len(said.outputs[0].token_ids) < 64 and not said.finished
    assert rest.outputs[0].token_ids == tokens[1]
    assert stats.num_running == 0 and stats.blocks_used == 0


def test_an_async_beam_search_finds_what_the_blocking_one_finds():
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    wanted = LLM.from_engine(tiny_engine()).beam_search(PROMPTS, search, progress=False)

    async def run():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            with pytest.raises(ValueError, match="wanted BeamSearchParams, got SamplingParams"):
                await llm.beam_search(PROMPTS[0], PARAMS)
            doomed = asyncio.create_task(llm.beam_search(PROMPTS[0], search))
            await asyncio.sleep(0.01)
            doomed.cancel()
            tasks = [llm.beam_search(prompt, search) for prompt in PROMPTS]
            return await asyncio.gather(*tasks), await llm.stats()

    outputs, stats = asyncio.run(run())
    assert [output.outputs for output in outputs] == [output.outputs for output in wanted]
    assert stats.blocks_used == 0


@pytest.mark.parametrize("num_blocks", [6, 300])
def test_a_stream_goes_on_in_a_pool_of_another_size(num_blocks):
    llm = LLM.from_engine(tiny_engine())
    stream = llm.stream(PROMPTS, PARAMS)
    parts = {0: [], 1: []}
    for _ in range(9):
        index, delta = next(stream)
        parts[index].append(delta)
    llm.resize_pool(num_blocks)
    for refused in (1, None, "6", 10**12):
        with pytest.raises(ValueError, match="num_blocks"):
            llm.resize_pool(refused)
    for index, delta in stream:
        parts[index].append(delta)
    assert llm.engine.stats().blocks_total == num_blocks - 1
    assert [RequestOutput.joined(parts[i]).outputs[0].token_ids for i in (0, 1)] == wanted()


def test_an_async_pool_gets_another_size_between_two_steps():
    """Called while the engine's thread runs; what is refused stops nothing."""

    async def run():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            threads = []
            resize = llm._engine.resize_pool

            def noted(num_blocks):
                assert not llm._engine._in_step
                threads.append(threading.current_thread().name)
                resize(num_blocks)

            llm._engine.resize_pool = noted
            streams = [llm.generate(prompt, PARAMS) for prompt in PROMPTS]
            parts = [[await anext(stream)] for stream in streams]
            for num_blocks in (6, 40):
                await llm.resize_pool(num_blocks)
            for refused in (None, 10**12):
                with pytest.raises(ValueError, match="num_blocks"):
                    await llm.resize_pool(refused)
            for stream, part in zip(streams, parts, strict=True):
                part.extend([delta async for delta in stream])
            return parts, threads, await llm.stats()

    parts, threads, stats = asyncio.run(run())
    assert [RequestOutput.joined(part).outputs[0].token_ids for part in parts] == wanted()
    assert threads == ["pagedjax-engine"] * 4
    assert stats.blocks_total == 39


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


def test_arguments_of_a_wrong_type_are_refused_and_harm_no_running_request():
    """What is raised in the engine's thread and is no refusal ends the engine for everybody."""
    params = tiny_model().params

    async def main():
        async with AsyncLLM.from_engine(tiny_engine()) as llm:
            stream = llm.generate(PROMPTS[0], PARAMS)
            deltas = [await anext(stream)]
            for refused in (
                lambda: llm.abort(["0"]),
                lambda: llm.swap_params(None),
                lambda: llm.swap_params(dict.fromkeys(params, "weights")),
                lambda: anext(llm.generate(PROMPTS[1], PARAMS, request_id=7)),
                lambda: anext(llm.generate(PROMPTS[1], PARAMS, request_id=["7"])),
            ):
                with pytest.raises(ValueError, match="got"):
                    await refused()
            for refused in (lambda: llm.snapshot(None), lambda: llm.restore(None)):
                with pytest.raises(TypeError):
                    await refused()
            deltas += [delta async for delta in stream]
            return RequestOutput.joined(deltas).outputs[0].token_ids

    assert asyncio.run(main()) == wanted()[0]

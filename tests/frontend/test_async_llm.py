"""Streams of many asyncio tasks on top of one engine thread."""

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from pagedjax.async_llm import AsyncLLM, EngineStopped
from pagedjax.sampling_params import SamplingParams
from tests.support.echo_engine import EchoEngine

LONG = SamplingParams(max_tokens=100_000)


class SlowEngine(EchoEngine):
    """A step takes a millisecond, as on a device, so that tasks get to run in between."""

    def step(self):
        time.sleep(0.001)
        return super().step()


@pytest.fixture
def engine():
    return SlowEngine(max_num_seqs=64)


@pytest.fixture
def llm(engine):
    llm = AsyncLLM.from_engine(engine)
    yield llm
    llm.close()


async def text_of(stream):
    return "".join([delta.outputs[0].text async for delta in stream])


async def until(condition):
    """Wait until `condition()` holds; the test's own timeout is the bound."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def short(tokens):
    return SamplingParams(max_tokens=tokens)


def test_deltas_of_one_request_come_in_order_and_add_up(llm):
    async def main():
        deltas = [delta async for delta in llm.generate("abc", short(5))]
        assert [d.outputs[0].text for d in deltas] == list("abcab")
        assert [d.finished for d in deltas] == [False] * 4 + [True]

    asyncio.run(main())


def test_many_tasks_share_the_engine_and_get_their_own_text(llm, engine):
    async def main():
        prompts = [f"{i}-prompt" for i in range(50)]
        texts = await asyncio.gather(*(text_of(llm.generate(p, short(6))) for p in prompts))
        assert texts == [p[:6] for p in prompts]

    asyncio.run(main())
    assert engine.steps < 50 * 6  # together, not one after the other
    assert engine.aborted == []  # SV03: a normal end is no abort
    assert llm._streams == {} and llm._running == set()  # and leaves nothing behind


@pytest.mark.parametrize("how", ["aclose", "forget", "cancel", "exception"])
def test_a_reader_that_leaves_early_aborts_its_request(llm, engine, how):
    """SV01: the engine must not decode on for nobody."""

    async def reader(started):
        async with contextlib.aclosing(llm.generate("abc", LONG)) as stream:
            async for _ in stream:
                started.set()
                if how == "exception":
                    raise KeyError("reader's own")
                if how == "aclose":
                    break

    async def forgetful(started):
        async for _ in llm.generate("abc", LONG):
            started.set()
            break

    async def main():
        started = asyncio.Event()
        task = asyncio.create_task((forgetful if how == "forget" else reader)(started))
        await started.wait()
        if how == "cancel":
            task.cancel()
        await asyncio.wait([task])
        if how == "exception":
            assert isinstance(task.exception(), KeyError)
        gc.collect()
        await until(lambda: not engine.has_unfinished())
        assert len(engine.aborted) == 1
        assert await text_of(llm.generate("next", short(4))) == "next"

    asyncio.run(main())


def test_all_readers_may_leave_at_once_again_and_again(llm, engine):
    """SV05."""
    engine.max_num_seqs = 4

    async def main():
        for _ in range(5):
            tasks = [asyncio.create_task(text_of(llm.generate("ab", LONG))) for _ in range(64)]
            await until(lambda: engine._live)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await until(lambda: not engine.has_unfinished() and not llm._streams)
        assert await text_of(llm.generate("last", short(4))) == "last"

    asyncio.run(main())


def test_abort_ends_the_stream_with_a_last_delta(llm):
    async def main():
        deltas = []
        async for delta in llm.generate("abc", LONG, request_id="mine"):
            deltas.append(delta)
            if len(deltas) == 2:
                await llm.abort("mine")
        assert deltas[-1].finished
        assert deltas[-1].outputs[0].finish_reason == "abort"
        await llm.abort("mine")  # not any more
        await llm.abort("never was")

    asyncio.run(main())


def test_priorities_are_handed_on(llm, engine):
    async def main():
        await text_of(llm.generate("a", short(1), priority=-3))
        await text_of(llm.chat([{"role": "user", "content": "b"}], short(1), priority=2))

    asyncio.run(main())
    assert engine.priorities == [-3, 2]


def test_two_live_requests_cannot_share_an_id(llm):
    """SV10: the second is refused, the first goes on, and the id is free after its end."""

    async def main():
        first = llm.generate("abc", short(50), request_id="same")
        await anext(first)
        with pytest.raises(ValueError, match="'same' is in use"):
            await anext(llm.generate("xyz", short(5), request_id="same"))
        assert len(await text_of(first)) == 49
        assert await text_of(llm.generate("xyz", short(3), request_id="same")) == "xyz"

    asyncio.run(main())


def test_made_up_ids_avoid_the_callers(llm):
    async def main():
        named = llm.generate("abc", short(50), request_id="request-1")
        await anext(named)
        assert await text_of(llm.generate("xyz", short(3))) == "xyz"
        await named.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("prompt", ["", [], "x" * 640, [1.5], None])
def test_a_refused_request_raises_and_frees_its_id(llm, engine, prompt):
    """SC20, SV24: nobody else notices."""

    async def main():
        other = llm.generate("abc", short(50))
        await anext(other)
        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011  (each prompt has its own message)
                await text_of(llm.generate(prompt, short(3), request_id="bad"))
        assert await text_of(llm.generate("ok", short(2), request_id="bad")) == "ok"
        assert len(await text_of(other)) == 49

    asyncio.run(main())


def test_an_engine_failure_reaches_every_waiting_stream(llm, engine):
    async def main():
        tasks = [asyncio.create_task(text_of(llm.generate("ab", LONG))) for _ in range(8)]
        await until(lambda: len(engine._live) == 8)
        engine.fail_at = engine.steps + 3
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineStopped)
            assert result.__cause__ is engine.failure
        with pytest.raises(EngineStopped, match="device lost"):
            await text_of(llm.generate("later", short(2)))
        with pytest.raises(EngineStopped, match="device lost"):
            await llm.stats()
        await until(lambda: not llm._thread.is_alive())

    asyncio.run(main())


def test_closing_ends_waiting_streams(engine):
    async def main():
        async with AsyncLLM.from_engine(engine) as llm:
            task = asyncio.create_task(text_of(llm.generate("ab", LONG)))
            await until(lambda: engine._live)
        with pytest.raises(EngineStopped, match="closed"):
            await task
        assert not llm._thread.is_alive()
        for _ in range(2):  # and no id is in use for it
            with pytest.raises(EngineStopped, match="closed"):
                await anext(llm.generate("ab", request_id="same"))
        assert not llm._streams
        llm.close()  # a second time does nothing

    asyncio.run(main())
    assert len(engine.aborted) == 1


def test_what_an_engine_still_has_to_say_of_earlier_requests_harms_nobody(engine):
    engine.add_request("left over", None, [97], LONG)
    engine.abort("left over")
    llm = AsyncLLM.from_engine(engine)
    assert asyncio.run(text_of(llm.generate("abc", short(3)))) == "abc"
    llm.close()


def test_closing_leaves_an_engine_that_can_be_used_again(engine):
    async def main():
        async with AsyncLLM.from_engine(engine) as llm:
            stream = llm.generate("ab", LONG, request_id="same")
            await anext(stream)
        assert not engine.has_unfinished()
        async with AsyncLLM.from_engine(engine) as llm:
            assert await text_of(llm.generate("xyz", short(3), request_id="same")) == "xyz"

    asyncio.run(main())


def test_an_idle_engine_thread_sleeps(llm, engine):
    async def main():
        await text_of(llm.generate("abc", short(3)))
        asked = []
        unfinished = engine.has_unfinished
        engine.has_unfinished = lambda: asked.append(1) or unfinished()
        await asyncio.sleep(0.2)
        assert len(asked) <= 2
        assert await text_of(llm.generate("abc", short(3))) == "abc"

    asyncio.run(main())


def test_requests_from_several_event_loops_share_the_engine(llm):
    texts = {}

    def in_thread(name):
        texts[name] = asyncio.run(text_of(llm.generate(name, short(5))))

    threads = [threading.Thread(target=in_thread, args=(f"{i}-long",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {f"{i}-long": f"{i}-long"[:5] for i in range(4)}


def test_an_event_loop_that_was_closed_does_not_harm_the_engine(llm, engine):
    loop = asyncio.new_event_loop()
    abandoned = llm.generate("abc", LONG)
    loop.run_until_complete(anext(abandoned))
    loop.close()  # without shutting its generators down
    asyncio.run(until(lambda: not engine.has_unfinished()))
    assert asyncio.run(text_of(llm.generate("ok", short(2)))) == "ok"


def test_chat_and_stats_work_on_streams_too(llm):
    async def main():
        answer = llm.chat([{"role": "user", "content": "hi"}], short(6))
        assert await text_of(answer) == "<user>"
        stats = await llm.stats()
        assert stats.num_running == 0
        assert stats.steps >= 6

    asyncio.run(main())


def test_a_request_cancelled_before_the_engine_saw_it_leaves_no_trace(engine):
    gate = threading.Event()
    step = engine.step
    engine.step = lambda: gate.wait(10) and step()
    llm = AsyncLLM.from_engine(engine)

    async def main():
        first = asyncio.create_task(text_of(llm.generate("ab", short(2))))
        await until(lambda: engine._live)  # the engine thread now waits inside a step
        second = asyncio.create_task(text_of(llm.generate("cd", short(2), request_id="gone")))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        gate.set()
        assert await first == "ab"
        await until(lambda: not llm._streams)
        assert len(engine.seen_params) == 1

    asyncio.run(main())
    llm.close()


def test_a_request_that_comes_while_the_device_computes_is_in_the_next_step(engine):
    waiting, gate, served = threading.Event(), threading.Event(), []
    step = engine.step

    def wait():
        waiting.set()
        assert gate.wait(10)

    def recorded_step():
        served.append(len(engine._live))
        return step()

    engine.wait, engine.step = wait, recorded_step
    llm = AsyncLLM.from_engine(engine)

    async def main():
        first = asyncio.create_task(text_of(llm.generate("ab", short(2))))
        await until(waiting.is_set)  # the engine thread waits for the device
        second = asyncio.create_task(text_of(llm.generate("cd", short(2))))
        await until(lambda: not llm._commands.empty())
        gate.set()
        assert await asyncio.gather(first, second) == ["ab", "cd"]

    asyncio.run(main())
    llm.close()
    assert served == [1, 2, 1]

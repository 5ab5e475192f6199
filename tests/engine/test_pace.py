"""When the next step is planned: as late as the device allows, if first tokens are to come soon."""

import asyncio

import pytest

from pagedjax.async_llm import AsyncLLM
from pagedjax.engine import pace
from pagedjax.engine.buckets import Bucket
from pagedjax.engine.in_flight import InFlight
from pagedjax.engine.pace import Pace
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import drain, random_prompts, serve, tiny_engine, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LARGE, SMALL = Bucket(1024, 8, False), Bucket(8, 8, True)


@pytest.fixture
def clock(monkeypatch):
    """Time as the module sees it; sleeping takes no time but that."""

    class Time:
        now = 100.0

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds

    time = Time()
    monkeypatch.setattr(pace, "time", time)
    return time


class Tokens:
    """The tokens of a step that the device is done with at a time."""

    def __init__(self, done):
        self.token_ids, self.done = self, done

    def is_ready(self):
        return pace.time.monotonic() >= self.done


def step(bucket, *, launched=0.0, launch_s=0.001, done=float("inf")):
    """A step of which only the times and the size are known."""
    return InFlight(None, None, bucket, Tokens(done), [], launched - launch_s, launched)


def done_after(paced, clock, bucket, seconds, running):
    clock.now += seconds
    paced.read(step(bucket, launched=clock.now - seconds), running, clock.now)


def test_a_step_is_planned_shortly_before_one_like_the_last_is_done(clock):
    paced, running = Pace(), step(LARGE, launched=100.0)
    done_after(paced, clock, SMALL, 0.010, running)
    assert not paced.has_time(), "nobody knows how long the large one takes"
    done_after(paced, clock, LARGE, 0.030, running)
    assert paced.has_time()
    began = clock.now
    paced.sleep(running)
    assert clock.now - began == pytest.approx(0.030 - 2 * 0.001 - 0.002)
    assert not paced.has_time()
    paced.sleep(running)  # late already
    assert clock.now - began == pytest.approx(0.026)


def test_the_shortest_of_the_last_is_counted_on(clock):
    paced, running = Pace(), step(LARGE, launched=100.0)
    for seconds in (0.030, 0.050, 0.040):
        done_after(paced, clock, LARGE, seconds, running)
    began = clock.now
    paced.sleep(running)
    assert clock.now - began == pytest.approx(0.026)
    for _ in range(8):
        done_after(paced, clock, LARGE, 0.050, running)
    began = clock.now
    paced.sleep(running)
    assert clock.now - began == pytest.approx(0.046)


@pytest.mark.parametrize(("seconds", "has_time"), [(0.0039, False), (0.0041, True)])
def test_a_step_that_takes_longer_than_a_launch_leaves_time_to_tell_of_the_last(
    clock, seconds, has_time
):
    paced = Pace()
    for _ in range(3):
        done_after(paced, clock, SMALL, seconds, step(SMALL, launched=100.0))
    assert paced.has_time() == has_time  # twice the launch of 1 ms, and a margin of 2 ms


def test_time_in_which_the_device_was_idle_is_not_counted(clock):
    """Else every late launch would let the next be later."""
    paced, running = Pace(), step(LARGE, launched=100.0)
    done_after(paced, clock, LARGE, 0.030, running)
    clock.now += 0.5  # nothing is launched
    done_after(paced, clock, LARGE, 0.020, running)
    began = clock.now
    paced.sleep(running)
    assert clock.now - began == pytest.approx(0.016)


def test_a_step_that_is_done_sooner_than_foreseen_is_not_slept_over(clock):
    """Else one that the host has read late, since it was compiling, would be the measure of all."""
    paced, running = Pace(), step(LARGE, launched=100.0)
    done_after(paced, clock, LARGE, 5.0, running)
    assert paced.has_time()
    began = clock.now
    running = step(LARGE, launched=began, done=began + 0.030)
    paced.sleep(running)
    assert clock.now - began == pytest.approx(0.030, abs=0.0011)
    paced.read(running, step(LARGE, launched=clock.now), clock.now)
    began = clock.now
    paced.sleep(step(LARGE, launched=began))
    assert clock.now - began == pytest.approx(0.026, abs=0.0011)  # from now on it is known


class Unhurried(Pace):
    """Plans every step late, on a device whose steps take less than it takes to ask."""

    def __init__(self):
        super().__init__()
        self.slept = 0

    def has_time(self):
        return True

    def sleep(self, running):
        self.slept += 1


def test_late_plans_change_no_tokens():
    lengths = [1, 15, 17, 40, 100]
    expected = tokens_of(serve(tiny_engine(), random_prompts(lengths), GREEDY))
    engine = tiny_engine(ttft_target_s=0.2)
    assert engine._pace is not None and tiny_engine()._pace is None
    engine._pace = Unhurried()
    for index, prompt in enumerate(random_prompts(lengths)):
        engine.add_request(str(index), None, prompt, GREEDY)
    outputs = drain(engine, on_step=engine.wait)
    assert tokens_of([outputs[str(index)] for index in range(len(lengths))]) == expected
    assert engine._pace.slept > 8


def test_who_comes_before_a_late_plan_is_in_it_and_the_others_have_heard_already():
    engine = tiny_engine(ttft_target_s=0.2)
    engine._pace = Unhurried()
    first, second = random_prompts([20, 20])
    engine.add_request("first", None, first, GREEDY)
    assert engine.step() == [] == engine.step()  # two steps are on their way
    [delta] = engine.step()  # is told what the first has brought, and nothing is planned
    assert len(delta.outputs[0].token_ids) == 1 and len(engine._in_flight) == 1
    engine.add_request("second", None, second, GREEDY)
    engine.step()
    assert {name.partition(".")[0] for name in engine._in_flight[-1].plan.request_ids} == {"0", "1"}


def test_streams_of_an_engine_with_a_target_get_the_same_tokens():
    prompts = random_prompts([5, 30, 60])
    expected = tokens_of(serve(tiny_engine(), prompts, GREEDY))

    async def tokens(llm, prompt):
        return [t async for d in llm.generate(prompt, GREEDY) for t in d.outputs[0].token_ids]

    async def main():
        async with AsyncLLM.from_engine(tiny_engine(ttft_target_s=0.2)) as llm:
            return await asyncio.gather(*(tokens(llm, prompt) for prompt in prompts))

    assert [list(one) for one in asyncio.run(main())] == [list(one) for one in expected]


def test_a_request_goes_on_waiting_since_its_arrival_in_a_pool_of_another_size():
    engine = tiny_engine(ttft_target_s=0.2)
    for index, prompt in enumerate(random_prompts([100, 90, 5])):
        engine.add_request(str(index), None, prompt, GREEDY, priority=index % 2)
    engine.step()
    before = {seq.request.request_id: seq.arrived for seq in engine._scheduler.sequences()}
    engine.resize_pool(30)
    after = {seq.request.request_id: seq.arrived for seq in engine._scheduler.sequences()}
    assert after == before and len(set(after.values())) == 3
    assert len(drain(engine)) == 3

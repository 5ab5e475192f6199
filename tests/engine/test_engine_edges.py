"""Values and moments at the edge of what an engine accepts: none may harm it or pass unnoticed."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine.requests import LiveRequest
from pagedjax.frontend import of_one_dtype
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from scheduler.sequence import Sequence
from tests.support.tiny_engines import (
    VOCAB,
    drain,
    plain_greedy,
    random_prompts,
    serve,
    tiny_engine,
    tiny_model,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def test_a_nucleus_too_small_for_float32_still_holds_the_likeliest_token():
    """Rounded to 0 it would hold no token, and every draw would be id 0."""
    (prompt,) = random_prompts([9], seed=1)
    engine, want = tiny_engine(), [plain_greedy(tiny_model(), prompt, 6)]
    for top_p in (1e-30, 1e-38, 1e-40, 1e-46, 5e-324):
        params = SamplingParams(temperature=1.0, seed=1, top_p=top_p, max_tokens=6)
        assert tokens_of(serve(engine, [prompt], params)) == want, top_p


def test_a_top_k_beyond_int32_keeps_all():
    """SA07: it must not wrap around to a small number."""
    prompts = random_prompts([9, 4], seed=1)
    free = SamplingParams(temperature=1.5, seed=1, max_tokens=12, ignore_eos=True)
    engine = tiny_engine()
    want = tokens_of(serve(engine, prompts, free))
    for top_k in (VOCAB, 2**31 - 1, 2**31, 2**31 + 1, 2**32 + 2, 10**30):
        limited = dataclasses.replace(free, top_k=top_k)
        assert tokens_of(serve(engine, prompts, limited)) == want, top_k


@pytest.mark.parametrize("min_tokens", [2**31 - 4, 2**31 - 1])
def test_a_min_tokens_beyond_every_position_bans_ending_ids_to_the_limit(min_tokens):
    """The position at which it is reached is no int32: neither an error nor a wrapped one."""
    (prompt,) = random_prompts([9], seed=1)
    engine = tiny_engine(max_model_len=20)
    params = SamplingParams(temperature=0.0, max_tokens=2**31 - 1, ignore_eos=True)
    (free,) = tokens_of(serve(engine, [prompt], params))
    stop = (free[3],)
    ends = dataclasses.replace(params, stop_token_ids=stop)
    assert len(tokens_of(serve(engine, [prompt], ends))[0]) == free.index(stop[0]) + 1 < 11
    banned = dataclasses.replace(ends, min_tokens=min_tokens)
    (tokens,) = tokens_of(serve(engine, [prompt], banned))
    assert len(tokens) == 11
    assert stop[0] not in tokens


def test_a_min_tokens_beyond_the_limit_is_served_without_a_max_tokens_as_with_one():
    (prompt,) = random_prompts([9], seed=1)
    engine = tiny_engine(max_model_len=20)
    for max_tokens in (50, None):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=40)
        (output,) = serve(engine, [prompt], params)[0].outputs
        assert (len(output.token_ids), output.finish_reason) == (11, "length")


def test_draws_do_not_depend_on_neighbours_whatever_jaxs_default_generator_is():
    """SA14: under vmap, the draws of `rbg` depend on the whole batch."""
    prompts = random_prompts([9, 11, 20], seed=2)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6)
    want = tokens_of(serve(tiny_engine(), prompts, params))
    with jax.default_prng_impl("rbg"):
        assert tokens_of(serve(tiny_engine(), prompts, params)) == want
        assert tokens_of(serve(tiny_engine(), prompts[1:2], params)) == want[1:2]


def test_an_id_is_in_use_until_its_last_output_has_come():
    """Else the output of the aborted request would be lost, or taken for the next one's."""
    engine = tiny_engine()
    engine.add_request("a", None, [1, 2, 3], GREEDY)
    engine.step()
    engine.abort("a")
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", None, [4], GREEDY)
    (last,) = engine.step()
    assert (last.request_id, last.outputs[0].finish_reason) == ("a", "abort")
    engine.add_request("a", None, [4], GREEDY)
    assert drain(engine)["a"].prompt_token_ids == (4,)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([3.0], "integers in 0 .. 127, got float64"),
        (np.array([1.5]), "got float64"),
        ([True, False], "got bool"),
        ([2**40], f"got {2**40}"),
        ([2**63], f"got {2**63}"),
        ([2**70], "got object"),
        ([-(2**70)], "got object"),
        ("abc", "flat list"),
        (None, "flat list"),
        (np.array([[1, 2]]), r"flat list of token ids, got shape \(1, 2\)"),
        (np.array([], np.int32), "empty"),
    ],
)
def test_what_is_no_prompt_is_refused_and_the_mate_goes_on(prompt, message):
    """SC20: with a ValueError, since any other exception would stop an engine's thread."""
    engine = tiny_engine()
    engine.add_request("mate", None, [1, 2, 3], GREEDY)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", None, prompt, GREEDY)
    assert drain(engine)["mate"].num_generated_tokens == 6


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_a_prompt_may_be_an_array_and_comes_back_as_plain_integers(dtype):
    prompt = np.array([5, 100, 7], dtype)
    output = serve(tiny_engine(), [prompt], GREEDY)[0]
    assert output.prompt_token_ids == (5, 100, 7)
    assert {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("value", [8.0, 8.5, "8", True])
@pytest.mark.parametrize(
    "option",
    ["num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "bucket_growth"],
)
def test_sizes_are_integers(option, value):
    """OF17: refused by name, not by a TypeError from somewhere inside."""
    with pytest.raises(ValueError, match=option):
        EngineConfig(**{option: value})
    with pytest.raises(ValueError, match="block_size"):
        EngineConfig(block_size=16.0)


def on_device(model, device):
    return dataclasses.replace(model, params=jax.device_put(model.params, device))


def test_everything_runs_on_the_device_that_holds_the_parameters():
    prompts = random_prompts([9, 20], seed=3)
    second = jax.devices()[1]
    engine = tiny_engine(on_device(tiny_model(), second))
    want = [plain_greedy(tiny_model(), prompt, 6) for prompt in prompts]
    assert tokens_of(serve(engine, prompts, GREEDY)) == want
    assert {device for array in engine._runner._pool for device in array.devices()} == {second}


def in_host_memory(array):
    (device,) = array.devices()
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return jax.device_put(array, host)


def deleted(array):
    """What a trainer's step leaves of parameters that are donated to it."""
    copy = jnp.array(array, copy=True)
    copy.delete()
    return copy


@pytest.mark.parametrize(
    "place",
    [
        lambda x: jax.device_put(x, jax.devices()[1]),
        np.asarray,
        in_host_memory,
        deleted,
        lambda _: jnp.float32,
    ],
)
def test_parameters_in_another_place_are_refused_and_the_engine_goes_on(place):
    """Otherwise the next step would fail, and take every request with it."""
    engine = tiny_engine()
    engine.add_request("a", None, [1, 2, 3], GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="wanted .*0"):
        engine.swap_params({name: place(x) for name, x in tiny_model().params.items()})
    assert drain(engine)["a"].outputs[0].token_ids == plain_greedy(tiny_model(), [1, 2, 3], 6)


def test_a_checkpoint_of_several_dtypes_is_served_in_that_of_its_embedding():
    """Norms in float32 beside bfloat16 matrices, as GGUF files have them."""
    model = tiny_model()
    params = {
        name: x if name.endswith("scale") else x.astype(jnp.bfloat16)
        for name, x in model.params.items()
    }
    model = of_one_dtype(dataclasses.replace(model, params=params))
    assert {x.dtype for x in model.params.values()} == {jnp.dtype(jnp.bfloat16)}
    output = serve(tiny_engine(model), [[1, 2, 3]], GREEDY)[0]
    assert output.num_generated_tokens == 6


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_engine_whose_step_failed_says_so_from_then_on(monkeypatch, steps):
    """Its books and the device's no longer agree: better no token than a wrong one."""
    engine = tiny_engine()
    engine.add_request("a", None, [1, 2, 3], GREEDY)
    for _ in range(steps):
        engine.step()

    def fail(*args, **kwargs):
        raise MemoryError("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "launch", fail)
        with pytest.raises(MemoryError, match="full"):
            engine.step()
    engine.abort("a")
    engine.add_request("b", None, [1, 2, 3], GREEDY)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="earlier step was broken off"):
            engine.step()


@pytest.mark.parametrize(("windows", "held"), [((20, 33), (3, 5)), ((20, None), (10, 12))])
def test_sequences_give_up_blocks_when_every_layer_has_a_window(windows, held):
    """The pool holds NaN wherever nothing is written, so that reading a wrong block shows."""
    model = tiny_model(seed=2, windows=windows)
    (prompt,) = random_prompts([100], seed=50)
    engine = tiny_engine(model, max_prefill_chunk=24)
    runner = engine._runner
    runner._pool = [jnp.full_like(layer, jnp.nan) for layer in runner._pool]
    used = []
    engine.add_request("a", None, prompt, SamplingParams(temperature=0.0, max_tokens=90))
    output = drain(engine, on_step=lambda: used.append(engine.stats().blocks_used))["a"]
    assert output.outputs[0].token_ids == plain_greedy(model, prompt, 90)
    assert held[0] <= min(used[-30:-3]) and max(used[-30:-3]) <= held[1]


@pytest.mark.parametrize("steps", [2, 5])
def test_a_snapshot_is_restored_behind_steps_of_requests_that_have_been_aborted(tmp_path, steps):
    """The engine is idle, the device is not, and the scheduler waits to hear of its steps."""
    first, second = random_prompts([9, 21], seed=5)
    engine = tiny_engine()
    engine.add_request("a", None, first, GREEDY)
    for _ in range(4):
        engine.step()
    engine.snapshot(tmp_path / "snapshot")
    other = tiny_engine()
    other.add_request("b", None, second, GREEDY)
    for _ in range(steps):
        other.step()
    other.abort("b")
    (last,) = other.step()
    assert last.finished and not other.has_unfinished()
    deltas = [*other.restore(tmp_path / "snapshot"), *drain(other).values()]
    want = plain_greedy(tiny_model(), first, 6)
    assert tokens_of([RequestOutput.joined(deltas)]) == [want]


@pytest.mark.parametrize("end", ["length", "stop", "abort"])
def test_an_idle_engine_has_forgotten_its_requests(end):
    """Unless it is foreseen, one more step of theirs is in flight when the last of them ends."""
    engine, prompts = tiny_engine(), random_prompts([9, 30, 17, 12], seed=77)
    params = dataclasses.replace(GREEDY, n=2, prompt_logprobs=0)
    want = tokens_of(serve(tiny_engine(), prompts, params))
    if end == "stop":
        stops = tuple(tokens[3] for tokens in want)
        params = dataclasses.replace(params, stop_token_ids=stops)
        want = tokens_of(serve(tiny_engine(), prompts, params))

    def remembered():
        gc.collect()
        numbers = [one.prompt_token_ids for one in gc.get_objects() if type(one) is LiveRequest]
        numbers += [one.prompt for one in gc.get_objects() if type(one) is Sequence]
        return sum(list(prompt) in prompts for prompt in numbers)

    for index, prompt in enumerate(prompts[:3]):
        engine.add_request(str(index), None, prompt, params)
    for _ in range(3):
        engine.step()
    assert remembered() == 3 * 3
    if end == "abort":
        for index in range(3):
            engine.abort(str(index))
    drain(engine)
    assert bool(engine._in_flight) == (end != "length") and not remembered()
    assert tokens_of(serve(engine, prompts, params)) == want

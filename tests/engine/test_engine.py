"""The engine against whole recomputation by the plain forward, on tiny random models."""

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.models import GenerationDefaults
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import (
    VOCAB,
    drain,
    plain_greedy,
    plain_logits,
    random_prompts,
    serve,
    tiny_engine,
    tiny_model,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 100]


@pytest.fixture(scope="module")
def expected():
    return [plain_greedy(tiny_model(), prompt, 12) for prompt in random_prompts(LENGTHS)]


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_tokens_equal_whole_recomputation(expected, block_size):
    """KE22: every token of the engine against a full forward, over prompts around a block."""
    engine = tiny_engine(block_size=block_size)
    assert tokens_of(serve(engine, random_prompts(LENGTHS), GREEDY)) == expected
    assert engine.stats().blocks_used == 0


@pytest.mark.parametrize("chunk", [1, 16, 17])
def test_chunked_prefill_changes_nothing(expected, chunk):
    engine = tiny_engine(max_prefill_chunk=chunk)
    assert tokens_of(serve(engine, random_prompts(LENGTHS), GREEDY)) == expected


def test_waiting_for_the_device_leaves_the_step_nothing_to_wait_for(expected):
    engine = tiny_engine()
    for index, prompt in enumerate(random_prompts(LENGTHS)):
        engine.add_request(str(index), None, prompt, GREEDY)
    ready = []

    def wait():
        engine.wait()
        if len(engine._in_flight) == 2:
            ready.append(engine._in_flight[0].samples.token_ids.is_ready())

    outputs = drain(engine, on_step=wait)
    assert len(ready) > 8 and all(ready)
    assert tokens_of([outputs[str(index)] for index in range(len(LENGTHS))]) == expected


def test_prompts_alone_and_together_give_the_same(expected):
    """KE22, in a batch of one."""
    engine = tiny_engine()
    alone = [serve(engine, [prompt], GREEDY)[0] for prompt in random_prompts(LENGTHS)]
    assert tokens_of(alone) == expected


def test_more_prompts_than_places_wait_their_turn(expected):
    engine = tiny_engine(max_num_seqs=2)
    assert tokens_of(serve(engine, random_prompts(LENGTHS), GREEDY)) == expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("scarce", [{"max_num_seqs": 2}, {"num_blocks": 9}])
def test_an_urgent_request_goes_first_and_changes_nobodys_tokens(preemption, scarce):
    """SC15: it takes the place, or the memory, of the last that is less urgent."""
    prompts = random_prompts([40, 30, 50], seed=5)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine = tiny_engine(preemption=preemption, host_cache_bytes=1 << 20, **scarce)
    ended = []

    def step():
        for delta in engine.step():
            tokens[delta.request_id] += delta.outputs[0].token_ids
            if delta.finished:
                ended.append(delta.request_id)

    tokens = {name: () for name in "abu"}
    for name, prompt, priority in zip("ab", prompts, (3, 3), strict=False):
        engine.add_request(name, None, prompt, params, priority=priority)
    for _ in range(6):
        step()
    engine.add_request("u", None, prompts[2], params, priority=-1)
    while engine.has_unfinished():
        step()
    assert ended == ["u", "a", "b"] or scarce == {"max_num_seqs": 2} and ended == ["a", "u", "b"]
    assert engine.stats().preemptions > 0
    assert (engine.stats().swaps > 0) == (preemption == "swap")
    for name, prompt in zip("abu", prompts, strict=True):
        assert tokens[name] == plain_greedy(tiny_model(), prompt, 30)


def test_a_priority_is_an_integer():
    engine = tiny_engine()
    for priority in (1.0, True, None, "high"):
        with pytest.raises(ValueError, match="a priority must be an integer"):
            engine.add_request("a", None, [1, 2], GREEDY, priority=priority)
    assert not engine.has_unfinished()


def test_preemption_by_recompute_changes_nothing():
    """SC10: greedy tokens of a pool that forces preemption equal those of an ample one."""
    prompts = random_prompts(range(10, 42, 4), seed=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ample = serve(tiny_engine(num_blocks=200), prompts, params)
    engine = tiny_engine(num_blocks=14)
    tight = serve(engine, prompts, params)
    assert tokens_of(tight) == tokens_of(ample)
    assert engine.stats().preemptions > 0
    assert {len(tokens) for tokens in tokens_of(tight)} == {40}


@pytest.mark.parametrize("num_blocks", [200, 14])
def test_a_seeded_draw_survives_neighbours_chunks_and_preemption(num_blocks):
    """SA14, and the promise of the fold_in rule."""
    prompts = random_prompts([20, 30, 25, 40], seed=5)
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=30, ignore_eos=True)
    alone = serve(tiny_engine(), prompts[:1], params)
    mates = [SamplingParams(temperature=2.0, max_tokens=40, seed=s) for s in (None, 7, None)]
    engine = tiny_engine(num_blocks=num_blocks, max_prefill_chunk=7)
    together = serve(engine, prompts, [params, *mates])
    assert tokens_of(together)[0] == tokens_of(alone)[0]


def test_samples_of_one_prompt_differ_and_repeat():
    """SA16, SC23: n sequences of one seed, never more at once than there are places."""
    prompts = random_prompts([9, 20, 33], seed=6)
    params = SamplingParams(n=3, seed=1, temperature=1.5, max_tokens=8, ignore_eos=True)
    engine = tiny_engine(max_num_seqs=4, num_blocks=30)
    running = []
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), None, prompt, params)
    first = drain(engine, on_step=lambda: running.append(engine.stats().num_running))
    second = serve(tiny_engine(), prompts, params)
    assert max(running) <= 4
    for index, again in enumerate(second):
        outputs = first[str(index)].outputs
        assert [output.index for output in outputs] == [0, 1, 2]
        assert len({output.token_ids for output in outputs}) == 3
        assert [o.token_ids for o in outputs] == [o.token_ids for o in again.outputs]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("length", [1, 16, 45])
def test_logprobs_equal_the_plain_forwards(chunk, length):
    """Chosen, top-k and prompt log-probabilities; SA25: the first prompt entry is None."""
    model = tiny_model()
    engine = tiny_engine(max_prefill_chunk=chunk)
    (prompt,) = random_prompts([length], seed=8)
    params = SamplingParams(
        temperature=0.8, seed=3, logprobs=4, prompt_logprobs=2, max_tokens=7, ignore_eos=True
    )
    mates = random_prompts([20, 2], seed=9)
    (output, *_) = serve(engine, [prompt, *mates], [params, GREEDY, GREEDY])
    chosen = output.outputs[0]
    tokens = [*prompt, *chosen.token_ids]
    logits = plain_logits(model, tokens).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    assert len(output.prompt_logprobs) == length
    assert output.prompt_logprobs[0] is None
    assert len(chosen.logprobs) == len(chosen.token_ids) == 7
    entries = [*output.prompt_logprobs[1:], *chosen.logprobs]
    for position, entry in enumerate(entries):
        assert entry.token_id == tokens[position + 1]
        assert abs(entry.logprob - exact[position, entry.token_id]) < 1e-4
        best = np.argsort(-exact[position], kind="stable")[: len(entry.top)]
        assert [token for token, _ in entry.top] == best.tolist()
        assert np.abs([v for _, v in entry.top] - exact[position][best]).max() < 1e-4
    assert {len(e.top) for e in entries[: length - 1]} <= {2}
    assert {len(e.top) for e in chosen.logprobs} == {4}


def test_prompt_logprobs_come_right_with_the_prefix_cached():
    """SA22: the same prompt again, and one that overlaps it, with prefix caching on."""
    engine = tiny_engine(prefix_caching=True)
    (prompt,) = random_prompts([49], seed=10)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=2)
    first, second, third = (
        serve(engine, [p], params)[0] for p in (prompt, prompt, prompt[:33] + prompt[:5])
    )
    for cold, warm, count in ((first, second, 49), (first, third, 33)):
        for a, b in zip(cold.prompt_logprobs[1:count], warm.prompt_logprobs[1:count], strict=True):
            assert a.token_id == b.token_id
            assert abs(a.logprob - b.logprob) < 1e-4


def test_a_cached_prefix_changes_no_token():
    """BM01, BM24: the same block-aligned prompt twice, then a prompt that shares part of it."""
    cold = tiny_engine(prefix_caching=False)
    warm = tiny_engine(prefix_caching=True)
    (prompt,) = random_prompts([48], seed=11)
    for prompts in ([prompt], [prompt], [prompt, prompt], [prompt[:32] + [3] * 9]):
        want, got = serve(cold, prompts, GREEDY), serve(warm, prompts, GREEDY)
        assert tokens_of(got) == tokens_of(want)
    assert got[0].num_cached_tokens == 32
    assert want[0].num_cached_tokens == 0


def stop_token_of(prompt):
    """A token that greedy decoding of `prompt` reaches at its fourth step, and its first step."""
    tokens = plain_greedy(tiny_model(), prompt, 12)
    return tokens[3], tokens.index(tokens[3])


def test_a_stop_token_ends_the_text_and_is_its_last_token():
    (prompt,) = random_prompts([21], seed=12)
    stop, at = stop_token_of(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))
    engine = tiny_engine()
    output = serve(engine, [prompt, prompt[:7]], [params, GREEDY])[0].outputs[0]
    assert output.token_ids == plain_greedy(tiny_model(), prompt, 12)[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def model_with_eos(*eos_ids):
    model = tiny_model()
    return type(model)(
        arch=model.arch,
        params=model.params,
        generation=GenerationDefaults(eos_ids=eos_ids),
        tokenizer_dir=None,
    )


def test_every_eos_id_of_the_checkpoint_ends_a_text_unless_ignored():
    """SA19, CV38: ids of generation_config count; a caller's own stop ids survive ignore_eos."""
    (prompt,) = random_prompts([21], seed=12)
    stop, at = stop_token_of(prompt)
    engine = tiny_engine(model_with_eos(VOCAB - 1, stop))
    ends = serve(engine, [prompt], SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert len(ends.outputs[0].token_ids) == at + 1
    ignores = serve(
        engine, [prompt], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )[0].outputs[0]
    assert (len(ignores.token_ids), ignores.finish_reason) == (12, "length")
    own = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    assert serve(engine, [prompt], own)[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_every_ending_id(temperature):
    """SA18: two eos ids and a stop id, all of them likely, none drawn before min_tokens."""
    model = model_with_eos(2, 7)
    table = model.params["unembed.table"]
    likely = jnp.zeros_like(table).at[jnp.array([2, 7, 9])].set(table[jnp.array([5])])
    params = {**model.params, "unembed.table": table * 0.01 + likely * 40.0}
    model = type(model)(
        arch=model.arch, params=params, generation=model.generation, tokenizer_dir=None
    )
    params = SamplingParams(
        temperature=temperature, seed=0, min_tokens=5, max_tokens=10, stop_token_ids=(9,)
    )
    free = SamplingParams(temperature=temperature, seed=0, max_tokens=10, stop_token_ids=(9,))
    prompts = random_prompts([5] * 6, seed=13)
    ends = tokens_of(serve(tiny_engine(model), prompts, free))
    assert min(map(len, ends)) < 5, "the ids must be likely for the test to mean anything"
    for tokens in tokens_of(serve(tiny_engine(model), prompts, params)):
        assert len(tokens) > 5
        assert not set(tokens[:5]) & {2, 7, 9}


def test_lengths_around_the_models_limit():
    """SC17: 63 + 1 works, 63 + 5 stops at 64, 64 and more are refused; the next is served."""
    engine = tiny_engine(max_model_len=64)
    prompts = {length: random_prompts([length], seed=14)[0] for length in (63, 64, 65, 640, 10)}
    one = SamplingParams(temperature=0.0, max_tokens=1)
    five = SamplingParams(temperature=0.0, max_tokens=5)
    for params in (one, five):
        output = serve(engine, [prompts[63]], params)[0].outputs[0]
        assert (len(output.token_ids), output.finish_reason) == (1, "length")
    for length in (64, 65, 640):
        with pytest.raises(ValueError, match=f"{length} tokens"):
            engine.add_request("long", None, prompts[length], one)
    assert len(serve(engine, [prompts[10]], five)[0].outputs[0].token_ids) == 5


def test_a_prompt_that_no_pool_could_hold_fails_alone():
    """SC01, SC03: refused at once; those behind it are served."""
    engine = tiny_engine(num_blocks=5)
    with pytest.raises(ValueError, match="100 tokens"):
        engine.add_request("big", None, [1] * 100, GREEDY)
    assert len(serve(engine, random_prompts([12, 12]), GREEDY)) == 2
    assert engine.max_model_len == 64


def test_max_tokens_none_runs_to_the_limit():
    engine = tiny_engine(max_model_len=40)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    output = serve(engine, random_prompts([8]), params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (32, "length")


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([VOCAB], {}, f"0 .. {VOCAB - 1}, got {VOCAB}"),
        ([3, -1], {}, "got -1"),
        ([3], {"stop": "x"}, "stop strings need a tokenizer"),
        ([3], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([3], {"min_tokens": 1, "stop_token_ids": tuple(range(17))}, "at most 16"),
        ([3], {"logprobs": 9}, "logprobs is 9, the engine reports at most 8"),
    ],
)
def test_bad_requests_are_refused_at_the_edge(prompt, params, message):
    """SA10, SC20: nothing is queued, and the engine goes on."""
    engine = tiny_engine(max_logprobs=8)
    with pytest.raises(ValueError, match=message):
        engine.add_request("bad", None, prompt, SamplingParams(max_tokens=4, **params))
    assert not engine.has_unfinished()
    assert len(serve(engine, [[5]], GREEDY)[0].outputs[0].token_ids) == 12


def test_a_live_id_is_refused_and_a_finished_one_is_free_again():
    engine = tiny_engine()
    engine.add_request("a", None, [1, 2], GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", None, [3], GREEDY)
    assert len(drain(engine)["a"].outputs[0].token_ids) == 12
    engine.add_request("a", None, [3], GREEDY)
    assert drain(engine)["a"].prompt_token_ids == (3,)


@pytest.fixture(scope="module")
def chunking_engine():
    return tiny_engine(max_prefill_chunk=32, prefix_caching=False)


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 7])
def test_an_abort_at_any_time_ends_one_request_alone(chunking_engine, steps):
    """BM19: during chunked prefill and decode; the mate's tokens and the blocks come out right."""
    engine = chunking_engine
    long, mate = random_prompts([100, 20], seed=15)
    engine.add_request("long", None, long, GREEDY)
    engine.add_request("mate", None, mate, GREEDY)
    deltas = [delta for _ in range(steps) for delta in engine.step()]
    engine.abort("long")
    engine.abort("long")
    engine.abort("never seen")
    engine.add_request("again", None, long, GREEDY)
    while engine.has_unfinished():
        deltas += engine.step()
    ends = {d.request_id: d for d in deltas if d.finished}
    assert ends["long"].outputs[0].finish_reason == "abort"
    tokens = {
        name: sum((d.outputs[0].token_ids for d in deltas if d.request_id == name), ())
        for name in ("mate", "again")
    }
    assert tokens["mate"] == plain_greedy(tiny_model(), mate, 12)
    assert tokens["again"] == plain_greedy(tiny_model(), long, 12)
    assert engine.stats().blocks_used == 0


def test_timings_and_counts_are_told():
    engine = tiny_engine()
    output = serve(engine, random_prompts([20]), SamplingParams(n=2, max_tokens=5, seed=0))[0]
    times = output.timings
    assert times.arrived <= times.scheduled <= times.first_token <= times.finished
    assert (output.num_prompt_tokens, output.num_generated_tokens) == (20, 10)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (20, 10)
    assert 0 < stats.peak_block_utilisation < 1
    assert stats.block_utilisation == 0


@pytest.mark.parametrize(
    "changes",
    [
        dict(qk_norm=True, qkv_bias=True, tied=True),
        dict(windows=(None, 20), q_heads=6, kv_heads=2),
        dict(windows=(7, 7), q_heads=7, kv_heads=1, head_dim=16, out_bias=True),
    ],
)
def test_every_kind_of_layer_agrees_with_the_plain_forward(changes):
    model = tiny_model(seed=1, **changes)
    prompts = random_prompts([1, 16, 50], seed=16)
    engine = tiny_engine(model, max_prefill_chunk=24)
    want = [plain_greedy(model, prompt, 12) for prompt in prompts]
    assert tokens_of(serve(engine, prompts, GREEDY)) == want


def test_swapped_parameters_serve_at_once_and_share_no_cache():
    """BM26: the same prompt after a swap equals a fresh engine's, with nothing cached."""
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    (prompt,) = random_prompts([49], seed=17)
    engine = tiny_engine(old)
    first = serve(engine, [prompt], GREEDY)[0]
    assert serve(engine, [prompt], GREEDY)[0].num_cached_tokens == 48
    engine.swap_params(new.params)
    swapped = serve(engine, [prompt], GREEDY)[0]
    assert swapped.num_cached_tokens == 0
    assert swapped.outputs[0].token_ids == plain_greedy(new, prompt, 12)
    assert swapped.outputs[0].token_ids != first.outputs[0].token_ids


def test_parameters_of_another_shape_are_refused_and_nothing_changes():
    engine = tiny_engine()
    params = dict(tiny_model().params)
    params["norm.scale"] = params["norm.scale"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="norm.scale: got .*bfloat16.*, wanted .*float32"):
        engine.swap_params(params)
    with pytest.raises(ValueError, match="got None"):
        engine.swap_params({k: v for k, v in tiny_model().params.items() if k != "embed.table"})
    (prompt,) = random_prompts([9], seed=18)
    assert tokens_of(serve(engine, [prompt], GREEDY)) == [plain_greedy(tiny_model(), prompt, 12)]

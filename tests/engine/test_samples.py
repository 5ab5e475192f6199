"""Samples of one prompt on the device: the prompt is computed once, its blocks are shared."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import (
    drain,
    plain_greedy,
    plain_logits,
    random_prompts,
    serve,
    tiny_engine,
    tiny_model,
)


def cast(model, dtype):
    return replace(model, params={name: x.astype(dtype) for name, x in model.params.items()})


def draws(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_samples_that_share_equal_samples_that_each_compute_the_prompt(prefix_caching):
    """One seat makes the samples take turns, so that none has another's blocks to share."""
    prompts = random_prompts([1, 15, 16, 33, 50], seed=30)
    params = SamplingParams(n=5, seed=3, temperature=1.3, max_tokens=20, ignore_eos=True)
    engine = tiny_engine(prefix_caching=prefix_caching, max_prefill_chunk=16)
    together = serve(engine, prompts, params)
    one_seat = tiny_engine(prefix_caching=False, max_num_seqs=1, max_num_batched_tokens=64)
    assert draws(together) == draws(serve(one_seat, prompts, params))
    assert engine._scheduler.blocks.num_copied > 0
    assert one_seat._scheduler.blocks.num_copied == 0


def test_eight_samples_of_a_long_prompt_take_hardly_more_blocks_than_one():
    model = tiny_model(max_positions=2200)
    prompt = random_prompts([2048], seed=31)[0]
    peak = {}
    for n in (1, 8):
        engine = tiny_engine(model, num_blocks=300, max_num_batched_tokens=512)
        serve(engine, [prompt], SamplingParams(n=n, seed=0, max_tokens=3))
        peak[n] = engine.stats().blocks_peak
    assert peak[1] >= 128 and peak[8] <= 1.3 * peak[1]


def test_samples_that_lose_their_blocks_come_to_the_same_tokens():
    prompts = random_prompts([40, 50, 60], seed=32)
    params = SamplingParams(n=4, seed=9, temperature=1.1, max_tokens=60, ignore_eos=True)
    small = tiny_engine(num_blocks=16)
    assert draws(serve(small, prompts, params)) == draws(serve(tiny_engine(), prompts, params))
    assert small.stats().preemptions > 0 and small.stats().blocks_used == 0


def test_an_abort_between_the_prompt_and_its_copies_disturbs_nobody():
    prompts = random_prompts([50, 20], seed=33)
    greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for steps in range(1, 5):
        engine = tiny_engine(max_prefill_chunk=20)
        engine.add_request("n", None, prompts[0], SamplingParams(n=6, seed=1, max_tokens=40))
        engine.add_request("mate", None, prompts[1], greedy)
        for _ in range(steps):
            engine.step()
        engine.abort("n")
        engine.add_request("again", None, prompts[0], greedy)
        outputs = drain(engine)
        for name, prompt in (("mate", prompts[1]), ("again", prompts[0])):
            # A step that has brought the mate a token already is not drained here.
            want = plain_greedy(tiny_model(), prompt, 10)
            got = outputs[name].outputs[0].token_ids
            assert got == want[len(want) - len(got) :]
        assert engine.stats().blocks_used == 0


def test_log_probabilities_of_samples_are_those_of_the_plain_forward():
    prompt = random_prompts([37], seed=34)[0]
    params = SamplingParams(n=3, seed=5, temperature=1.2, max_tokens=8, logprobs=0, ignore_eos=True)
    output = serve(tiny_engine(), [prompt], params)[0]
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        logits = plain_logits(tiny_model(), prompt + tokens).astype(np.float64)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        want = [logits[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)]
        got = [entry.logprob for entry in completion.logprobs]
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_a_salt_keeps_prefixes_apart():
    """BM07: what is cached for one tenant is not found by another."""
    prompt = random_prompts([49], seed=35)[0]
    engine = tiny_engine()
    cached = [
        serve(engine, [prompt], SamplingParams(temperature=0.0, cache_salt=salt))[0]
        for salt in (None, "x", "x", "y", None)
    ]
    assert [output.num_cached_tokens for output in cached] == [0, 0, 48, 0, 48]
    assert len({output.outputs[0].token_ids for output in cached}) == 1


def test_neighbouring_blocks_hold_the_same_as_any_others():
    prompts = random_prompts([40, 50, 60], seed=36)
    params = SamplingParams(n=2, seed=9, temperature=1.1, max_tokens=40, ignore_eos=True)
    engine = tiny_engine(num_blocks=20, contiguous_blocks=True)
    assert draws(serve(engine, prompts, params)) == draws(serve(tiny_engine(), prompts, params))
    assert engine.stats().preemptions > 0


def test_scores_of_samples_are_within_16_bit_noise_of_separate_requests():
    """Samples that share blocks, against each text scored as a prompt of its own.

    The noise is what 16 bits do to the scores at all: their distance from those in 32.
    """
    params = SamplingParams(n=4, seed=2, temperature=1.2, max_tokens=12, logprobs=0)
    score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    rounded = cast(tiny_model(), jnp.bfloat16)
    engine = tiny_engine(rounded, prefix_caching=False)
    alone = tiny_engine(rounded, prefix_caching=False, max_num_seqs=1)
    exact = tiny_engine(cast(rounded, jnp.float32), prefix_caching=False, max_num_seqs=1)
    prompts = random_prompts([37, 50, 21], seed=36)
    outputs = serve(engine, prompts, params)
    assert engine._scheduler.blocks.num_copied > 0
    differences, noise = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            text = [*prompt, *completion.token_ids]
            got, want, plain = (
                np.array([entry.logprob for entry in entries[-len(completion.token_ids) :]])
                for entries in (
                    completion.logprobs,
                    serve(alone, [text], score)[0].prompt_logprobs,
                    serve(exact, [text], score)[0].prompt_logprobs,
                )
            )
            differences.append(np.abs(got - want))
            noise.append(np.abs(want - plain))
    noise, differences = np.concatenate(noise), np.concatenate(differences)
    assert differences.max() <= noise.mean() > 1e-3

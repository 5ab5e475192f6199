"""Random requests, aborts and sizes through the whole engine, against whole recomputation."""

import functools
import random

import numpy as np
import pytest

from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from scheduler import invariants
from tests.support.echo_engine import ByteTokenizer
from tests.support.tiny_engines import VOCAB, plain_greedy, plain_logits, tiny_engine, tiny_model

OPERATIONS = 250
LONGEST = 30


@functools.cache
def greedy_tokens(prompt):
    return plain_greedy(tiny_model(), prompt, LONGEST)


@functools.cache
def exact_logprobs(tokens):
    logits = plain_logits(tiny_model(), tokens).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def random_params(rng):
    stops = {}
    if rng.random() < 0.3:
        stops["stop_token_ids"] = rng.sample(range(VOCAB), 5)
    if rng.random() < 0.3:
        stops["stop"] = [chr(rng.randrange(97, 123)) for _ in range(3)]
    return SamplingParams(
        temperature=0.0,
        max_tokens=rng.randint(1, LONGEST),
        n=rng.choice([1, 1, 2]),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.choice([None, 2]),
        **stops,
    )


def expected(prompt, params):
    """Tokens and finish reason of one completion, served alone."""
    tokens = greedy_tokens(prompt)[: params.max_tokens]
    for end in range(1, len(tokens) + 1):
        text = ByteTokenizer().decode(tokens[:end])
        if tokens[end - 1] in params.stop_token_ids or any(s in text for s in params.stop):
            return tokens[:end], "stop"
    return tokens, "length"


def check(result, prompt, params, aborted):
    tokens, reason = expected(prompt, params)
    assert [output.index for output in result.outputs] == list(range(params.n)) or aborted
    for output in result.outputs:
        if output.finish_reason == "abort":
            assert aborted and output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert (output.token_ids, output.finish_reason) == (tokens, reason)
        check_logprobs(output.logprobs or (), prompt + output.token_ids, len(prompt))
    scored = result.prompt_logprobs or ()
    if params.prompt_logprobs is not None and not aborted:
        assert len(scored) == len(prompt)
    assert all(entry is None for entry in scored[:1])
    check_logprobs(scored[1:], prompt, 1)


def check_logprobs(entries, tokens, start):
    for position, entry in enumerate(entries, start):
        assert entry.token_id == tokens[position]
        exact = exact_logprobs(tokens)[position - 1, entry.token_id]
        assert abs(entry.logprob - exact) < 1e-4  # float32 sums in another order


@pytest.mark.parametrize("num_blocks", [10, 14, 100])
def test_random_traces_give_everybody_their_own_tokens(num_blocks):
    """SC10, BM19 and their like together: preemption, prefixes, chunks, stops, aborts."""
    rng = random.Random(num_blocks)
    base = [rng.randrange(VOCAB) for _ in range(80)]
    prompts = [
        tuple(
            base[: rng.randint(1, 80)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
        )
        for _ in range(8)
    ]
    engine = tiny_engine(
        tokenizer=ByteTokenizer(), max_num_seqs=6, max_prefill_chunk=16, num_blocks=num_blocks
    )
    live, deltas, aborted, finished = {}, {}, set(), 0
    for operation in range(OPERATIONS):
        name = str(operation)
        if rng.random() < 0.3 and len(live) < 10:
            live[name] = rng.choice(prompts), random_params(rng)
            prompt, params = live[name]
            engine.add_request(name, None, prompt, params)
            deltas[name] = []
        if rng.random() < 0.05 and live:
            victim = rng.choice(list(live))
            aborted.add(victim)
            engine.abort(victim)
        while engine.has_unfinished():
            for delta in engine.step():
                deltas[delta.request_id].append(delta)
                if delta.finished:
                    one = delta.request_id
                    result = RequestOutput.joined(deltas[one])
                    check(result, *live.pop(one), one in aborted)
                    finished += 1
            invariants.check(engine._scheduler)
            if operation < OPERATIONS - 1:
                break
    assert finished == len(deltas) > 20 and not live
    assert engine.stats().blocks_used == 0
    assert (engine.stats().preemptions > 0) == (num_blocks < 100)
    assert sum("abort" in [o.finish_reason for d in deltas[a] for o in d.outputs] for a in aborted)

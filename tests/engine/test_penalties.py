"""Penalties against numpy over whole recomputation, and against transformers where it has them."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine.penalties import SeenOwners, SeenTokens, count_drawn, penalize
from pagedjax.engine.step_inputs import PenaltyArrays
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import (
    VOCAB,
    compiles,
    plain_greedy,
    plain_logits,
    random_prompts,
    serve,
    tiny_engine,
    tiny_model,
    tokens_of,
)

PLAIN = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
KINDS = [
    dict(repetition_penalty=1.3),
    dict(presence_penalty=1.5),
    dict(frequency_penalty=0.7),
    dict(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=1.1),
]


def penalized(**changes):
    return SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, **changes)


def dense_penalties(logits, prompt, outputs, params):
    """The same rules by counting in numpy, float32."""
    logits = logits.astype(np.float32).copy()
    for token in set(prompt) | set(outputs):
        factor = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in set(outputs):
        logits[token] -= np.float32(params.frequency_penalty) * outputs.count(token)
        logits[token] -= np.float32(params.presence_penalty)
    return logits


def recomputed(prompt, params):
    """Greedy tokens with penalties by the plain forward."""
    outputs = []
    for _ in range(params.max_tokens):
        logits = plain_logits(tiny_model(), [*prompt, *outputs])[-1]
        outputs.append(int(dense_penalties(logits, list(prompt), outputs, params).argmax()))
    return tuple(outputs)


def how(seen_row, *, repetition=1.0, presence=0.0, frequency=0.0):
    rows = len(seen_row)
    columns = (jnp.full(rows, value, jnp.float32) for value in (repetition, presence, frequency))
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return PenaltyArrays(
        **dict(zip(names, columns, strict=True)), seen_row=jnp.asarray(seen_row, jnp.int32)
    )


def device_counts(max_seqs, vocab, sequences):
    """`seen` of sequences, each a prompt and outputs, in rows 0 .. of a fresh array."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    seen, owners = SeenTokens(max_seqs, vocab, place), SeenOwners(max_seqs)
    rows = np.arange(len(sequences), dtype=np.int32)
    seen.reset(*owners.take(rows, rows.astype(np.int64), lambda index: sequences[index]))
    assert seen.array is not None
    return seen.array


def test_repetition_sees_prompt_and_output_and_the_others_only_the_output():
    """SA12: its very numbers, for the first and the third token and with negative logits."""
    prompt, vocab = [5, 5, 6], 16
    for outputs in ([], [7, 7]):
        seen = device_counts(2, vocab, [(prompt, outputs)])
        for sign in (1.0, -1.0):
            logits = jnp.full((1, vocab), sign, jnp.float32)
            repetition = np.asarray(penalize(logits, seen, how([0], repetition=2.0)))[0]
            had = sorted({*prompt, *outputs})
            assert repetition[had].tolist() == [0.5 if sign > 0 else -2.0] * len(had)
            assert (np.delete(repetition, had) == sign).all()
            for options in ({"presence": 1.0}, {"frequency": 0.5}):
                found = np.asarray(penalize(logits, seen, how([0], **options)))[0]
                assert found[7] == (sign - 1.0 if outputs else sign)
                assert (np.delete(found, 7) == sign).all()


def test_the_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32) * 3
    sequences = [(rng.integers(VOCAB, size=9).tolist(), rng.integers(VOCAB, size=5).tolist())
                 for _ in range(4)]  # fmt: skip
    seen = device_counts(4, VOCAB, sequences)
    for value in (0.5, 1.0, 1.2, 10.0):
        found = penalize(jnp.asarray(logits), seen, how([0, 1, 2, 3], repetition=value))
        processor = transformers.RepetitionPenaltyLogitsProcessor(value)
        ids = torch.tensor([[*prompt, *outputs] for prompt, outputs in sequences])
        wanted = processor(ids, torch.tensor(logits)).numpy()
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)


def test_neutral_penalties_and_rows_without_any_change_no_bit():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(2, VOCAB)), jnp.float32)
    seen = device_counts(2, VOCAB, [([1, 2, 3], [4, 4])])
    no_row = np.iinfo(np.int32).max
    for arrays in (how([0, 0]), how([no_row, no_row], repetition=3.0, presence=1.0)):
        assert (np.asarray(penalize(logits, seen, arrays)) == np.asarray(logits)).all()
    counted = count_drawn(seen, how([no_row, 1]), jnp.asarray([5, 6], jnp.int32))
    assert np.flatnonzero(np.asarray(counted - seen)).tolist() == [VOCAB + 6]


def test_more_counts_than_fit_into_one_call_all_arrive():
    prompt = np.random.default_rng(2).permutation(20_000)[:9_000]
    outputs = np.arange(100).repeat(3)
    seen = np.asarray(device_counts(3, 20_000, [([1], [1]), (prompt, outputs)]))
    wanted = np.zeros(20_000, np.int32)
    wanted[:100] = 6
    wanted[prompt] += 1
    assert (seen[1] == wanted).all()
    assert np.flatnonzero(seen[0]).tolist() == [1] and seen[0, 1] == 3


def test_a_row_that_changed_hands_is_filled_anew():
    """A sequence that comes back to a row of its own, after it was drawn in another one."""
    owners = SeenOwners(3)
    told = []

    def take(rows, seqs):
        def tokens(index):
            told.append(seqs[index])
            return [1], []

        emptied, counts = owners.take(np.array(rows, np.int32), np.array(seqs, np.int64), tokens)
        assert emptied.tolist() == counts[:, 0].tolist()
        return emptied.tolist()

    assert take([0, 1], [10, 11]) == [0, 1]
    assert take([1, 0], [11, 10]) == []
    assert take([2], [10]) == [2]
    assert take([0], [10]) == [0]
    assert take([1, 2], [10, 11]) == [1, 2]
    assert take([1, 2], [12, 11]) == [1]
    assert told == [10, 11, 10, 10, 10, 11, 12]


@pytest.mark.parametrize("options", [{}, {"max_prefill_chunk": 16}, {"num_blocks": 12}])
def test_tokens_equal_whole_recomputation(options):
    """With mates of each kind and without penalties, in chunks, and where memory is short."""
    prompts = random_prompts([1, 17, 33, 40, 20], seed=50)
    each = [penalized(**kind) for kind in KINDS]
    engine = tiny_engine(**options)
    outputs = serve(engine, prompts, [*each, PLAIN])
    for prompt, params, output in zip(prompts, each, outputs, strict=False):
        assert output.outputs[0].token_ids == recomputed(prompt, params)
    assert tokens_of(outputs)[-1] == plain_greedy(tiny_model(), prompts[-1], 30)
    assert (engine.stats().preemptions > 0) == ("num_blocks" in options)


def test_penalties_change_something():
    """Else the tests above would compare nothing."""
    prompt = random_prompts([33], seed=50)[0]
    plain = plain_greedy(tiny_model(), prompt, 30)
    found = {recomputed(prompt, penalized(**kind)) for kind in KINDS}
    assert len(found | {plain}) == len(KINDS) + 1


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_that_take_each_others_places(seed):
    """Rows change hands: few places, priorities, aborts, and cached prefixes."""
    rng = random.Random(seed)
    base = random_prompts([60], seed=seed)[0]
    prompts = [base[: rng.randint(1, 50)] for _ in range(4)]
    cases = [
        SamplingParams(temperature=0.0, max_tokens=rng.randint(3, 18), ignore_eos=True,
                       **rng.choice([*KINDS, {}]))
        for _ in range(6)
    ]  # fmt: skip
    engine = tiny_engine(max_num_seqs=3, max_prefill_chunk=16, num_blocks=11)
    asked, tokens, finished = {}, {}, {}

    def step():
        for delta in engine.step():
            name = delta.request_id
            tokens[name] = tokens.get(name, ()) + delta.outputs[0].token_ids
            if delta.finished:
                finished[name] = delta.outputs[0].finish_reason

    for number in range(30):
        name = str(number)
        asked[name] = rng.choice(prompts), rng.choice(cases)
        engine.add_request(name, None, *asked[name], priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 9)):
            step()
        if rng.random() < 0.1:
            engine.abort(str(rng.randint(0, number)))
    while engine.has_unfinished():
        step()
    assert engine.stats().preemptions > 0 and len(finished) == 30
    known = {}
    for name, (prompt, params) in asked.items():
        key = (tuple(prompt), params)
        if key not in known:
            known[key] = recomputed(prompt, params)
        got = tokens.get(name, ())
        whole = finished[name] == "length"
        assert got == (known[key] if whole else known[key][: len(got)])
    assert sum(reason == "length" for reason in finished.values()) > 20


@pytest.mark.parametrize("options", [{}, {"num_blocks": 14}])
def test_samples_with_penalties_do_not_depend_on_what_runs_beside_them(options):
    prompts = random_prompts([30, 25], seed=51)
    params = SamplingParams(
        n=3, seed=4, temperature=0.9, top_p=0.95, repetition_penalty=1.4, frequency_penalty=0.5,
        max_tokens=30, ignore_eos=True,
    )  # fmt: skip
    mate = SamplingParams(n=2, seed=5, temperature=1.1, max_tokens=40, ignore_eos=True)

    def draws(output):
        return [completion.token_ids for completion in output.outputs]

    each = [params, mate]
    alone = [serve(tiny_engine(), [p], one)[0] for p, one in zip(prompts, each, strict=True)]
    engine = tiny_engine(**options)
    together = serve(engine, prompts, each)
    assert [draws(output) for output in together] == [draws(output) for output in alone]
    assert len(set(draws(alone[0]))) == 3
    assert (engine.stats().preemptions > 0) == bool(options)


def test_reported_log_probabilities_are_of_the_raw_distribution():
    """Of prompt tokens too, whose rows are not penalized and count nothing."""
    (prompt,) = random_prompts([20], seed=52)
    params = penalized(repetition_penalty=1.5, logprobs=0, prompt_logprobs=0)
    output = serve(tiny_engine(max_prefill_chunk=7), [prompt], params)[0]
    tokens = output.outputs[0].token_ids
    assert tokens == recomputed(prompt, params)
    logits = plain_logits(tiny_model(), [*prompt, *tokens]).astype(np.float64)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, entry in enumerate(entries):
        assert abs(entry.logprob - exact[position, entry.token_id]) < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_survive_a_restart_and_a_pool_of_another_size(tmp_path, temperature):
    prompts = random_prompts([30, 45], seed=53)
    params = SamplingParams(
        temperature=temperature, n=2, seed=6, max_tokens=25, ignore_eos=True, **KINDS[3]
    )
    wanted = [
        [completion.token_ids for completion in output.outputs]
        for output in serve(tiny_engine(), prompts, params)
    ]
    for steps in (1, 5, 12):
        engine = tiny_engine()
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), None, prompt, params)
        told = {}

        def take(one, told=told):
            for delta in one.step():
                for output in delta.outputs:
                    key = (delta.request_id, output.index)
                    told[key] = told.get(key, ()) + output.token_ids

        for _ in range(steps):
            take(engine)
        engine.snapshot(tmp_path / "s")
        other = tiny_engine()
        other.restore(tmp_path / "s")
        for _ in range(3):
            take(other)
        other.resize_pool(60)
        while other.has_unfinished():
            take(other)
        assert [[told[str(i), j] for j in range(2)] for i in range(2)] == wanted


def test_requests_without_penalties_cost_nothing():
    """No counts, and no draw but those there would be without penalties."""
    engine = tiny_engine()
    prompts = random_prompts([5, 9], seed=54)
    sampled = SamplingParams(temperature=1.0, top_k=9, logprobs=1, max_tokens=5)
    serve(engine, prompts, [PLAIN, sampled])
    assert engine._runner.seen.array is None
    assert not any(getattr(key, "penalties", False) for key in engine._runner._compiled)
    serve(engine, prompts, [PLAIN, penalized(presence_penalty=1.0)])
    assert engine._runner.seen.array.shape == (8, VOCAB)


def test_penalties_compile_nothing_after_warm_up():
    engine = tiny_engine(max_num_seqs=4, max_num_batched_tokens=32, warm_up=True)
    each = [penalized(**KINDS[0]), penalized(logprobs=2, **KINDS[3])]
    with compiles() as compiled:
        serve(engine, random_prompts([5, 40]), each)
    assert engine.stats().compiles_after_warmup == 0
    assert compiled == []

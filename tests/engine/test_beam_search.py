"""Beam search beside transformers' own, float32."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers

from pagedjax import LLM, BeamSearchParams
from pagedjax.loading import load_model
from pagedjax.models import GenerationDefaults
from tests.support.tiny_engines import (
    drain,
    plain_greedy,
    plain_logits,
    random_prompts,
    serve,
    tiny_engine,
    tiny_model,
)

VOCAB = 96


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A tiny Llama of transformers, and the same one loaded here."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.4,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("beams")
    model.save_pretrained(path)
    saved = json.loads((path / "generation_config.json").read_text())
    assert saved["eos_token_id"] == 1
    return model, load_model(path, dtype="float32")


@pytest.fixture(scope="module")
def engine(both):
    return tiny_engine(both[1], max_prefill_chunk=6)


def prompts_of(lengths, seed):
    return [[token % VOCAB for token in prompt] for prompt in random_prompts(lengths, seed)]


def theirs(model, prompt, params, eos_ids=(1,)):
    """Sequences and scores by `generate`, best first."""
    with torch.no_grad():
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else list(eos_ids),
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
    sequences = []
    for row in result.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in eos_ids and not params.ignore_eos]
        sequences.append(tuple(row[: ends[0] + 1] if ends else row))
    return sequences, result.sequences_scores.tolist()


CASES = [
    dict(beam_width=2, max_tokens=20),
    dict(beam_width=4, max_tokens=20, length_penalty=0.0),
    dict(beam_width=4, max_tokens=20, length_penalty=2.0),
    dict(beam_width=4, max_tokens=20, length_penalty=-1.0, early_stopping=True),
    dict(beam_width=5, max_tokens=25, early_stopping="never"),
    dict(beam_width=5, max_tokens=25, early_stopping="never", length_penalty=0.5),
    dict(beam_width=3, max_tokens=40, early_stopping=True),
    dict(beam_width=8, max_tokens=10, ignore_eos=True),
    dict(beam_width=4, max_tokens=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_beams_equal_those_of_transformers(both, engine, case):
    reference, _ = both
    params = BeamSearchParams(**case)
    prompts = prompts_of([1, 3, 8, 15, 16, 20], seed=40)
    for prompt, output in zip(prompts, serve(engine, prompts, params), strict=True):
        sequences, scores = theirs(reference, prompt, params)
        assert [o.token_ids for o in output.outputs] == sequences
        np.testing.assert_allclose([o.score for o in output.outputs], scores, rtol=2e-5)
        for one in output.outputs:
            stopped = one.token_ids[-1] == 1 and not params.ignore_eos
            assert one.finish_reason == ("stop" if stopped else "length")
    assert engine.stats().blocks_used == 0


def test_several_end_of_text_tokens_leave_enough_beams(both):
    reference, model = both
    eos_ids = (1, 5, 9, 30)
    params = BeamSearchParams(beam_width=3, max_tokens=20)
    several = dataclasses.replace(model, generation=GenerationDefaults(eos_ids=eos_ids))
    prompts = prompts_of([7, 9], seed=41)
    for prompt, output in zip(prompts, serve(tiny_engine(several), prompts, params), strict=True):
        sequences, scores = theirs(reference, prompt, params, eos_ids)
        assert [o.token_ids for o in output.outputs] == sequences
        np.testing.assert_allclose([o.score for o in output.outputs], scores, rtol=2e-5)


def test_searches_among_other_requests_in_a_small_pool_come_to_the_same(both):
    """Beams that lose their blocks compute them again; neighbours change nothing."""
    _, model = both
    params = BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True)
    prompts = prompts_of([40, 50], seed=42)
    want = [serve(tiny_engine(model), [prompt], params)[0] for prompt in prompts]
    engine = tiny_engine(model, num_blocks=12, max_num_seqs=5)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), None, prompt, params)
    outputs = drain(engine)
    assert engine.stats().preemptions > 0
    for index, one in enumerate(want):
        got = outputs[str(index)].outputs
        assert [o.token_ids for o in got] == [o.token_ids for o in one.outputs]


def test_an_aborted_search_ends_and_gives_everything_back():
    for steps in (1, 2, 3, 6):
        engine = tiny_engine()
        params = BeamSearchParams(beam_width=4, max_tokens=30)
        engine.add_request("a", None, random_prompts([30], seed=43)[0], params)
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        output = drain(engine)["a"]
        assert [o.finish_reason for o in output.outputs] == ["abort"] * 4
        assert engine.stats().blocks_used == 0


def test_one_beam_is_greedy_and_its_score_the_mean_log_probability():
    prompt = random_prompts([21], seed=44)[0]
    params = BeamSearchParams(beam_width=1, max_tokens=10)
    output = serve(tiny_engine(), [prompt], params)[0].outputs[0]
    tokens = plain_greedy(tiny_model(), prompt, 10)
    assert output.token_ids == tokens
    logits = plain_logits(tiny_model(), [*prompt, *tokens]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    want = np.mean([logprobs[20 + i, token] for i, token in enumerate(tokens)])
    assert output.score == pytest.approx(want, abs=1e-4)


def test_beams_share_what_they_have_in_common():
    """Much less than as many separate sequences take (section 6.3 of the PagedAttention paper)."""
    model = tiny_model(max_positions=600)
    engine = tiny_engine(model, num_blocks=300, max_num_batched_tokens=512)
    used = []
    params = BeamSearchParams(beam_width=6, max_tokens=40)
    engine.add_request("a", None, random_prompts([500], seed=45)[0], params)
    drain(engine, on_step=lambda: used.append(engine.stats().blocks_used))
    assert max(used) < 0.35 * 6 * -(-540 // 16)


def test_the_search_is_there_for_callers_of_llm(both):
    _, model = both
    llm = LLM.from_engine(tiny_engine(model))
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    outputs = llm.beam_search([[5, 6, 7], [], [8]], params, progress=False)
    assert [len(output.outputs) for output in outputs] == [3, 3, 3]
    assert outputs[1].error is not None and outputs[0].error is None
    scores = [o.score for o in outputs[2].outputs]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(ValueError, match="wanted BeamSearchParams, got dict"):
        llm.beam_search([[5]], {"beam_width": 2}, progress=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("beam_width", 0, "beam_width must be an integer, 1 to 256"),
        ("max_tokens", 0, "max_tokens must be"),
        ("length_penalty", float("nan"), "length_penalty must be a number"),
        ("early_stopping", "always", "early_stopping must be True, False or 'never'"),
        ("ignore_eos", 1, "ignore_eos must be True or False"),
        ("cache_salt", 7, "cache_salt must be None or a string"),
    ],
)
def test_impossible_parameters_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, field: value})


def test_a_width_beyond_what_a_step_reports_is_refused():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="a beam_width of 11 needs the 22 likeliest tokens"):
        engine.add_request("a", None, [1, 2], BeamSearchParams(beam_width=11))
    assert not engine.has_unfinished()

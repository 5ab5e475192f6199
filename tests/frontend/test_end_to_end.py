"""`LLM` and `AsyncLLM` over the real engine, a tiny model and its tokenizer."""

import asyncio
import contextlib
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import AsyncLLM, SamplingParams
from pagedjax.loading import load_model
from pagedjax.models import decoder_from_params

PROMPTS = ["Hello world", "to be or not", "123", "how are you? " * 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tiny_native):
    """Greedy decoding by the plain forward over the whole sequence: a second computation."""
    model = load_model(tiny_native)
    decoder = decoder_from_params(model.arch, model.params)

    def complete(token_ids, count):
        tokens = list(token_ids)
        for _ in range(count):
            padded = jnp.asarray([tokens + [0] * (64 - len(tokens))], jnp.int32)  # one shape
            logits = decoder(padded)[0, len(tokens) - 1]  # causal: what follows has no influence
            tokens.append(int(np.argmax(np.asarray(logits))))
        return tuple(tokens[len(token_ids) :])

    return complete


def test_all_at_once_gives_the_tokens_of_a_plain_forward(tiny_llm, reference):
    results = tiny_llm.generate(PROMPTS, GREEDY, progress=False)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.prompt == prompt
        assert list(result.prompt_token_ids) == tiny_llm.tokenizer.encode(prompt)
        assert result.outputs[0].token_ids == reference(result.prompt_token_ids, 12)
        assert result.outputs[0].finish_reason == "length"


def test_text_is_the_text_of_the_tokens(tiny_llm):
    """SA36 included: the table has 16 rows more than the tokenizer, and random weights use them."""
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, n=4)
    (result,) = tiny_llm.generate("Hello", params, progress=False)
    for output in result.outputs:
        whole = tiny_llm.tokenizer.decode(output.token_ids)
        assert whole.rstrip("\ufffd") == output.text
    assert len({output.token_ids for output in result.outputs}) == 4


def test_a_stop_string_cuts_the_same_text_that_goes_on_without_it(tiny_llm):
    (free,) = tiny_llm.generate("Hello world", GREEDY, progress=False)
    text = free.outputs[0].text
    stop = text[3:6]
    for keep in (False, True):
        params = SamplingParams(
            temperature=0.0, max_tokens=12, stop=stop, include_stop_str_in_output=keep
        )
        (result,) = tiny_llm.generate("Hello world", params, progress=False)
        end = text.index(stop) + (len(stop) if keep else 0)
        assert result.outputs[0].text == text[:end]
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", stop)


def test_any_of_the_checkpoints_end_of_text_ids_ends_it(tiny_llm, monkeypatch):
    """CV38, SA19: generation_config may name several, and ignore_eos covers them all."""
    (free,) = tiny_llm.generate("to be or not", GREEDY, progress=False)
    third = free.outputs[0].token_ids[2]
    changed = dataclasses.replace(tiny_llm.engine.generation, eos_ids=(2, third))
    monkeypatch.setattr(tiny_llm.engine, "generation", changed)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (ended,) = tiny_llm.generate("to be or not", params, progress=False)
    position = free.outputs[0].token_ids.index(third)
    assert ended.outputs[0].token_ids == free.outputs[0].token_ids[: position + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", third)
    (ignored,) = tiny_llm.generate("to be or not", GREEDY, progress=False)
    assert ignored.outputs[0].token_ids == free.outputs[0].token_ids


def test_log_probabilities_come_with_every_token(tiny_llm):
    params = SamplingParams(
        temperature=0.5, top_k=2, seed=1, max_tokens=6, logprobs=4, prompt_logprobs=2
    )
    (result,) = tiny_llm.generate("Hello world", params, progress=False)
    assert len(result.outputs[0].logprobs) == result.num_generated_tokens
    assert result.prompt_logprobs[0] is None
    assert [e.token_id for e in result.prompt_logprobs[1:]] == list(result.prompt_token_ids[1:])
    for entry in result.outputs[0].logprobs:
        assert len(entry.top) == 4
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert sum(np.exp(p) for _, p in entry.top) < 1.0


def test_requests_that_cannot_be_served_fail_alone(tiny_llm):
    """SC01, SC03, SC17, SC20 on the real engine."""
    longest = tiny_llm.engine.max_model_len
    prompts = [[], [5] * longest, [5] * 10 * longest, [-1], [336], "", "fine", [5] * (longest - 1)]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    results = tiny_llm.generate(prompts, params, progress=False)
    # "" is one token here: this tokenizer puts a beginning of text.
    assert [r.error is None for r in results] == [False] * 5 + [True] * 3
    assert [r.num_generated_tokens for r in results] == [0] * 5 + [5, 5, 1]
    assert results[-1].outputs[0].finish_reason == "length"


def test_times_are_in_order(tiny_llm):
    for result in tiny_llm.generate(PROMPTS, GREEDY, progress=False):
        times = result.timings
        assert times.arrived <= times.scheduled <= times.first_token <= times.finished


def test_chat_answers_the_rendered_conversation(tiny_llm):
    messages = [{"role": "user", "content": "how are you?"}]
    (result,) = tiny_llm.chat(messages, GREEDY, progress=False)
    assert list(result.prompt_token_ids) == tiny_llm.tokenizer.chat(messages)
    assert result.num_generated_tokens == 12


def test_streams_and_batches_give_the_same(tiny_llm):
    results = tiny_llm.generate(PROMPTS, GREEDY, progress=False)

    async def main():
        async with AsyncLLM.from_engine(tiny_llm.engine) as llm:

            async def text(prompt):
                return "".join([d.outputs[0].text async for d in llm.generate(prompt, GREEDY)])

            texts = await asyncio.gather(*map(text, PROMPTS))
            assert texts == [result.outputs[0].text for result in results]
            async with contextlib.aclosing(
                llm.generate("to be", SamplingParams(max_tokens=200, ignore_eos=True))
            ) as stream:
                await anext(stream)
            assert await text(PROMPTS[0]) == texts[0]
            stats = await llm.stats()
            assert stats.num_running == 0
            assert stats.compiles_after_warmup == 0

    asyncio.run(main())
    assert tiny_llm.engine.stats().blocks_used == 0


def test_readers_that_leave_all_at_once_give_their_blocks_back(tiny_llm):
    """SV05, SV24: 32 readers on an engine for 4, three times over, beside one that stays."""
    endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=0)
    (alone,) = tiny_llm.generate("how are you?", GREEDY, progress=False)

    async def text_of(stream):
        return "".join([delta.outputs[0].text async for delta in stream])

    async def main():
        async with AsyncLLM.from_engine(tiny_llm.engine) as llm:
            for _ in range(3):
                readers = [
                    asyncio.create_task(text_of(llm.generate(f"to be {i}", endless)))
                    for i in range(32)
                ]
                while (await llm.stats()).num_running < 4:
                    await asyncio.sleep(0.005)
                stays = asyncio.create_task(text_of(llm.generate("how are you?", GREEDY)))
                await asyncio.sleep(0.02)
                for reader in readers:
                    reader.cancel()
                await asyncio.wait(readers)
                assert await stays == alone.outputs[0].text
            stats = await llm.stats()
            assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)

    asyncio.run(main())

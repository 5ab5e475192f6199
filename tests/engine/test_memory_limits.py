"""Sizes beyond the memory are refused before anything is lost, and stated limits are served."""

import jax
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine.kv_pool import KVSpec, check_memory, host_memory_bytes, kv_spec
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import (
    drain,
    plain_greedy,
    random_prompts,
    serve,
    tiny_arch,
    tiny_engine,
    tiny_model,
    tokens_of,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4
TOO_MANY = 10**12


def interrupted(refused, **options):
    """Tokens of two requests, between whose steps `refused` is called with their engine."""
    engine, deltas = tiny_engine(num_blocks=40, **options), {}
    for number, prompt in enumerate(random_prompts([20, 50])):
        engine.add_request(str(number), None, prompt, GREEDY)
    for _ in range(5):
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    refused(engine)
    assert engine.config.num_blocks == engine.kv_spec.num_blocks == 40
    assert engine.stats().blocks_total == 39
    rest = drain(engine)
    return [
        RequestOutput.joined([*deltas.get(name, ()), rest[name]]).outputs[0].token_ids
        for name in ("0", "1")
    ]


def wanted():
    return [plain_greedy(tiny_model(), prompt, 8) for prompt in random_prompts([20, 50])]


def test_a_pool_beyond_the_memory_is_refused_at_the_start():
    """OF17: with the bytes wanted and there, and not by a MemoryError from the books."""
    both = f"take {TOO_MANY * BLOCK_BYTES} bytes, the device has {host_memory_bytes()}"
    with pytest.raises(ValueError, match=f"num_blocks: {TOO_MANY} blocks .* {both}"):
        tiny_engine(num_blocks=TOO_MANY)


@pytest.mark.parametrize("num_blocks", [40, None])
def test_a_host_cache_beyond_the_memory_is_refused_at_the_start(num_blocks):
    """OF17."""
    with pytest.raises(ValueError, match=r"host_cache_bytes is 1(0+), the host has \d+ bytes"):
        tiny_engine(num_blocks=num_blocks, host_cache_bytes=10**16)


def test_pool_and_host_cache_share_a_cpus_memory_and_not_a_gpus():
    half = host_memory_bytes() * 6 // 10
    config = EngineConfig(host_cache_bytes=half).resolved(platform="cpu", max_positions=256)
    spec = kv_spec(tiny_arch(), config, num_blocks=half // BLOCK_BYTES, dtype="float32")
    check_memory(spec, config, device_bytes=half, platform="gpu")
    with pytest.raises(ValueError, match="host_cache_bytes"):
        check_memory(spec, config, device_bytes=host_memory_bytes(), platform="cpu")


def test_more_sequences_than_the_memory_has_block_tables_for_are_refused(monkeypatch):
    """OF17."""
    monkeypatch.setattr("pagedjax.engine.kv_pool.host_memory_bytes", lambda: 1 << 30)
    seqs = (1 << 30) // (16 * 4)  # which leaves nothing for the pool
    with pytest.raises(
        ValueError, match=f"is {seqs}: block tables of 64 bytes each take {seqs * 64}"
    ):
        tiny_engine(max_num_seqs=seqs, max_num_batched_tokens=seqs)


def test_a_resize_beyond_the_memory_is_refused_and_changes_nothing():
    def refused(engine):
        pool = engine._runner._pool
        with pytest.raises(ValueError, match=f"take {TOO_MANY * BLOCK_BYTES} bytes, the device"):
            engine.resize_pool(TOO_MANY)
        assert engine._runner._pool is pool

    assert interrupted(refused) == wanted()


@pytest.mark.parametrize(
    "options", [{}, dict(host_cache_bytes=1 << 20), dict(kv_cache_dtype="int8")]
)
@pytest.mark.parametrize(
    "error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")]
)
def test_a_pool_that_can_not_be_made_leaves_the_old_one_with_its_content(
    monkeypatch, error, options
):
    """The tokens go on, no block is computed again, and the error has both numbers."""
    create = KVSpec.create

    def create_small(spec, device):
        if spec.num_blocks > 40:
            raise error
        return create(spec, device)

    monkeypatch.setattr(KVSpec, "create", create_small)
    there = host_memory_bytes()

    def refused(engine):
        used = engine.stats().blocks_used
        match = f"50 blocks takes {50 * engine.kv_spec.block_bytes} bytes, the device had {there}"
        with pytest.raises(ValueError, match=match) as refusal:
            engine.resize_pool(50)
        assert (str(error) or "MemoryError") in str(refusal.value)
        assert engine.stats().blocks_used == used > 2

    tokens = interrupted(refused, **options)
    undisturbed = interrupted(lambda engine: None, **options)
    assert tokens == undisturbed
    if "kv_cache_dtype" not in options:
        assert tokens == wanted()


def test_every_request_at_all_limits_at_once_is_served():
    """OF18: longest prompts, as many as run at a time, all logprobs and penalties; then a short."""
    engine = tiny_engine(max_num_seqs=4, num_blocks=30, max_model_len=256, warm_up=True)
    length = engine.max_model_len
    greediest = SamplingParams(
        temperature=1.3,
        top_p=0.9,
        seed=1,
        max_tokens=5,
        logprobs=20,
        prompt_logprobs=20,
        repetition_penalty=1.2,
        presence_penalty=2.0,
        frequency_penalty=-2.0,
        ignore_eos=True,
    )
    for output in serve(engine, random_prompts([length - 1] * 4), greediest):
        assert output.outputs[0].finish_reason == "length"
        assert output.num_generated_tokens == 1
        assert [len(entry.top) for entry in output.prompt_logprobs[1:]] == [20] * (length - 2)
    mixed = random_prompts([length - 1, 3, length - 5, 40], seed=1)
    assert [o.num_generated_tokens for o in serve(engine, mixed, greediest)] == [1, 5, 5, 5]
    (short,) = random_prompts([5], seed=2)
    assert tokens_of(serve(engine, [short], GREEDY)) == [plain_greedy(tiny_model(), short, 8)]
    assert engine.stats().compiles_after_warmup == 0

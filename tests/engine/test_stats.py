"""Figures of an engine, against what its outputs and tiers say."""

import pytest

from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import random_prompts, serve, settle, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def found_tokens(engine):
    """Prompt tokens found so far, by tier."""
    stats = engine.stats()
    return {
        tier: round(share * stats.prefix_lookup_tokens) for tier, share in stats.hit_rates.items()
    }


def test_hit_rates_tell_where_the_tokens_of_prompts_were_found(tmp_path):
    engine = tiny_engine(
        num_blocks=14,
        host_cache_bytes=6 * 4096,
        disk_cache_path=tmp_path,
        disk_cache_bytes=1 << 20,
        preemption="recompute",
    )
    tiers = engine._scheduler.blocks.tiers
    assert engine.kv_spec.block_bytes == 4096
    before = found_tokens(engine)
    assert before == {"pool": 0, "host": 0, "disk": 0}
    seen = set()
    prompts = random_prompts([100, 110, 100, 90])
    for prompt in [*prompts, *prompts, *reversed(prompts), prompts[0]]:
        loaded = tiers.counts.loaded
        (output,) = serve(engine, [prompt], GREEDY)
        settle(engine)
        now = found_tokens(engine)
        added = {tier: now[tier] - before[tier] for tier in now}
        assert sum(added.values()) == output.num_cached_tokens
        assert added["host"] + added["disk"] == 16 * (tiers.counts.loaded - loaded)
        assert min(added.values()) >= 0
        seen |= {tier for tier, tokens in added.items() if tokens}
        before = now
    assert seen == {"pool", "host", "disk"}
    engine._lower.close()


def test_what_a_preempted_request_finds_again_is_no_hit_of_a_prompt():
    engine = tiny_engine(num_blocks=20, host_cache_bytes=100 * 4096, preemption="recompute")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    outputs = serve(engine, random_prompts([90, 100, 80, 70, 90, 100]), params)
    counts = engine._scheduler.blocks.tiers.counts
    assert engine.stats().preemptions > 0 < counts.host_hits
    assert counts.host_prompt_hits == 0
    assert all(output.num_cached_tokens == 0 for output in outputs)
    assert engine.stats().hit_rates == {"pool": 0.0, "host": 0.0, "disk": 0.0}


def test_of_a_restored_request_only_the_prompt_counts_as_looked_up(tmp_path):
    """Its blocks with tokens that it had generated are found below the pool, too."""
    options = dict(num_blocks=14, host_cache_bytes=60 * 4096, preemption="recompute")
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    (prompt,) = random_prompts([20], seed=5)
    first, other = tiny_engine(**options), tiny_engine(**options)
    first.add_request("a", None, prompt, params)
    while first.stats().generated_tokens < 100:
        first.step()
    first.snapshot(tmp_path / "s")
    for tokens in [prompt, *random_prompts([150, 150], seed=6)]:
        serve(other, [tokens], params if tokens is prompt else GREEDY)
    other.restore(tmp_path / "s")
    stats = other.stats()
    assert stats.lower.counts.host_hits > 2 > stats.lower.counts.host_prompt_hits
    assert stats.prefix_hit_tokens == 20
    assert min(stats.hit_rates.values()) >= 0


def test_bytes_moved_are_whole_blocks_by_path():
    engine = tiny_engine(num_blocks=14, host_cache_bytes=100 * 4096, preemption="recompute")
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=5)
    for prompt in random_prompts([100, 110, 100, 90]) * 2:
        serve(engine, [prompt], params)
    stats = engine.stats()
    moved = stats.moved_bytes
    assert moved["pool_to_pool"] == 4096 * stats.blocks_copied > 0
    assert moved["pool_to_host"] == 4096 * stats.lower.counts.stored > 0
    assert moved["host_to_pool"] == 4096 * stats.lower.counts.loaded > 0
    assert moved["host_to_disk"] == moved["disk_to_host"] == 0
    assert sum(stats.hit_rates.values()) == pytest.approx(stats.prefix_hit_rate)


def test_the_peak_in_use_is_one_of_the_pool_that_there_is_now():
    engine = tiny_engine(num_blocks=100)
    serve(engine, random_prompts([60] * 8), GREEDY)
    assert engine.stats().blocks_peak > 10
    engine.resize_pool(10)
    assert engine.stats().peak_block_utilisation == 0.0
    serve(engine, random_prompts([60]), GREEDY)
    assert 0 < engine.stats().peak_block_utilisation <= 1

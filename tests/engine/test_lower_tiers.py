"""Engines with host memory and a disk below a small pool answer as an engine with a large pool."""

import functools
import gc
from pathlib import Path

import pytest

from pagedjax.engine import disk_tier
from pagedjax.sampling_params import SamplingParams
from scheduler import invariants
from tests.support.tiny_engines import (
    drain,
    random_prompts,
    serve,
    settle,
    tiny_engine,
    tiny_model,
    tokens_of,
)

BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4  # layers, K and V, heads, tokens, width, float32
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def engine_with(num_host_blocks, model=None, **options):
    settings = dict(host_cache_bytes=int(num_host_blocks * BLOCK_BYTES), preemption="recompute")
    return tiny_engine(model, **{**settings, **options})


def counts(engine):
    return engine._scheduler.blocks.tiers.counts


@functools.cache
def expected(seed, lengths, max_tokens=12):
    """Greedy tokens by an engine whose pool holds everything."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return tokens_of(serve(tiny_engine(num_blocks=600), random_prompts(lengths, seed), params))


def check_books(engine):
    return lambda: invariants.check(engine._scheduler)


def test_blocks_that_left_the_gpu_are_found_again_in_host_memory():
    """OF09: all full blocks are stored, decoded ones too, and all are hits when asked again."""
    engine = engine_with(100, num_blocks=15)
    lengths = (160, 180)
    prompts = random_prompts(lengths)
    params = SamplingParams(temperature=0.0, max_tokens=40)
    first, _ = (serve(engine, [prompt], params)[0] for prompt in prompts)
    longer = [prompts[0] + list(first.outputs[0].token_ids)]
    again = serve(engine, longer, GREEDY)[0]
    assert again.num_cached_tokens == (160 + 40 - 1) // 16 * 16
    got = counts(engine)
    assert got.host_hits == got.loaded >= 11 and got.stored >= 11
    assert got.not_stored == got.host_evictions == 0
    alone = serve(tiny_engine(num_blocks=600), longer, GREEDY)
    assert tokens_of([again]) == tokens_of(alone)
    assert tokens_of([first]) == expected(0, lengths, 40)[:1]


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_a_burst_four_times_the_pool_finishes_with_the_same_tokens(preemption):
    """SC07 and SC10 with blocks that come and go; the pool is a quarter of what is needed."""
    lengths = (90, 120, 75, 110, 100, 85, 95, 105)
    needed = sum(-(-(length + 30) // 16) for length in lengths)
    engine = engine_with(
        needed,
        num_blocks=1 + needed // 4,
        preemption=preemption,
        link_bytes_per_s=1e9,
        prefill_tokens_per_s=1e4,
    )
    params = SamplingParams(temperature=0.0, max_tokens=30)
    outputs = serve(engine, random_prompts(lengths), params)
    assert tokens_of(outputs) == expected(0, lengths, 30)
    assert engine.stats().preemptions > 0
    assert (engine._scheduler.num_swaps > 0) == (preemption != "recompute")
    assert counts(engine).swapped_in == counts(engine).swapped_out
    stats = engine.stats()
    assert stats.blocks_used == 0 and stats.swaps == engine._scheduler.num_swaps
    assert stats.lower.host_blocks_total == needed >= stats.lower.host_blocks_used
    assert stats.lower.counts == counts(engine)
    counts(engine).stored += 1
    assert stats.lower.counts != counts(engine), "a snapshot does not change"


def test_auto_recomputes_where_the_link_is_slower():
    lengths = (90, 120, 75, 110)
    engine = engine_with(
        100, num_blocks=14, preemption="auto", link_bytes_per_s=1e5, prefill_tokens_per_s=1e6
    )
    params = SamplingParams(temperature=0.0, max_tokens=30)
    assert tokens_of(serve(engine, random_prompts(lengths), params)) == expected(0, lengths, 30)
    assert engine.stats().preemptions > 0 == engine._scheduler.num_swaps


def test_a_swapped_request_can_be_aborted():
    """BM19 for slots of host memory."""
    engine = engine_with(40, num_blocks=14, preemption="swap")
    for index, prompt in enumerate(random_prompts((90, 100, 80))):
        engine.add_request(str(index), None, prompt, SamplingParams(temperature=0, max_tokens=60))
    while not engine._scheduler.num_swaps:
        engine.step()
    for index in range(3):
        engine.abort(str(index))
    drain(engine, on_step=check_books(engine))
    tiers = engine._scheduler.blocks.tiers
    assert tiers.num_host_available == tiers.num_host_blocks == 40
    assert engine.stats().blocks_used == 0


def test_a_request_may_be_swapped_in_and_out_again_before_anything_is_copied():
    """OF07: a block is saved while what it is to hold has not been loaded into it."""
    engine = engine_with(20, num_blocks=40, preemption="swap")
    (prompt,) = random_prompts((75,))
    engine.add_request("0", None, prompt, SamplingParams(temperature=0.0, max_tokens=30))
    blocks = engine._scheduler.blocks

    def swap():
        seqs = engine._scheduler.sequences()
        for seq in (seq for seq in seqs if seq.blocks and seq.num_tokens % 5 == 0):
            for _ in range(2):
                assert blocks.swap_out(seq)
                others = blocks.pool.take(8)  # its blocks may be among them
                assert blocks.swap_in(seq, keep_free=0)
                blocks.pool.release(others)
        check_books(engine)()

    outputs = drain(engine, on_step=swap)
    assert tokens_of(outputs.values()) == expected(0, (75,), 30)
    assert counts(engine).swapped_out > counts(engine).stored >= 6


def test_sampling_with_a_seed_survives_a_swap():
    lengths = (90, 100, 80, 70)
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=40) for s in range(4)]
    engine = engine_with(60, num_blocks=14, preemption="swap")
    got = serve(engine, random_prompts(lengths), params)
    assert engine._scheduler.num_swaps > 0
    want = serve(tiny_engine(num_blocks=600), random_prompts(lengths), params)
    assert tokens_of(got) == tokens_of(want)


def test_other_weights_never_read_blocks_of_the_old_ones(tmp_path):
    """BM26 in host memory and on the disk, and for a request that is swapped out meanwhile."""
    engine = engine_with(
        6, num_blocks=14, disk_cache_path=tmp_path, disk_cache_bytes=1 << 20, preemption="swap"
    )
    prompts = random_prompts((90, 100, 80, 120))
    for _ in range(2):
        serve(engine, prompts, GREEDY)
    assert engine.stats().lower.disk_blocks_used > 0
    other = tiny_model(seed=5)
    engine.swap_params(other.params)
    got = [serve(engine, [prompt], GREEDY)[0] for prompt in prompts]
    assert all(output.num_cached_tokens == 0 for output in got)
    assert tokens_of(got) == tokens_of(serve(tiny_engine(other, num_blocks=600), prompts, GREEDY))


def test_no_copy_is_compiled_after_the_warm_up():
    engine = engine_with(60, num_blocks=14, preemption="auto", warm_up=True, max_num_seqs=4)
    assert engine._scheduler.swap_cost is not None  # as measured
    serve(engine, random_prompts((90, 100, 80, 70)), GREEDY)
    serve(engine, random_prompts((90, 100, 80, 70)), GREEDY)
    assert counts(engine).loaded > 0
    assert engine.stats().compiles_after_warmup == 0


def fill_disk(path, lengths=(100, 110, 120, 90), **options):
    """An engine that has spilled most of its prefixes, and their prompts."""
    engine = engine_with(
        6, num_blocks=14, disk_cache_path=path, disk_cache_bytes=1 << 20, **options
    )
    prompts = random_prompts(lengths)
    for _ in range(3):
        for prompt in prompts:
            serve(engine, [prompt], GREEDY)
            settle(engine)
    return engine, prompts


def test_a_restarted_engine_finds_its_prefixes_on_the_disk(tmp_path):
    engine, prompts = fill_disk(tmp_path)
    assert counts(engine).disk_hits > 0
    engine._lower.close()
    again = engine_with(40, num_blocks=40, disk_cache_path=tmp_path, disk_cache_bytes=1 << 20)
    outputs = serve(again, prompts, GREEDY)
    assert tokens_of(outputs) == expected(0, (100, 110, 120, 90))
    assert counts(again).disk_hits == sum(o.num_cached_tokens for o in outputs) // 16 > 10
    again._lower.close()
    stranger = engine_with(
        40, tiny_model(seed=3), disk_cache_path=tmp_path, disk_cache_bytes=1 << 20
    )
    serve(stranger, prompts, GREEDY)
    assert counts(stranger).disk_hits == 0
    stranger._lower.close()


def test_an_engine_that_is_dropped_ends_its_thread_and_finishes_its_files(tmp_path):
    engine, _ = fill_disk(tmp_path)
    thread = engine._lower._disk._thread
    written = counts(engine).spilled
    del engine
    gc.collect()
    assert not thread.is_alive()
    assert len(list(Path(tmp_path).rglob("*.kv"))) >= written > 0
    assert not list(Path(tmp_path).rglob("*.partial"))


def test_files_hold_keys_and_values_of_two_dtypes(tmp_path):
    """And are of no use to an engine that stores them in another way."""
    options = dict(kv_cache_dtype="int8-values", max_model_len=150)
    engine, prompts = fill_disk(tmp_path, **options)
    engine._lower.close()
    disk = dict(num_blocks=40, disk_cache_path=tmp_path, disk_cache_bytes=1 << 20)
    again = engine_with(40, **disk, **options)
    outputs = serve(again, prompts, GREEDY)
    assert counts(again).disk_hits == sum(o.num_cached_tokens for o in outputs) // 16 > 10
    large = tiny_engine(num_blocks=600, **options)
    hits = [serve(large, [prompt], GREEDY) for prompt in prompts * 2][4:]
    assert tokens_of(outputs) == [tokens_of(hit)[0] for hit in hits]
    again._lower.close()
    other = engine_with(40, kv_cache_dtype="int8", max_model_len=150, **disk)
    serve(other, prompts, GREEDY)
    assert counts(other).disk_hits == 0
    other._lower.close()


def test_damaged_files_are_misses(tmp_path):
    engine, prompts = fill_disk(tmp_path)
    engine._lower.close()
    for index, path in enumerate(sorted(Path(tmp_path).rglob("*.kv"))):
        data = bytearray(path.read_bytes())
        if index % 3 == 0:
            data[-100] ^= 1
        path.write_bytes(data[: len(data) - index % 3])
    again = engine_with(40, num_blocks=40, disk_cache_path=tmp_path, disk_cache_bytes=1 << 20)
    assert tokens_of(serve(again, prompts, GREEDY)) == expected(0, (100, 110, 120, 90))
    assert counts(again).disk_hits == 0 < counts(again).failed_reads
    again._lower.close()


def test_a_pool_of_another_size_has_the_same_disk_below_it(tmp_path):
    engine, prompts = fill_disk(tmp_path, preemption="swap")
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), None, prompt, GREEDY)
    for _ in range(4):
        engine.step()
    engine.resize_pool(18)
    outputs = drain(engine, on_step=check_books(engine))
    # What came before the change has been handed out, and is not among these.
    whole = expected(0, (100, 110, 120, 90))
    for index, tokens in enumerate(whole):
        got = outputs[str(index)].outputs[0].token_ids
        assert got and got == tokens[-len(got) :]
    assert counts(engine).disk_hits > 0
    engine._lower.close()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8", "fp8-values"])
def test_compressed_blocks_come_back_as_they_left(kv_cache_dtype):
    """OF03: with their scales, and what was stored with other scales is not found.

    Hits on the GPU are the second computation: any other would round other last bits.
    """
    same = dict(kv_cache_dtype=kv_cache_dtype, max_model_len=150)
    large = tiny_engine(num_blocks=600, **same)
    bytes_each = large.kv_spec.block_bytes
    engine = engine_with(48 * bytes_each / BLOCK_BYTES, num_blocks=14, **same)
    assert engine.stats().lower.host_blocks_total == 48
    prompts = random_prompts((90, 100, 80, 70, 110))
    for prompt in prompts * 3:
        (got,), (want,) = (serve(one, [prompt], GREEDY) for one in (engine, large))
        assert got.num_cached_tokens == want.num_cached_tokens
        assert tokens_of([got]) == tokens_of([want])
    assert counts(engine).host_hits > 20
    engine.calibrate_kv([[1, 2, 3]])
    assert [serve(engine, [prompt], GREEDY)[0].num_cached_tokens for prompt in prompts] == [0] * 5


def test_a_model_with_a_window_keeps_only_what_it_sees_when_swapped():
    model = tiny_model(windows=(60, 60))
    prompts = random_prompts((30, 30, 120))
    params = SamplingParams(temperature=0.0, max_tokens=70)
    engine = engine_with(60, model, num_blocks=14, preemption="swap")
    want = tokens_of(serve(tiny_engine(model, num_blocks=600), prompts, params))
    assert tokens_of(serve(engine, prompts, params)) == want
    assert 0 < counts(engine).swapped_out < 7 * engine._scheduler.num_swaps  # of 120 tokens


def test_memory_that_holds_no_block_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"host_cache_bytes .* at least {BLOCK_BYTES}; got 100"):
        tiny_engine(host_cache_bytes=100)
    size = disk_tier.file_bytes(BLOCK_BYTES, 16)
    with pytest.raises(ValueError, match=f"disk_cache_bytes .* at least {size}; got 100"):
        tiny_engine(host_cache_bytes=1 << 20, disk_cache_path=tmp_path, disk_cache_bytes=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(host_cache_bytes=-1), "host_cache_bytes must be an integer"),
        (dict(preemption="never"), "preemption must be one of"),
        (dict(preemption="swap"), "preemption is 'swap', .* host_cache_bytes is 0"),
        (dict(disk_cache_path="x"), "go together"),
        (dict(disk_cache_bytes=1000), "go together"),
        (dict(disk_cache_path="x", disk_cache_bytes=1000), "host_cache_bytes is 0"),
        (dict(link_bytes_per_s=0.0), "link_bytes_per_s must be positive"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(**options)

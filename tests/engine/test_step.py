"""The compiled step as XLA sees it: memory, donation, packing."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine.buckets import Bucket, Buckets, ladder
from pagedjax.engine.compilation_cache import enable_compilation_cache
from pagedjax.engine.kv_pool import blocks_that_fit, host_memory_bytes, kv_spec
from pagedjax.engine.runner import ModelRunner
from pagedjax.engine.step_inputs import SamplingLayout, StepLayout
from tests.support.tiny_engines import tiny_arch, tiny_model

OPTIONS = dict(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)


def runner(num_blocks, **options):
    model = tiny_model()
    config = EngineConfig(num_blocks=num_blocks, **OPTIONS, **options)
    config = config.resolved(platform="cpu", max_positions=256)
    spec = kv_spec(model.arch, config, num_blocks=num_blocks, dtype=np.dtype(np.float32))
    return ModelRunner(model.arch, model.params, spec, config, max_blocks_per_seq=16)


@pytest.mark.parametrize("bucket", [Bucket(4, 4, True), Bucket(32, 4, False)])
def test_a_steps_temporary_memory_does_not_grow_with_the_pool(bucket):
    """Otherwise the pool is copied somewhere instead of updated in place."""
    small = runner(32).compile(bucket).memory_analysis()
    large = runner(3200).compile(bucket).memory_analysis()
    pool_bytes = kv_spec(
        tiny_arch(), EngineConfig(), num_blocks=3200, dtype=np.dtype(np.float32)
    ).block_bytes * 3200  # fmt: skip
    assert large.alias_size_in_bytes >= pool_bytes
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
    assert large.temp_size_in_bytes < pool_bytes / 4


@pytest.mark.parametrize(
    "layout", [StepLayout(Bucket(6, 3, False), 16), SamplingLayout(3), SamplingLayout(3, True)]
)
def test_packed_fields_arrive_where_they_were_written(layout):
    packed = np.zeros(layout.size, np.int32)
    rng = np.random.default_rng(0)
    written = {}
    start = packed.__array_interface__["data"][0]
    for name, view in layout.views(packed).items():
        is_float = view.dtype == np.float32
        view[...] = rng.normal(size=view.shape) if is_float else rng.integers(0, 99, view.shape)
        written[name] = view.copy()
        # What Mosaic GPU kernels ask of an address.
        assert (view.__array_interface__["data"][0] - start) % 256 == 0, name
    arrays = jax.jit(layout.arrays)(jnp.asarray(layout.sealed(packed)))
    for name, value in written.items():
        assert (np.asarray(arrays[name]) == value).all(), name
    assert set(written) == set(arrays)


def test_ladders_end_with_the_largest_size():
    assert ladder(1, 32, 4) == (1, 4, 16, 32)
    assert ladder(32, 32, 2) == (32,)
    assert ladder(1, 1, 2) == (1,)


def test_a_step_gets_the_smallest_bucket_that_holds_it():
    buckets = Buckets(max_seqs=8, max_tokens=100, growth=2)
    assert buckets.fit(tokens=3, seqs=3) == Bucket(4, 4, True)
    assert buckets.fit(tokens=33, seqs=3) == Bucket(64, 8, False)
    assert buckets.fit(tokens=100, seqs=8) == Bucket(100, 8, False)
    with pytest.raises(ValueError, match="no bucket holds tokens=101"):
        buckets.fit(tokens=101, seqs=2)


def test_a_gpu_has_no_sizes_that_take_no_less_time():
    """With few tokens the weights take as long to read; one sequence alone is the exception."""
    buckets = Buckets(256, 2048, 2, few_seqs=8, few_tokens=128)
    assert [b.seqs for b in buckets.decode] == [1, 8, 16, 32, 64, 128, 256]
    assert [b.tokens for b in buckets.mixed] == [128, 256, 512, 1024, 2048]
    assert buckets.fit(tokens=2, seqs=2) == Bucket(8, 8, True)
    finer = Buckets(600, 2048, 2, few_seqs=8, few_tokens=128, many_seqs=128)
    assert [b.seqs for b in finer.decode][5:] == [128, 192, 256, 384, 512, 600]
    assert finer.mixed == Buckets(600, 2048, 2, few_tokens=128).mixed
    small = Buckets(2, 6, 2, few_seqs=8, few_tokens=128)
    assert list(small) == [Bucket(1, 1, True), Bucket(2, 2, True), Bucket(6, 2, False)]


def no_steps():
    raise AssertionError("a CPU's fraction is for the pool alone: nothing is compiled for its size")


def test_the_pool_never_exceeds_what_the_sequences_can_use():
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32)
    config = config.resolved(platform="cpu", max_positions=256)
    device = jax.devices()[0]
    fit = blocks_that_fit(
        tiny_arch(), config, dtype=np.dtype(np.float32), device=device, step_bytes=no_steps
    )
    assert fit == 1 + 4 * 16


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([], "machine"),
        (["max\n"], "machine"),
        (["9223372036854771712\n"], "machine"),
        (["1048576\n"], 1 << 20),
        (["max\n", "2097152\n"], 2 << 20),
    ],
)
def test_a_containers_memory_limit_counts_as_the_machines_memory(tmp_path, texts, wanted):
    """OF15: sized by the host, the pool would end the process in a small container."""
    limits = [tmp_path / str(index) for index in range(len(texts) + 1)]  # the last is absent
    for path, text in zip(limits, texts, strict=False):
        path.write_text(text)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host_memory_bytes(limits) == (machine if wanted == "machine" else wanted)


def test_a_memory_fraction_that_leaves_no_block_is_refused():
    config = EngineConfig(memory_fraction=1e-9).resolved(platform="cpu", max_positions=256)
    with pytest.raises(ValueError, match="at least 2 blocks"):
        blocks_that_fit(
            tiny_arch(),
            config,
            dtype=np.dtype(np.float32),
            device=jax.devices()[0],
            step_bytes=no_steps,
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("block_size", 17),
        ("dtype", "float64"),
        ("num_blocks", 1),
        ("num_blocks", -3),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("memory_fraction", float("nan")),
        ("max_num_seqs", 0),
        ("max_prefill_chunk", 0),
        ("max_model_len", 1),
    ],
)
def test_impossible_options_are_refused_by_name(option, value):
    """OF17: zero, negative or over-large sizes never reach the device."""
    with pytest.raises(ValueError, match=option):
        EngineConfig(**{option: value})


def test_a_model_length_beyond_the_checkpoints_is_refused():
    with pytest.raises(ValueError, match="max_model_len is 512, the model states 256"):
        EngineConfig(max_model_len=512).resolved(platform="cpu", max_positions=256)


@pytest.mark.parametrize(
    ("given", "seqs", "tokens"),
    [
        ({}, 32, 512),
        (dict(max_num_batched_tokens=16), 16, 16),
        (dict(max_num_seqs=1000), 1000, 1000),
        (dict(max_num_seqs=3), 3, 512),
    ],
)
def test_the_budget_left_open_makes_room_for_the_given_one(given, seqs, tokens):
    config = EngineConfig(**given).resolved(platform="cpu", max_positions=256)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (seqs, tokens)


def test_a_step_smaller_than_its_sequences_is_refused():
    config = EngineConfig(max_num_seqs=9, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 8, below max_num_seqs 9"):
        config.resolved(platform="cpu", max_positions=256)


def test_a_home_that_cannot_be_written_costs_the_cache_alone(tmp_path, monkeypatch):
    (tmp_path / "pagedjax").write_text("a file where the directory should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        with pytest.warns(UserWarning, match="compiled steps are not kept"):
            enable_compilation_cache()
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

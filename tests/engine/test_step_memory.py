"""The memory of steps, measured without an engine, against the steps of a whole one. OF15, OF18."""

import jax
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.engine.buckets import Bucket
from pagedjax.engine.kv_pool import blocks_that_fit, kv_spec
from pagedjax.engine.kv_scales import calibrate, scales_for
from pagedjax.engine.runner import Draw, ModelRunner
from pagedjax.engine.step_memory import planned_step_bytes
from tests.support.tiny_engines import tiny_arch, tiny_model

OPTIONS = dict(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)


def resolved(**options):
    return EngineConfig(**OPTIONS, **options).resolved(platform="cpu", max_positions=256)


@pytest.mark.parametrize(
    ("layers", "kv_cache_dtype"), [(2, "int8"), (2, "int8-values"), (10, "auto")]
)
def test_the_plan_is_what_the_largest_compiled_step_says(layers, kv_cache_dtype):
    model = tiny_model(layers=layers, windows=(None, 32) * (layers // 2))
    config = resolved(kv_cache_dtype=kv_cache_dtype)
    dtype, device = np.dtype(np.float32), jax.devices()[0]
    plan = planned_step_bytes(model.arch, config, dtype=dtype, device=device)
    spec = kv_spec(model.arch, config, num_blocks=50, dtype=dtype)
    scales = None
    if spec.is_compressed:
        found = calibrate(model.arch, model.params, [[1, 2]], max_len=256)
        scales = scales_for(found, spec.dtype, with_keys=spec.key_dtype is None)
    runner = ModelRunner(
        model.arch, model.params, spec, config, max_blocks_per_seq=16, kv_scales=scales
    )
    sizes = [
        runner.compile(key).memory_analysis()
        for key in (Bucket(64, 8, False), Bucket(8, 8, True), Draw(8, True))
    ]
    temporary = max(size.temp_size_in_bytes for size in sizes)
    logits = 4 * 8 * model.arch.vocab
    assert temporary + 2 * logits <= plan <= 1.1 * temporary + 4 * logits


def test_more_tokens_a_step_leave_less_for_the_pool():
    """A stand-in for the device, since a CPU does not tell its memory."""
    dtype, device = np.dtype(np.float32), jax.devices()[0]
    configs = [
        EngineConfig(max_num_seqs=64, max_num_batched_tokens=tokens, memory_fraction=0.5).resolved(
            platform="gpu", max_positions=256
        )
        for tokens in (64, 512)
    ]
    plans = [planned_step_bytes(tiny_arch(), c, dtype=dtype, device=device) for c in configs]
    assert plans[0] < plans[1]
    limit = 2 * (1_000_000 + plans[1] + 400_000)

    class Gpu:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": limit, "bytes_in_use": 1_000_000}

    for config, plan in zip(configs, plans, strict=True):
        fitting = blocks_that_fit(
            tiny_arch(), config, dtype=dtype, device=Gpu(), step_bytes=lambda plan=plan: plan
        )
        block_bytes = 2 * 2 * 2 * 16 * 8 * 4
        assert fitting == min((limit // 2 - 1_000_000 - plan) // block_bytes, 1 + 64 * 16)


@pytest.mark.parametrize("in_use", [1_000_000, 1_000_000 + 3 * 4096])
def test_a_few_bytes_more_in_use_do_not_change_the_pool(in_use):
    """Its size is in every program: another would find nothing that an earlier start compiled."""

    class Gpu:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 2**28, "bytes_in_use": in_use}

    config = EngineConfig(max_num_seqs=4096, memory_fraction=0.5, max_num_batched_tokens=4096)
    fitting = blocks_that_fit(
        tiny_arch(),
        config.resolved(platform="gpu", max_positions=256),
        dtype=np.dtype(np.float32),
        device=Gpu(),
        step_bytes=lambda: 0,
    )
    exact = (2**27 - in_use) // 4096
    assert fitting == 32512
    assert 0.998 * exact <= fitting <= exact

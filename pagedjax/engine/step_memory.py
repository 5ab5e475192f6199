"""How much memory a step needs besides weights and KV pool: asked of the compiler, not guessed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pagedjax.config import EngineConfig
from pagedjax.engine.kv_pool import kv_spec
from pagedjax.engine.kv_scales import scales_for
from pagedjax.engine.programs import build, report
from pagedjax.engine.runner import Draw, ModelRunner
from pagedjax.models.arch import ArchConfig
from pagedjax.models.kv_calibration import KVCalibration
from pagedjax.models.params import param_shapes
from scheduler import MAX_PLANS_IN_FLIGHT

# From the smaller of these depths on, every layer adds the same; deeper models are not compiled.
_DEPTHS = (4, 8)


def planned_step_bytes(
    arch: ArchConfig, config: EngineConfig, *, dtype: np.dtype, device: Any
) -> int:
    """Most bytes that an engine's steps take on the device besides weights and KV pool.

    That is the temporary memory of the largest step or redraw, of which one runs at a time, the
    outputs of all steps in flight, and what penalties remember. Neither weights nor pool are
    needed: the pool is updated in place, so that its size plays no part, and a model of many
    layers is measured by the straight line through two shallow ones.

    Args:
        arch: the model.
        config: resolved options.
        dtype: of the weights.
        device: the `jax.Device` where it will run.
    """
    depths = _DEPTHS if arch.layers > max(_DEPTHS) else (arch.layers,)
    runners = [_shallow_runner(arch, config, n, dtype=dtype, device=device) for n in depths]
    buckets = runners[0].buckets
    steps = [buckets.mixed[-1], buckets.decode[-1]]
    programs = {
        (step, depth): runner.program(step)
        for step in steps
        for depth, runner in zip(depths, runners, strict=True)
    }
    redraw = Draw(max(bucket.seqs for bucket in steps), full=True, penalties=True)
    built, times = build({**programs, redraw: runners[0].program(redraw)}, store=runners[0].store)
    report("memory plan", times)
    sizes = [[built[step, depth].memory_analysis() for depth in depths] for step in steps]
    sizes.append([built[redraw].memory_analysis()] * len(depths))
    temporary = max(_at_depth(row, depths, arch.layers) for row in sizes)
    outputs = [row[-1].output_size_in_bytes - row[-1].alias_size_in_bytes for row in sizes]
    seen = math.prod(runners[-1].seen.abstract.shape) * np.dtype(np.int32).itemsize
    return temporary + seen + MAX_PLANS_IN_FLIGHT * (max(outputs[:-1]) + outputs[-1])


def _at_depth(sizes: Sequence[Any], depths: Sequence[int], layers: int) -> int:
    """Temporary bytes of a program with `layers` layers, from those with fewer."""
    first, last = sizes[0].temp_size_in_bytes, sizes[-1].temp_size_in_bytes
    slope = max(last - first, 0) / max(depths[-1] - depths[0], 1)
    return last + math.ceil(slope * (layers - depths[-1]))


def _shallow_runner(
    arch: ArchConfig, config: EngineConfig, layers: int, *, dtype: np.dtype, device: Any
) -> ModelRunner:
    """A runner that can compile the steps of a model's first layers, with a pool of two blocks."""
    assert config.max_model_len
    arch = dataclasses.replace(arch, layers=layers, windows=arch.windows[:layers])
    where = SingleDeviceSharding(device)
    params: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        for name, shape in param_shapes(arch).items()
    }
    spec = kv_spec(arch, config, num_blocks=2, dtype=dtype)
    any_scales = KVCalibration(
        key_means=np.zeros((layers, arch.kv_heads, arch.head_dim), np.float32),
        maxima=np.ones((layers, 2, arch.kv_heads), np.float32),
    )
    return ModelRunner(
        arch,
        params,
        spec,
        config,
        max_blocks_per_seq=-(-config.max_model_len // config.block_size),
        kv_scales=scales_for(any_scales, spec.dtype, with_keys=spec.key_dtype is None)
        if spec.is_compressed
        else None,
    )

"""Models of a named shape with random weights, made on the device: speed needs no checkpoint."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from pagedjax.models import ArchConfig, GenerationDefaults, RopeConfig
from pagedjax.models.arch import Llama3Scaling

if TYPE_CHECKING:
    from pagedjax.loading import LoadedModel

# JAX is imported by the functions that need it: the PyTorch baselines read the shapes without it,
# since it would take most of the GPU's memory for itself.


def _arch(layers: int, **facts) -> ArchConfig:
    return ArchConfig(layers=layers, windows=(None,) * layers, **facts)


# Facts of the public checkpoints, from Lightning-AI/litgpt litgpt/config.py.
SHAPES: dict[str, ArchConfig] = {
    "llama2-13b": _arch(
        40, family="llama", vocab=32000, embed=5120, q_heads=40, kv_heads=40, head_dim=128,
        mlp=13824, norm_eps=1e-5, rope=RopeConfig(theta=1e4), max_positions=4096,
    ),
    "llama3.1-8b": _arch(
        32, family="llama", vocab=128256, embed=4096, q_heads=32, kv_heads=8, head_dim=128,
        mlp=14336, norm_eps=1e-5, max_positions=131072,
        rope=RopeConfig(
            theta=5e5,
            scaling=Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
            ),
        ),
    ),
    "qwen3-0.6b": _arch(
        28, family="qwen3", vocab=151936, embed=1024, q_heads=16, kv_heads=8, head_dim=128,
        mlp=3072, norm_eps=1e-6, rope=RopeConfig(theta=1e6), qk_norm=True, tied=True,
        max_positions=40960,
    ),
    "smollm2-135m": _arch(
        30, family="llama", vocab=49152, embed=576, q_heads=9, kv_heads=3, head_dim=64, mlp=1536,
        norm_eps=1e-5, rope=RopeConfig(theta=1e5), tied=True, max_positions=8192,
    ),
    # For dry runs on a CPU.
    "tiny": _arch(
        2, family="qwen3", vocab=512, embed=64, q_heads=4, kv_heads=2, head_dim=16, mlp=128,
        norm_eps=1e-6, rope=RopeConfig(theta=1e4), qk_norm=True, max_positions=4096,
    ),
}  # fmt: skip


def random_model(arch: ArchConfig, dtype: str, seed: int = 0) -> LoadedModel:
    """Normal weights of standard deviation `1 / sqrt(inputs)`, norm scales of one.

    Every array is made on the default device, one after another; the host never holds one.

    Args:
        arch: what to make.
        dtype: of the parameters.
        seed: the same seed gives the same model on the same kind of device.
    """
    import jax

    from pagedjax.loading import LoadedModel
    from pagedjax.models import param_shapes

    make = jax.jit(_parameter, static_argnums=(1, 2, 3))
    params = {}
    for index, (name, shape) in enumerate(param_shapes(arch).items()):
        key = jax.random.fold_in(jax.random.key(seed), index)
        params[name] = jax.block_until_ready(make(key, _kind(name), shape, dtype))
    return LoadedModel(
        arch=arch, generation=GenerationDefaults(), params=params, tokenizer_dir=None
    )


def _kind(name: str) -> str:
    """The name without its layer, so that layers share one compiled initialiser."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def _parameter(key: Any, kind: str, shape: tuple[int, ...], dtype: str) -> Any:
    import jax
    import jax.numpy as jnp

    if kind.endswith("scale"):
        return jnp.ones(shape, dtype)
    if kind.endswith("bias"):
        return jnp.zeros(shape, dtype)
    # The output projection is [embed, q_heads, head_dim]; all others read their last axis.
    inputs = math.prod(shape[1:]) if kind.endswith("attention.out") else shape[-1]
    return jax.random.normal(key, shape, dtype) * jnp.asarray(inputs**-0.5, dtype)


def parameter_count(arch: ArchConfig) -> int:
    """Numbers in all parameters."""
    from pagedjax.models import param_shapes

    return sum(math.prod(shape) for shape in param_shapes(arch).values())


@dataclasses.dataclass(frozen=True, slots=True)
class StepBytes:
    """Least memory traffic of one decode step, in bytes.

    Attributes:
        weights: every weight once. Of an embedding table that is not the output projection too,
            a step reads a row per sequence, which is left out.
        kv: keys and values of all sequences once.
    """

    weights: int
    kv: int

    @classmethod
    def of(cls, arch: ArchConfig, itemsize: int, *, batch: int, context: int) -> StepBytes:
        """For `batch` sequences of `context` positions, numbers of `itemsize` bytes."""
        table = 0 if arch.tied else arch.vocab * arch.embed
        return cls(
            weights=(parameter_count(arch) - table) * itemsize,
            kv=batch * context * arch.kv_elements_per_token * itemsize,
        )

    @property
    def total(self) -> int:
        """Both together."""
        return self.weights + self.kv

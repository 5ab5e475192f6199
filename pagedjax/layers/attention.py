"""Attention: project, normalise, rotate, attend over whatever memory is given, project back."""

from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pagedjax.layers.linear import project
from pagedjax.layers.norms import RMSNorm
from pagedjax.layers.rope import Rotation
from pagedjax.models.arch import ArchConfig


class Memory(Protocol):
    """Where one layer's keys and values of earlier tokens are; a pytree.

    A paged pool, or nothing beyond the sequence itself: attention does not know which.
    """

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
    ) -> tuple[jax.Array, Self]:
        """Remember the new tokens' keys and values, and attend to all that may be seen.

        Args:
            q: rotated queries `[tokens, q_heads, head_dim]`.
            k: rotated keys of the same tokens, `[tokens, kv_heads, head_dim]`.
            v: their values, `[tokens, kv_heads, head_dim]`.
            window: latest positions that a query sees, itself included; None for all.

        Returns:
            `[tokens, q_heads, head_dim]`, and the memory as it is now.
        """
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class WithinSequence:
    """The memory of the plain forward: one whole sequence, attending causally to itself."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
    ) -> tuple[jax.Array, "WithinSequence"]:
        """See `Memory.attend`; nothing needs remembering."""
        reach = None if window is None else (window - 1, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=reach)
        return mixed, self


MemoryT = TypeVar("MemoryT", bound=Memory)


class Attention(nnx.Module):
    """Grouped-query self-attention (Ainslie et al., arXiv:2305.13245) with rotary positions.

    Query, key and value weights are one array `[kv_heads, group + 2, head_dim, embed]`: for each
    key/value head, the query heads that share it, then its key, then its value. One product per
    layer, and a split over `kv_heads` keeps every group whole.
    """

    def __init__(self, arch: ArchConfig, window: int | None, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        init = nnx.initializers.normal(0.02)
        heads = (arch.kv_heads, arch.group + 2, arch.head_dim)
        self.qkv = nnx.Param(
            init(rngs.params(), (*heads, arch.embed), dtype),
            axes=("kv_heads", None, "head_dim", "embed"),
        )
        self.out = nnx.Param(
            init(rngs.params(), (arch.embed, arch.q_heads, arch.head_dim), dtype),
            axes=("embed", "q_heads", "head_dim"),
        )
        if arch.qkv_bias:
            self.qkv_bias = nnx.Param(jnp.zeros(heads, dtype), axes=("kv_heads", None, "head_dim"))
        if arch.out_bias:
            self.out_bias = nnx.Param(jnp.zeros((arch.embed,), dtype), axes=("embed",))
        if arch.qk_norm:
            self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, dtype=dtype)
        self.arch = arch
        self.window = window

    def __call__(
        self, x: Float[Array, "tokens embed"], rotate: Rotation, memory: MemoryT
    ) -> tuple[Float[Array, "tokens embed"], MemoryT]:
        """Mix information between tokens; returns the output and the memory as it is now."""
        arch = self.arch
        qkv = project(x, self.qkv[...])  # [tokens, kv_heads, group + 2, head_dim]
        if arch.qkv_bias:
            qkv = qkv + self.qkv_bias[...][None]
        q = qkv[:, :, : arch.group].reshape(-1, arch.q_heads, arch.head_dim)
        k, v = qkv[:, :, arch.group], qkv[:, :, arch.group + 1]
        if arch.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed, memory = memory.attend(rotate(q), rotate(k), v, window=self.window)
        out = project(mixed, self.out[...], contract=2)
        return (out + self.out_bias[...][None] if arch.out_bias else out), memory

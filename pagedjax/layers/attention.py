"""Attention: project, normalise, rotate, attend over whatever memory is given, project back."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pagedjax.layers.linear import project
from pagedjax.layers.norms import RMSNorm
from pagedjax.layers.rope import Rotation
from pagedjax.models.arch import ArchConfig

# (queries [tokens, q_heads, head_dim], keys and values [tokens, kv_heads, head_dim] of the same
# tokens, the layer's sliding window) -> [tokens, q_heads, head_dim]. Where the keys and values of
# earlier tokens come from (a paged pool, or nowhere) is the callee's affair.
Attend = Callable[[jax.Array, jax.Array, jax.Array, int | None], jax.Array]


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
        self, x: Float[Array, "tokens embed"], rotate: Rotation, attend: Attend
    ) -> Float[Array, "tokens embed"]:
        """Mix information between tokens through `attend`."""
        arch = self.arch
        qkv = project(x, self.qkv[...])  # [tokens, kv_heads, group + 2, head_dim]
        if arch.qkv_bias:
            qkv = qkv + self.qkv_bias[...][None]
        q = qkv[:, :, : arch.group].reshape(-1, arch.q_heads, arch.head_dim)
        k, v = qkv[:, :, arch.group], qkv[:, :, arch.group + 1]
        if arch.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(rotate(q), rotate(k), v, self.window)
        out = project(mixed, self.out[...], contract=2)
        return out + self.out_bias[...][None] if arch.out_bias else out


def attend_within(q: jax.Array, k: jax.Array, v: jax.Array, window: int | None) -> jax.Array:
    """Causal attention of one whole sequence to itself: the `Attend` of the plain forward."""
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=None if window is None else (window - 1, 0)
    )

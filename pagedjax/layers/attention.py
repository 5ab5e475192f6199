"""Attention: project, attend over whatever memory is given, project back."""

from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pagedjax.layers.linear import project_in_pieces
from pagedjax.layers.norms import RMSNorm
from pagedjax.layers.rope import Rotation
from pagedjax.models.arch import ArchConfig
from pallas_kernels import rotary_heads


class Memory(Protocol):
    """Where one layer's keys and values of earlier tokens are; a pytree.

    A paged pool, or nothing beyond the sequence itself: attention does not know which.
    """

    def attend(self, heads: "Heads", *, window: int | None) -> tuple[jax.Array, Self]:
        """Remember the new tokens' keys and values, and attend to all that may be seen.

        Args:
            heads: of the new tokens.
            window: latest positions that a query sees, itself included; None for all.

        Returns:
            `[tokens, q_heads, head_dim]`, and the memory as it is now.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Queries, keys and values as they come out of a layer's product, and what is still to be done.

    A memory does that itself: one that is written to does all of it in one kernel.

    Attributes:
        qkv: for each key/value head the queries that share it, then its key, then its value; as
            `project_in_pieces` leaves them.
        rotation: angles of the tokens.
        dtype: what the heads are rounded to.
        q_norm: scales of the normalisation of queries, if there is one.
        k_norm: of keys; both or neither.
        eps: added to the mean squares.
    """

    qkv: Float[Array, "pieces tokens kv_heads group+2 head_dim"]
    rotation: Rotation
    dtype: jnp.dtype
    q_norm: Float[Array, " head_dim"] | None
    k_norm: Float[Array, " head_dim"] | None
    eps: float

    def normalisation(self) -> dict[str, Any]:
        """Arguments of `rotary_heads` and `rope_and_write_kv`."""
        return {name: getattr(self, name) for name in ("dtype", "q_norm", "k_norm", "eps")}

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalised and rotated `[tokens, q_heads, head_dim]`; `[tokens, kv_heads, head_dim]`."""
        angles = self.rotation.cos, self.rotation.sin
        return rotary_heads(self.qkv, *angles, **self.normalisation())


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class WithinSequence:
    """The memory of the plain forward: one whole sequence, attending causally to itself."""

    def attend(self, heads: Heads, *, window: int | None) -> tuple[jax.Array, "WithinSequence"]:
        """See `Memory.attend`; nothing needs remembering."""
        return attend_within(*heads.split(), window=window), self


def attend_within(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
) -> Float[Array, "tokens q_heads head_dim"]:
    """Causal attention of one whole sequence to itself; arguments as `Heads.split` gives them."""
    reach = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=reach)


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
        self, x: Float[Array, "tokens embed"], rotation: Rotation, memory: MemoryT
    ) -> tuple[Float[Array, "pieces tokens embed"], MemoryT]:
        """Mix information between tokens.

        Returns:
            What is to be added to the residual stream, as `project_in_pieces` leaves it, and the
            memory as it is now.
        """
        arch = self.arch
        heads = Heads(
            qkv=project_in_pieces(
                x, self.qkv[...], bias=self.qkv_bias[...] if arch.qkv_bias else None
            ),
            rotation=rotation,
            dtype=x.dtype,
            q_norm=self.q_norm.scale[...] if arch.qk_norm else None,
            k_norm=self.k_norm.scale[...] if arch.qk_norm else None,
            eps=arch.norm_eps,
        )
        mixed, memory = memory.attend(heads, window=self.window)
        bias = self.out_bias[...] if arch.out_bias else None
        return project_in_pieces(mixed, self.out[...], contract=2, bias=bias), memory

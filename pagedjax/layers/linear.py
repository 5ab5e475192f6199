"""The matrix products of the model, and the one place that says how they are computed."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# From so many tokens on a product is bound by arithmetic: it is not divided, and left to the
# device's library, see `pagedjax.engine.compiler_options`.
MANY_TOKENS = 192

# What a GPU's kernel computes of a product at once, and how many of these keep an H200 busy, about
# one for each of its multiprocessors. The product of a single vector is made of sums instead, and
# wants more of them.
_TILE_OUTPUTS = 64
_FILLING_TILES = 128
_FILLING_TILES_OF_ONE = 512
_SHORTEST_PIECE = 256  # of the inner dimension; a shorter one is over before its loads are steady
_PIECE_MULTIPLE = 32  # whole cache lines


def product_dtype(tokens: int, dtype: jnp.dtype) -> jnp.dtype:
    """What a product of activations of this dtype is returned in.

    With few tokens it is float32: so a divided inner dimension is summed up without rounding its
    parts, a library does not need a kernel of its own to round the sum, and the bytes do not count.
    With many tokens they do, and the inner dimension is never divided.
    """
    return jnp.dtype(jnp.float32) if tokens < MANY_TOKENS else jnp.dtype(dtype)


def num_pieces(tokens: int, outputs: int, inner: int) -> int:
    """Into how many pieces the inner dimension of a product is divided, a power of two.

    On a GPU a product of few tokens has fewer tiles of results than would fill the device, and its
    time is that of reading the weight: so each tile is computed in pieces, by the fewest programs
    that fill it. One piece from `MANY_TOKENS` on, and elsewhere.
    """
    if jax.default_backend() != "gpu" or tokens >= MANY_TOKENS:
        return 1
    wanted = _FILLING_TILES_OF_ONE if tokens == 1 else _FILLING_TILES
    pieces = 1
    while (
        math.ceil(outputs / _TILE_OUTPUTS) * pieces < wanted
        and inner % (2 * pieces * _PIECE_MULTIPLE) == 0
        and inner // (2 * pieces) >= _SHORTEST_PIECE
    ):
        pieces *= 2
    return pieces


def project(
    x: Float[Array, "tokens ..."],
    weight: Float[Array, "..."],
    *,
    contract: int = 1,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "tokens ..."]:
    """Multiply each token's vector by a weight stored as `[out..., in...]`.

    Checkpoints keep the inner dimension last, so both operands are contiguous along it and
    conversion never transposes. Accumulation is float32; float32 operands are multiplied
    in full float32 on every device (an NVIDIA GPU would otherwise round them to TF32).

    The result is rounded to `product_dtype`, which is wider for few tokens: whoever takes it next
    computes in float32 and rounds what comes of it.

    Args:
        x: activations; the last `contract` axes are summed over.
        weight: its last `contract` axes match those of `x`.
        contract: number of axes to sum over.
        out_dtype: dtype of the result; `product_dtype` if None.

    Returns:
        `[tokens, out...]`.
    """
    out_dtype = out_dtype or product_dtype(x.shape[0], x.dtype)
    return multiply(x, weight, contract=contract, pieces=1, out_dtype=out_dtype)[0]


def project_in_pieces(
    x: Float[Array, "tokens ..."],
    weight: Float[Array, "..."],
    *,
    contract: int = 1,
    bias: Float[Array, "..."] | None = None,
) -> Float[Array, "pieces tokens ..."]:
    """`project`, as the pieces of a sum: for a kernel that can add them up while it reads them.

    Where XLA divides the inner dimension of a product by itself, it has a kernel add up the pieces.

    Args:
        x: see `project`.
        weight: likewise.
        contract: likewise.
        bias: `[out...]`, to be added: an equal share, which is exact, to each piece.

    Returns:
        `[num_pieces(...), tokens, out...]` in `product_dtype`.
    """
    pieces = num_pieces(x.shape[0], *_sizes(weight, contract))
    out_dtype = product_dtype(x.shape[0], x.dtype)
    out = multiply(x, weight, contract=contract, pieces=pieces, out_dtype=out_dtype)
    if bias is None:
        return out
    return out + (bias.astype(jnp.float32) / pieces).astype(out.dtype)[None, None]


def multiply(
    x: jax.Array, weight: jax.Array, *, contract: int, pieces: int, out_dtype: jnp.dtype
) -> jax.Array:
    """The pieces of `project`, `[pieces, tokens, out...]`; they must divide the inner dimension."""
    outer, inner = _sizes(weight, contract)
    outputs = weight.shape[: weight.ndim - contract]
    # As plain matrices: XLA copies a weight with several outer or inner axes on every call. A GPU
    # reads one with the pieces as a batch axis in the middle in place, a CPU copies even that.
    x, weight, middle = x.reshape(x.shape[0], inner), weight.reshape(outer, inner), ()
    if pieces > 1:
        x, weight = (a.reshape(a.shape[0], pieces, inner // pieces) for a in (x, weight))
        middle = (1,)
    last = (x.ndim - 1,)
    out = jax.lax.dot_general(
        x,
        weight,
        dimension_numbers=((last, last), (middle, middle)),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )
    return out.reshape(pieces, x.shape[0], *outputs)


def _sizes(weight: jax.Array, contract: int) -> tuple[int, int]:
    """Of the outer and of the inner dimensions together."""
    split = weight.ndim - contract
    return math.prod(weight.shape[:split]), math.prod(weight.shape[split:])

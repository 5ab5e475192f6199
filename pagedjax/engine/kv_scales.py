"""Scales of a compressed KV pool, from the largest keys and values that a model makes.

A pool of fp8 or int8 stores `k / scale` and `v / scale`, with one scale per layer, for keys and
for values, and per key/value head. The scales come from a calibration: token sequences go through
the plain forward, and the largest magnitude of each head maps to the largest number of the dtype.
What exceeds it later is clamped (`pallas_kernels.quantize_kv`), so it is never NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.layers.attention import WithinSequence
from pagedjax.models.arch import ArchConfig
from pagedjax.models.params import Params, decoder_from_params
from pagedjax.tokenizer import Tokenizer

# Longer sequences are calibrated in pieces: memory is quadratic in the length, and a rotation by
# a larger position changes no key's norm.
PIECE_TOKENS = 512

# Room above the calibrated maximum. A float has as many digits at half its range, so a factor of
# 2 costs fp8 nothing; an integer would lose a bit.
_HEADROOM = {jnp.dtype(jnp.float8_e4m3fn): 2.0, jnp.dtype(jnp.int8): 1.0}

# Calibrates engines whose caller brings no text: prose, dialogue, code, data and other scripts.
DEFAULT_TEXT = """\
The harbour was quiet when the first boats came in. Nobody on the quay spoke; they counted the
masts, and one was missing. Later that year the council voted 14 to 3 to extend the sea wall.

Q: Why does ice float on water?
A: Because freezing water expands: its molecules settle into an open lattice, 9 % less dense.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError('empty')
    return sum(values) / len(values)

for (int i = 0; i < n; ++i) { total += a[i] * b[i]; }

{"id": 1047, "name": "valve", "price": 12.50, "tags": ["steel", "3/4 inch"], "stock": null}
| city | people |
|------|--------|
| Lima | 10,092,000 |
$\\frac{a}{b} = 2$, so $a = 2b$.

Le train part à huit heures. Der Zug fährt um acht Uhr ab. El tren sale a las ocho.
Поезд отправляется в восемь. 列车八点出发。 電車は八時に出ます。 \N{STEAM LOCOMOTIVE}
"""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["num_tokens", "maxima"], meta_fields=[]
)
@dataclass(frozen=True, slots=True)
class ObservedSequence:
    """The plain forward's memory, which also keeps the largest magnitudes that it has seen.

    Attributes:
        num_tokens: how many of the rows are real; the others are padding at the end.
        maxima: of keys at 0 and of values at 1, per head.
    """

    num_tokens: Int[Array, ""]
    maxima: Float[Array, "2 kv_heads"]

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, *, window: int | None
    ) -> tuple[jax.Array, ObservedSequence]:
        """See `Memory.attend`."""
        mixed, _ = WithinSequence().attend(q, k, v, window=window)
        sizes = jnp.abs(jnp.stack([k, v])).astype(jnp.float32)  # [2, tokens, kv_heads, head_dim]
        sizes = jnp.where(jnp.isfinite(sizes), sizes, jnp.inf)  # a reduction may overlook a NaN
        real = jnp.arange(k.shape[0]) < self.num_tokens
        maxima = jnp.max(jnp.where(real[None, :, None, None], sizes, 0.0), axis=(1, 3))
        return mixed, ObservedSequence(self.num_tokens, jnp.maximum(self.maxima, maxima))


def kv_maxima(arch: ArchConfig, params: Params, sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """The largest magnitudes of keys (rotated, as they are cached) and of values.

    Args:
        arch: the model.
        params: its parameters.
        sequences: token ids to run through the plain forward, in pieces of `PIECE_TOKENS`.

    Returns:
        float32 `[layers, 2, kv_heads]`, keys at 0 and values at 1 of axis 1.

    Raises:
        ValueError: there is no token at all, or a magnitude is not finite.
    """
    maxima = jnp.zeros((arch.layers, 2, arch.kv_heads), jnp.float32)
    observe = jax.jit(functools.partial(_observe, arch))
    pieces = list(_pieces(sequences))
    if not pieces:
        raise ValueError(f"calibration needs at least one token, got {len(sequences)} empty texts")
    for tokens, count in pieces:
        maxima = observe(params, tokens, count, maxima)
    found = np.asarray(maxima)
    if not np.isfinite(found).all():
        where = np.argwhere(~np.isfinite(found))[0].tolist()
        raise ValueError(f"keys or values are not finite at [layer, key or value, head] {where}")
    return found


def scales_for(maxima: np.ndarray, dtype: np.dtype) -> list[np.ndarray]:
    """Scales with which `maxima` fit into `dtype`.

    Args:
        maxima: as from `kv_maxima`.
        dtype: float8_e4m3fn or int8.

    Returns:
        float32 `[2, kv_heads]` for each layer, all positive.
    """
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = maxima.astype(np.float32) * np.float32(_HEADROOM[jnp.dtype(dtype)] / largest)
    # A head that has shown nothing but zeros is stored as it is.
    return list(np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1.0)))


def default_sequences(vocab: int, tokenizer: Tokenizer | None) -> list[list[int]]:
    """What calibrates an engine whose caller brings no text: fixed, so that starts repeat.

    The same text for every model that has a tokenizer; else random token ids.

    Args:
        vocab: of the model.
        tokenizer: of the checkpoint, if it brings one.
    """
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, vocab, (1, PIECE_TOKENS)).tolist()
    return [tokenizer.encode(DEFAULT_TEXT)]


def _pieces(sequences: Sequence[Sequence[int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Padded pieces and their true lengths, int32."""
    for sequence in sequences:
        tokens = np.asarray(sequence, np.int32)
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            padded = np.pad(piece, (0, PIECE_TOKENS - len(piece)))
            yield padded, np.asarray(len(piece), np.int32)


def _observe(
    arch: ArchConfig, params: Params, tokens: jax.Array, count: jax.Array, maxima: jax.Array
) -> jax.Array:
    """`maxima` after one more piece."""
    memories = [ObservedSequence(count, maxima[layer]) for layer in range(arch.layers)]
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    _, memories = decoder_from_params(arch, params).hidden(tokens, positions, memories)
    return jnp.stack([memory.maxima for memory in memories])

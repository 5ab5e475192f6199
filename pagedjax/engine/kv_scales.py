"""Scales of a compressed KV pool, from the keys and values that a model makes.

A pool of fp8 or int8 stores `(k - mean) / scale` and `v / scale`, with one scale per layer, for
keys and for values, and per key/value head, and a mean key per layer and head. What all keys of a
head have in common adds the same number to all scores of a query, which the softmax does not see;
without it the rest rounds better (Zhang et al., arXiv:2410.02367). Means and scales come from a
calibration: token sequences go through the plain forward, and the largest magnitude of each head
maps to the largest number of the dtype. What exceeds it later is clamped
(`pallas_kernels.quantize_kv`), so it is never NaN. Where only values are compressed, keys are
stored as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.layers.attention import Heads, attend_within
from pagedjax.models.arch import ArchConfig
from pagedjax.models.kv_calibration import KVCalibration
from pagedjax.models.params import Params, decoder_from_params
from pagedjax.tokenizer import Tokenizer

# Longer sequences are calibrated in pieces, since memory is quadratic in the length.
PIECE_TOKENS = 512

# Where in the context each piece is put, in turn: the rotation takes part of a mean away at once,
# another part only far on, and the mean must suit all positions.
_PLACES = (0.0, 1 / 64, 1 / 8, 1 / 2)

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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class KVScales:
    """How one layer's keys and values are stored.

    Attributes:
        key_mean: subtracted from every key, float32; None for keys that are not compressed.
        scales: what keys less their mean (0) and values (1) are divided by, float32; 1 for keys
            that are not compressed.
    """

    key_mean: Float[Array, "kv_heads head_dim"] | None
    scales: Float[Array, "2 kv_heads"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["num_tokens", "key_mean", "key_sum", "maxima"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSequence:
    """The plain forward's memory, which also keeps statistics of what it has seen.

    Attributes:
        num_tokens: how many of the rows are real; the others are padding at the end.
        key_mean: subtracted from keys before their magnitudes are taken.
        key_sum: of the keys at all positions but the first, where attention parks what it has no
            use for and keys are unlike all others.
        maxima: largest magnitudes of keys at 0 and of values at 1, per head.
    """

    num_tokens: Int[Array, ""]
    key_mean: Float[Array, "kv_heads head_dim"]
    key_sum: Float[Array, "kv_heads head_dim"]
    maxima: Float[Array, "2 kv_heads"]

    def attend(self, heads: Heads, *, window: int | None) -> tuple[jax.Array, ObservedSequence]:
        """See `Memory.attend`."""
        q, k, v = heads.split()
        mixed = attend_within(q, k, v, window=window)
        keys, values = k.astype(jnp.float32), v.astype(jnp.float32)
        row = jnp.arange(k.shape[0])[:, None, None]
        real = row < self.num_tokens
        sizes = jnp.abs(jnp.stack([keys - self.key_mean[None], values]))
        sizes = jnp.where(jnp.isfinite(sizes), sizes, jnp.inf)  # a reduction may overlook a NaN
        maxima = jnp.max(jnp.where(real[None], sizes, 0.0), axis=(1, 3))
        seen = ObservedSequence(
            num_tokens=self.num_tokens,
            key_mean=self.key_mean,
            key_sum=self.key_sum + jnp.sum(jnp.where(real & (row > 0), keys, 0.0), axis=0),
            maxima=jnp.maximum(self.maxima, maxima),
        )
        return mixed, seen


def calibrate(
    arch: ArchConfig, params: Params, sequences: Sequence[Sequence[int]], *, max_len: int
) -> KVCalibration:
    """Means of keys and ranges of keys and values over some tokens.

    Args:
        arch: the model.
        params: its parameters.
        sequences: token ids to run through the plain forward, in pieces of `PIECE_TOKENS`.
        max_len: length of the contexts that will be served, in tokens.

    Raises:
        ValueError: there is no token at all, or a number is not finite.
    """
    pieces = list(_pieces(sequences, max_len))
    if not pieces:
        raise ValueError(f"calibration needs at least one token, got {len(sequences)} empty texts")
    observe = jax.jit(functools.partial(_observe, arch))
    key_means = np.zeros((arch.layers, arch.kv_heads, arch.head_dim), np.float32)
    # The ranges are those of what is left without the means, so that these come first.
    key_sums, _ = _observe_all(observe, params, pieces, key_means)
    inner = sum(int(count) - 1 for _, count, _ in pieces)
    key_means = key_sums / np.float32(max(inner, 1))
    _, maxima = _observe_all(observe, params, pieces, key_means)
    if not np.isfinite(maxima).all():
        where = np.argwhere(~np.isfinite(maxima))[0].tolist()
        raise ValueError(f"keys or values are not finite at [layer, key or value, head] {where}")
    return KVCalibration(key_means=key_means, maxima=maxima)


def scales_for(
    calibration: KVCalibration, dtype: np.dtype, *, with_keys: bool = True
) -> list[KVScales]:
    """How each layer's keys and values fit into a dtype.

    Args:
        calibration: what they are like.
        dtype: float8_e4m3fn or int8.
        with_keys: whether keys are compressed, too.
    """
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    factor = np.float32(_HEADROOM[jnp.dtype(dtype)] / largest)
    scales = calibration.maxima * factor
    # A head that has shown nothing but zeros is stored as it is.
    scales = np.where(scales > np.finfo(np.float32).tiny, scales, np.float32(1.0))
    if not with_keys:
        scales[:, 0] = 1.0
    return [
        KVScales(key_mean=jnp.asarray(mean) if with_keys else None, scales=jnp.asarray(layer))
        for mean, layer in zip(calibration.key_means, scales, strict=True)
    ]


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


def _pieces(
    sequences: Sequence[Sequence[int]], max_len: int
) -> Iterator[tuple[np.ndarray, np.int32, np.int32]]:
    """Padded pieces, their true lengths and the positions of their first tokens, int32."""
    for sequence in sequences:
        tokens = np.asarray(sequence, np.int32)
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            padded = np.pad(piece, (0, PIECE_TOKENS - len(piece)))
            for place in _PLACES:
                yield padded, np.int32(len(piece)), np.int32(place * max_len)


def _observe_all(
    observe: Callable[..., tuple[jax.Array, jax.Array]],
    params: Params,
    pieces: Sequence[tuple[np.ndarray, np.int32, np.int32]],
    key_means: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of keys `[layers, kv_heads, head_dim]` and maxima `[layers, 2, kv_heads]`."""
    layers, kv_heads, _ = key_means.shape
    sums = jnp.zeros_like(key_means)
    maxima = jnp.zeros((layers, 2, kv_heads), jnp.float32)
    for tokens, count, start in pieces:
        sums, maxima = observe(params, tokens, count, start, key_means, sums, maxima)
    return np.asarray(sums), np.asarray(maxima)


def _observe(
    arch: ArchConfig,
    params: Params,
    tokens: jax.Array,
    count: jax.Array,
    start: jax.Array,
    key_means: jax.Array,
    sums: jax.Array,
    maxima: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`sums` and `maxima` after one more piece."""
    memories = [
        ObservedSequence(num_tokens=count, key_mean=mean, key_sum=total, maxima=largest)
        for mean, total, largest in zip(key_means, sums, maxima, strict=True)
    ]
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    _, memories = decoder_from_params(arch, params).hidden(tokens, positions, memories)
    return jnp.stack([m.key_sum for m in memories]), jnp.stack([m.maxima for m in memories])

"""What one step reads from the host, as one packed vector.

A step takes a dozen small arrays. Sent one by one each would cost a transfer; packed into one
int32 vector (floats by their bits) they cost one. `StepLayout` is the single description of that
vector: the host writes through its numpy views, the compiled step reads through its slices.

The vector travels with all its bits flipped, so that the step has to compute its inputs instead
of handing slices of the argument to its kernels. The argument has another address at each launch,
and every node of a captured CUDA graph that reads it has to be updated then: now that is one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.engine.buckets import Bucket

# Ids that a request may ban at once while it is below min_tokens: its end-of-text and stop ids.
MAX_BANNED_IDS = 16

# Each field of the vector begins at a multiple of this many numbers. XLA hands a kernel its slice
# without a copy, and Mosaic GPU kernels take no address that is not a multiple of 256 bytes.
ALIGNMENT = 256 // 4

# Values of `SamplingArrays.target` that are no token.
DRAWN = -1
UNREPORTED = -2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArrays:
    """How each sampled row is to be drawn; a padding row is greedy.

    Attributes:
        temperature: 0 is greedy.
        top_k: candidates kept; 0 keeps all.
        top_p: nucleus mass; 1 keeps all.
        min_p: floor relative to the likeliest token; 0 keeps all.
        seed: of the request, as uint32 bits.
        sample_index: which of the request's `n` samples this is.
        position: of the token being drawn, in its sequence.
        target: token whose log-probability is reported; `DRAWN` is the one that is drawn, and
            `UNREPORTED` is none.
        banned_ids: ids that must not be drawn; `vocab` or more is no id.
    """

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: Int[Array, " rows"]
    sample_index: Int[Array, " rows"]
    position: Int[Array, " rows"]
    target: Int[Array, " rows"]
    banned_ids: Int[Array, "rows banned"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step over `tokens` rows of `seqs` sequences, padded to a bucket.

    Attributes:
        token_ids: what each row reads, unless it is fed.
        feed_rows: sampled row of the previous step that supplies the token instead; -1 for none.
        positions: of each token in its sequence.
        slot_mapping: where each token's key and value go; padding goes to slot 0 of block 0.
        block_tables: physical blocks of each sequence, padded with the null block.
        seq_lens: positions in the cache after this step, per sequence; 0 for padding.
        query_start: sequence `s` owns token rows `query_start[s] : query_start[s + 1]`.
        sample_rows: token row of each sampled row.
        sampling: how to draw them.
    """

    token_ids: Int[Array, " tokens"]
    feed_rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    slot_mapping: Int[Array, " tokens"]
    block_tables: Int[Array, "seqs max_blocks"]
    seq_lens: Int[Array, " seqs"]
    query_start: Int[Array, " seqs+1"]
    sample_rows: Int[Array, " seqs"]
    sampling: SamplingArrays


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where each array of a bucket's step lies in the packed vector."""

    bucket: Bucket
    max_blocks: int

    def _places(self) -> Iterator[tuple[str, slice, tuple[int, ...], bool]]:
        """Name, place in the vector, shape and whether it is float32, in packed order."""
        at = 0
        for name, shape, is_float in self._fields():
            length = math.prod(shape)
            yield name, slice(at, at + length), shape, is_float
            at += -(-length // ALIGNMENT) * ALIGNMENT

    def _fields(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        t, s = self.bucket.tokens, self.bucket.seqs
        for name in ("token_ids", "feed_rows", "positions", "slot_mapping"):
            yield name, (t,), False
        yield "block_tables", (s, self.max_blocks), False
        yield "seq_lens", (s,), False
        yield "query_start", (s + 1,), False
        yield "sample_rows", (s,), False
        for name in ("temperature", "top_p", "min_p"):
            yield name, (s,), True
        for name in ("top_k", "seed", "sample_index", "position", "target"):
            yield name, (s,), False
        yield "banned_ids", (s, MAX_BANNED_IDS), False

    @property
    def size(self) -> int:
        """Length of the vector."""
        *_, (_, last, _, _) = self._places()
        return last.stop

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views into the host's vector, by field name; `sealed` before it travels."""
        views = {}
        for name, place, shape, is_float in self._places():
            part = packed[place]
            views[name] = (part.view(np.float32) if is_float else part).reshape(shape)
        return views

    @staticmethod
    def sealed(packed: np.ndarray) -> np.ndarray:
        """Flip all bits of the host's vector, in place."""
        return np.invert(packed, out=packed)

    def unpack(self, packed: Int[Array, " size"]) -> StepInputs:
        """The same fields inside the compiled step, from a sealed vector."""
        packed = ~packed
        arrays = {}
        for name, place, shape, is_float in self._places():
            part = packed[place].reshape(shape)
            if is_float:
                part = jax.lax.bitcast_convert_type(part, jnp.float32)
            arrays[name] = part
        sampling = {name: arrays.pop(name) for name in SamplingArrays.__dataclass_fields__}
        return StepInputs(**arrays, sampling=SamplingArrays(**sampling))

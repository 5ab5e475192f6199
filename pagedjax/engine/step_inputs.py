"""What a step and the draw after it read from the host, each as one packed vector.

A step takes a dozen small arrays. Sent one by one each would cost a transfer; packed into one
int32 vector (floats by their bits) they cost one. A `PackedLayout` is the single description of
such a vector: the host writes through its numpy views, the compiled code reads through its slices.

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
    """

    token_ids: Int[Array, " tokens"]
    feed_rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    slot_mapping: Int[Array, " tokens"]
    block_tables: Int[Array, "seqs max_blocks"]
    seq_lens: Int[Array, " seqs"]
    query_start: Int[Array, " seqs+1"]
    sample_rows: Int[Array, " seqs"]


class PackedLayout:
    """Where each array lies in a packed vector; subclasses name the arrays."""

    __slots__ = ()

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], type]]:
        """Name, shape and dtype (`np.int32` or `np.float32`), in packed order."""
        raise NotImplementedError

    def _places(self) -> Iterator[tuple[str, slice, tuple[int, ...], type]]:
        at = 0
        for name, shape, dtype in self.fields():
            length = math.prod(shape)
            yield name, slice(at, at + length), shape, dtype
            at += -(-length // ALIGNMENT) * ALIGNMENT

    @property
    def size(self) -> int:
        """Length of the vector."""
        *_, (_, last, _, _) = self._places()
        return last.stop

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views into the host's vector, by field name; `sealed` before it travels."""
        return {
            name: packed[place].view(dtype).reshape(shape)
            for name, place, shape, dtype in self._places()
        }

    @staticmethod
    def sealed(packed: np.ndarray) -> np.ndarray:
        """Flip all bits of the host's vector, in place."""
        return np.invert(packed, out=packed)

    def arrays(self, packed: Int[Array, " size"]) -> dict[str, jax.Array]:
        """The fields inside compiled code, from a sealed vector."""
        packed = ~packed
        arrays = {}
        for name, place, shape, dtype in self._places():
            part = packed[place].reshape(shape)
            if dtype is np.float32:
                part = jax.lax.bitcast_convert_type(part, jnp.float32)
            arrays[name] = part
        return arrays


@dataclass(frozen=True, slots=True)
class StepLayout(PackedLayout):
    """The packed `StepInputs` of a bucket."""

    bucket: Bucket
    max_blocks: int

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], type]]:
        """See `PackedLayout.fields`."""
        t, s = self.bucket.tokens, self.bucket.seqs
        for name in ("token_ids", "feed_rows", "positions", "slot_mapping"):
            yield name, (t,), np.int32
        yield "block_tables", (s, self.max_blocks), np.int32
        yield "seq_lens", (s,), np.int32
        yield "query_start", (s + 1,), np.int32
        yield "sample_rows", (s,), np.int32

    def unpack(self, packed: Int[Array, " size"]) -> StepInputs:
        """The step's inputs inside the compiled step."""
        return StepInputs(**self.arrays(packed))


@dataclass(frozen=True, slots=True)
class SamplingLayout(PackedLayout):
    """The packed `SamplingArrays` of so many rows."""

    rows: int

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], type]]:
        """See `PackedLayout.fields`."""
        for name in ("temperature", "top_p", "min_p"):
            yield name, (self.rows,), np.float32
        for name in ("top_k", "seed", "sample_index", "position", "target"):
            yield name, (self.rows,), np.int32
        yield "banned_ids", (self.rows, MAX_BANNED_IDS), np.int32

    def unpack(self, packed: Int[Array, " size"]) -> SamplingArrays:
        """The parameters inside the compiled draw."""
        return SamplingArrays(**self.arrays(packed))

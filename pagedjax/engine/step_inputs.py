"""What a step and the draw after it read from the host, each as one packed vector.

A step takes a dozen small arrays. Sent one by one each would cost a transfer; packed into one
int32 vector (floats by their bits) they cost one. A `PackedLayout` is the single description of
such a vector: the host writes through its numpy views, the compiled code reads through its slices.

The vector travels with all its bits flipped, so that the step has to compute its inputs instead
of handing slices of the argument to its kernels. The argument has another address at each launch,
and every node of a captured CUDA graph that reads it has to be updated then: now that is one.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.engine.block_tables import edit_tables
from pagedjax.engine.buckets import Bucket

# Ids that a request may ban at once while it is below min_tokens: its end-of-text and stop ids.
MAX_BANNED_IDS = 16

# Each field of the vector begins at a multiple of this many numbers. XLA hands a kernel its slice
# without a copy, and Mosaic GPU kernels take no address that is not a multiple of 256 bytes.
ALIGNMENT = 256 // 4

# Fields of `SamplingParams` that `PenaltyArrays` has too.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")

# Values of `SamplingArrays.target` that are no token.
DRAWN = -1
UNREPORTED = -2


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyArrays:
    """How each sampled row's sequence is kept from repeating itself.

    Attributes:
        repetition_penalty: for tokens of prompt and output; 1 is none.
        presence_penalty: for tokens of the output; 0 is none.
        frequency_penalty: likewise, for each time.
        seen_row: the sequence's row of `pagedjax.engine.penalties`; one that is not there for rows
            without penalties.
    """

    repetition_penalty: Float[Array, " rows"]
    presence_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    seen_row: Int[Array, " rows"]


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
        penalties: None if no row has any.
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
    penalties: PenaltyArrays | None = None


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

    @property
    def size(self) -> int:
        """Length of the vector."""
        return _places(self)[-1][1].stop

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views into the host's vector, by field name; `sealed` before it travels."""
        return {
            name: packed[place].view(dtype).reshape(shape)
            for name, place, shape, dtype in _places(self)
        }

    @staticmethod
    def sealed(packed: np.ndarray) -> np.ndarray:
        """Flip all bits of the host's vector, in place."""
        return np.invert(packed, out=packed)

    def arrays(self, packed: Int[Array, " size"]) -> dict[str, jax.Array]:
        """The fields inside compiled code, from a sealed vector."""
        packed = ~packed
        arrays = {}
        for name, place, shape, dtype in _places(self):
            part = packed[place].reshape(shape)
            if dtype is np.float32:
                part = jax.lax.bitcast_convert_type(part, jnp.float32)
            arrays[name] = part
        return arrays


@functools.cache  # worked out once for each of the few layouts, not in every step
def _places(layout: PackedLayout) -> tuple[tuple[str, slice, tuple[int, ...], type], ...]:
    """Name, place, shape and dtype of each field."""
    places: list[tuple[str, slice, tuple[int, ...], type]] = []
    at = 0
    for name, shape, dtype in layout.fields():
        length = math.prod(shape)
        places.append((name, slice(at, at + length), shape, dtype))
        at += -(-length // ALIGNMENT) * ALIGNMENT
    return tuple(places)


@dataclass(frozen=True, slots=True)
class StepLayout(PackedLayout):
    """What `StepInputs` of a bucket are made of: token ids, and a few numbers per sequence.

    Of the block tables come the changes, of a sequence's tokens the first position: the rest is
    worked out on the device. Beside saving the host's time, it keeps the vector below the 64 KiB
    that the driver takes from ordinary memory at once; for more than that the host would wait until
    the device has come to the copy, and no step would be launched ahead.

    Attributes:
        bucket: sizes of the step.
        block_size: tokens per block.
    """

    bucket: Bucket
    block_size: int

    @property
    def max_edits(self) -> int:
        """Changes of the block tables that a step has room for: one per sequence."""
        return self.bucket.seqs

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], type]]:
        """See `PackedLayout.fields`."""
        t, s = self.bucket.tokens, self.bucket.seqs
        yield "token_ids", (t,), np.int32
        yield "table_edits", (self.max_edits, 3), np.int32
        yield "query_start", (s + 1,), np.int32
        for name in ("table_rows", "starts", "feed_rows", "sample_rows"):
            yield name, (s,), np.int32

    def unpack(
        self, packed: Int[Array, " size"], tables: Int[Array, "max_seqs max_blocks"]
    ) -> tuple[StepInputs, Int[Array, "max_seqs max_blocks"]]:
        """The step's inputs inside the compiled step, and the block tables as they are now."""
        packed_as = self.arrays(packed)
        tables = edit_tables(tables, packed_as["table_edits"])
        block_tables = tables[packed_as["table_rows"]]
        starts, query_start = packed_as["starts"], packed_as["query_start"]
        counts = query_start[1:] - query_start[:-1]
        token = jnp.arange(self.bucket.tokens, dtype=jnp.int32)
        owner = token
        if not self.bucket.decode:
            ended = query_start[None, 1:] <= token[:, None]  # sequences that come before the token
            owner = jnp.minimum(ended.sum(axis=1, dtype=jnp.int32), self.bucket.seqs - 1)
        is_real = token < query_start[-1]
        positions = jnp.where(is_real, starts[owner] + token - query_start[owner], 0)
        blocks = block_tables[owner, positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        # The last token of a sequence is the one that may be fed; padding has none.
        last = jnp.where(counts > 0, query_start[1:] - 1, self.bucket.tokens)
        no_feed = jnp.full((self.bucket.tokens,), -1, jnp.int32)
        inputs = StepInputs(
            token_ids=packed_as["token_ids"],
            feed_rows=no_feed.at[last].set(packed_as["feed_rows"], mode="drop"),
            positions=positions,
            slot_mapping=jnp.where(is_real, slots, 0),
            block_tables=block_tables,
            seq_lens=jnp.where(counts > 0, starts + counts, 0),
            query_start=query_start,
            sample_rows=packed_as["sample_rows"],
        )
        return inputs, tables


@dataclass(frozen=True, slots=True)
class SamplingLayout(PackedLayout):
    """The packed `SamplingArrays` of so many rows, with penalties or without."""

    rows: int
    penalties: bool = False

    def fields(self) -> Iterator[tuple[str, tuple[int, ...], type]]:
        """See `PackedLayout.fields`."""
        for name in ("temperature", "top_p", "min_p"):
            yield name, (self.rows,), np.float32
        for name in ("top_k", "seed", "sample_index", "position", "target"):
            yield name, (self.rows,), np.int32
        yield "banned_ids", (self.rows, MAX_BANNED_IDS), np.int32
        if self.penalties:
            for name in PENALTIES:
                yield name, (self.rows,), np.float32
            yield "seen_row", (self.rows,), np.int32

    def unpack(self, packed: Int[Array, " size"]) -> SamplingArrays:
        """The parameters inside the compiled draw."""
        arrays = self.arrays(packed)
        penalties = None
        if self.penalties:
            names = (*PENALTIES, "seen_row")
            penalties = PenaltyArrays(**{name: arrays.pop(name) for name in names})
        return SamplingArrays(**arrays, penalties=penalties)

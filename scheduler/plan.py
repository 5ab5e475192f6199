"""What a step computes, as the scheduler hands it to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


class ScheduledSeq(NamedTuple):
    """One sequence's share of a step: compute its tokens at positions `start ..`.

    Attributes:
        seq_id: identity of the sequence, never used twice.
        request_id: the caller's name, which may be used again after the end.
        start: tokens already in the cache; also the position of the first token to compute.
        num_tokens: tokens to compute.
        num_samples: the last `num_samples` of them get a sample row. 0: chunk of a prompt;
            1: decode or last chunk; more: a request for prompt logprobs.
        feed_row: sample row of the *previous* plan that holds the last token to compute, which
            the host does not know yet; -1 when all tokens are known.
        sample_row: sample row of this plan whose token continues the sequence; -1 when there is
            none, so that the tokens of all its sample rows are ignored.
    """

    seq_id: int
    request_id: str
    start: int
    num_tokens: int
    num_samples: int
    feed_row: int
    sample_row: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What one step computes.

    Decode rows come first: the sequences with exactly one token and one sample row. Tokens and
    sample rows are laid out sequence after sequence. What a plan says of its sequences it keeps in
    columns, which are quick to make and to use; `seqs` puts them together again.

    Attributes:
        seq_ids: `ScheduledSeq.seq_id` of the sequences of the step. Not to be changed: it is the
            very list of the plan before if that has the same sequences in the same order, so that
            whoever looks something up for them can tell that it is still right.
        request_ids: `ScheduledSeq.request_id`; likewise.
        token_ids: int32[num_tokens], 0 in the place of a token that is fed on the device.
        block_tables: int32[num_seqs, max_blocks_per_seq], padded with the null block 0; a copy
            that nothing changes later. May already name blocks behind the tokens of this step.
        copies: int32[num_copies, 2], (source, destination) blocks to copy before anything of the
            step is written, all sources read before any destination is written. No block is a
            destination twice. See `BlockManager.fork`.
        starts: int32[num_seqs], `ScheduledSeq.start`.
        counts: int32[num_seqs], `ScheduledSeq.num_tokens`.
        sample_counts: int32[num_seqs], `ScheduledSeq.num_samples`.
        feed_rows: int32[num_seqs], `ScheduledSeq.feed_row`.
        drawn_rows: int32[num_seqs], `ScheduledSeq.sample_row`.
        num_tokens: tokens of the step.
        num_samples: sample rows of the step.
        num_decodes: leading sequences that are decode rows.
        preempted: ids of the sequences that lost their blocks while this plan was made.
    """

    seq_ids: list[int]
    request_ids: list[str]
    token_ids: Int32
    block_tables: Int32
    copies: Int32
    starts: Int32
    counts: Int32
    sample_counts: Int32
    feed_rows: Int32
    drawn_rows: Int32
    num_tokens: int
    num_samples: int
    num_decodes: int
    preempted: tuple[int, ...]

    @property
    def num_seqs(self) -> int:
        """Sequences of the step."""
        return len(self.seq_ids)

    @property
    def seqs(self) -> list[ScheduledSeq]:
        """The sequences of the step, each with its share; put together at every call."""
        columns = (self.starts, self.counts, self.sample_counts, self.feed_rows, self.drawn_rows)
        shares = zip(*(column.tolist() for column in columns), strict=True)
        names = zip(self.seq_ids, self.request_ids, strict=True)
        return [ScheduledSeq(*name, *share) for name, share in zip(names, shares, strict=True)]

    def seq_lens(self) -> Int32:
        """Positions of each sequence in the cache after the step, int32[num_seqs]."""
        return self.starts + self.counts

    def query_start(self) -> Int32:
        """Sequence `s` owns tokens `[s] : [s + 1]` of the step, int32[num_seqs + 1]."""
        return _offsets(self.counts)

    def positions(self) -> Int32:
        """Position of each token in its sequence, int32[num_tokens]."""
        shift = self.starts - self.query_start()[:-1]
        return np.arange(self.num_tokens, dtype=np.int32) + np.repeat(shift, self.counts)

    def slot_mapping(self, block_size: int) -> Int32:
        """Where each token's keys and values go, int32[num_tokens].

        A slot is `block * block_size + offset in the block`.
        """
        positions = self.positions()
        owner = np.repeat(np.arange(self.num_seqs, dtype=np.int32), self.counts)
        blocks = self.block_tables[owner, positions // block_size]
        return blocks * np.int32(block_size) + positions % block_size

    def sample_rows(self) -> Int32:
        """Token of the step at which each sample row reads its logits, int32[num_samples]."""
        if self.num_decodes == self.num_seqs:  # each token is sampled
            return np.arange(self.num_samples, dtype=np.int32)
        ends = self.query_start()[1:]
        shift = ends - _offsets(self.sample_counts)[1:]
        return np.arange(self.num_samples, dtype=np.int32) + np.repeat(shift, self.sample_counts)


def _offsets(counts: Int32) -> Int32:
    """Exclusive running sum with the total at the end, int32[len(counts) + 1]."""
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets

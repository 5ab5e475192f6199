"""The budgets of one step, and the plan that grows inside them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.plan import Int32, StepPlan
from scheduler.sequence import NO_ROW, Sequence


class Roster(NamedTuple):
    """The sequences of a step, and `StepPlan.seq_ids` and `StepPlan.request_ids`."""

    seqs: list[Sequence]
    seq_ids: list[int]
    request_ids: list[str]


NOBODY = Roster([], [], [])


class StepBuilder:
    """Collects the sequences of one step inside its budgets of tokens and sample rows.

    Args:
        config: the budgets.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._tokens_left = config.max_num_batched_tokens
        self._rows_left = config.max_num_seqs
        self._max_chunk = config.max_prefill_chunk or config.max_num_batched_tokens
        self._decodes: list[Sequence] = []
        self._chunks: list[Sequence] = []
        self._chunk_samples: list[int] = []
        self._decode_feeds: list[int] = []
        self._chunk_feeds: list[int] = []
        self._undrawn: list[int] = []  # decode rows whose tokens continue nothing
        self.ending: list[Sequence] = []
        """Sequences of the step that need no other one."""

    @property
    def tokens_left(self) -> int:
        """How many tokens may be added."""
        return self._tokens_left

    @property
    def seqs(self) -> list[Sequence]:
        """The sequences of the step in the order of its plan."""
        return self._decodes + self._chunks

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has been planned."""
        return not (self._decodes or self._chunks)

    def chunk(self, seq: Sequence) -> int:
        """How many tokens of a sequence the budgets allow now; 0 means that the step is full."""
        if not self._rows_left:
            return 0
        count = seq.num_tokens - seq.num_computed
        if count > 1:
            count = min(count, self._max_chunk)
            if seq.score_from < seq.prompt_len:
                unscored = max(seq.num_computed, seq.score_from)
                count = min(count, unscored - seq.num_computed + self._rows_left)
        return count if count <= self._tokens_left else self._tokens_left

    def add_decodes(self, seqs: list[Sequence], start: int, blocks: BlockManager) -> int:
        """Plan sequences from `start` on, up to the first that wants a closer look.

        Those before it have one generated token to compute, and a block for it. Most sequences of
        most steps are like that, so that this is most of what planning costs.

        Returns:
            The index of the first that was not planned.
        """
        end = min(len(seqs), start + min(self._rows_left, self._tokens_left))
        index = start
        while index < end:
            seq = seqs[index]
            position = seq.num_computed
            if seq.num_tokens != position + 1 or position < seq.prompt_len or seq.is_beam:
                break
            if position >= seq.capacity and not blocks.grow(seq, position + 1):
                break
            self._decode(seq, position)
            index += 1
        self._tokens_left -= index - start
        self._rows_left -= index - start
        return index

    def add(self, seq: Sequence, count: int) -> None:
        """Plan the next `count` tokens of a sequence, as `chunk` allowed."""
        start, end = seq.num_computed, seq.num_computed + count
        is_last = end == seq.num_tokens
        num_samples = 1 if is_last else 0
        if start < seq.prompt_len:
            unscored = min(end, seq.prompt_len) - max(start, seq.score_from)
            if unscored > 0:
                num_samples = unscored
                seq.score_from = end
        seq.held = is_last and seq.is_beam
        self._tokens_left -= count
        self._rows_left -= num_samples
        if count == num_samples == 1:
            self._decode(seq, start)
            return
        self._chunks.append(seq)
        self._chunk_samples.append(num_samples)
        self._chunk_feeds.append(seq.pending_row if end > seq.num_known else NO_ROW)
        seq.num_written = start
        seq.num_computed = end
        if end + 1 == seq.limit and not seq.held:  # the token that it samples now is its last
            self.ending.append(seq)

    def _decode(self, seq: Sequence, position: int) -> None:
        """Plan one token of a sequence, and let it go on with the one that is sampled there."""
        row = len(self._decodes)
        self._decodes.append(seq)
        self._decode_feeds.append(seq.pending_row if position >= seq.num_known else NO_ROW)
        seq.num_written = position
        seq.num_computed = position + 1
        if seq.num_tokens > position + 1:  # a prompt token whose logits are wanted, not the last
            self._undrawn.append(row)
        elif not seq.held:
            seq.num_tokens = position + 2
            seq.pending_row = row
            if position + 2 == seq.limit:  # the token that it samples now is its last
                self.ending.append(seq)

    def roster(self, last: Roster) -> Roster:
        """The sequences of the step; the very same lists if they are those of the last one."""
        seqs = self.seqs
        if seqs == last.seqs:
            return last
        return Roster(seqs, [seq.seq_id for seq in seqs], [seq.request.request_id for seq in seqs])

    def build(
        self, roster: Roster, blocks: BlockManager, preempted: list[Sequence]
    ) -> StepPlan | None:
        """The plan of the step, or None when it has no sequences."""
        seqs, num_decodes = roster.seqs, len(self._decodes)
        if not seqs:
            return None
        starts = np.array([seq.num_written for seq in seqs], np.int32)
        counts = np.ones(len(seqs), np.int32)
        counts[num_decodes:] = [seq.num_computed - seq.num_written for seq in self._chunks]
        sample_counts = np.ones(len(seqs), np.int32)
        sample_counts[num_decodes:] = self._chunk_samples
        feed_rows = np.array(self._decode_feeds + self._chunk_feeds, np.int32)
        drawn_rows = np.cumsum(sample_counts, dtype=np.int32) - 1
        num_samples = int(drawn_rows[-1]) + 1
        drawn_rows[self._undrawn] = NO_ROW
        for index, seq in enumerate(self._chunks, num_decodes):
            if seq.num_computed < seq.num_tokens:  # the step does not come to its end
                drawn_rows[index] = NO_ROW
            elif not seq.held:
                seq.num_tokens += 1
                seq.pending_row = int(drawn_rows[index])
        token_ids = self._tokens(feed_rows, num_tokens=int(counts.sum()))
        return StepPlan(
            seq_ids=roster.seq_ids,
            request_ids=roster.request_ids,
            token_ids=token_ids,
            block_tables=blocks.tables([seq.row for seq in seqs], int((starts + counts).max())),
            copies=blocks.take_copies(),
            starts=starts,
            counts=counts,
            sample_counts=sample_counts,
            feed_rows=feed_rows,
            drawn_rows=drawn_rows,
            num_tokens=len(token_ids),
            num_samples=num_samples,
            num_decodes=num_decodes,
            preempted=tuple(seq.seq_id for seq in preempted),
        )

    def _tokens(self, feed_rows: Int32, *, num_tokens: int) -> Int32:
        """`StepPlan.token_ids`; of the decode rows, only those that are not fed take a look."""
        tokens = np.zeros(num_tokens, np.int32)
        num_decodes = len(self._decodes)
        for row in np.flatnonzero(feed_rows[:num_decodes] == NO_ROW).tolist():
            seq = self._decodes[row]
            tokens[row] = seq.token(seq.num_written)
        at = num_decodes
        for seq in self._chunks:
            end = at + seq.num_computed - seq.num_written
            tokens[at:end] = seq.tokens(seq.num_written, seq.num_computed)
            at = end
        return tokens

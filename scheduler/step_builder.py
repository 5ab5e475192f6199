"""The budgets of one step, and the plan that grows inside them."""

from __future__ import annotations

import numpy as np

from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.plan import Int32, StepPlan
from scheduler.sequence import NO_ROW, Sequence


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
        self.ending: list[Sequence] = []
        """Sequences of the step that need no other one."""

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

    def add(self, seq: Sequence, count: int) -> None:
        """Plan the next `count` tokens of a sequence, as `chunk` allowed."""
        start = seq.num_written = seq.num_computed
        end = seq.num_computed = start + count
        is_last = end == seq.num_tokens
        num_samples = 1 if is_last else 0
        if start < seq.prompt_len:
            unscored = min(end, seq.prompt_len) - max(start, seq.score_from)
            if unscored > 0:
                num_samples = unscored
                seq.score_from = end
        if count == num_samples == 1:
            self._decodes.append(seq)
        else:
            self._chunks.append(seq)
            self._chunk_samples.append(num_samples)
        self._tokens_left -= count
        self._rows_left -= num_samples
        if is_last and seq.request.beam:
            seq.held = True
        elif end + 1 == seq.limit:  # the token that it samples now is its last
            self.ending.append(seq)

    def build(self, blocks: BlockManager, preempted: list[Sequence]) -> StepPlan | None:
        """The plan of the step, or None when it has no sequences."""
        seqs, num_decodes = self.seqs, len(self._decodes)
        if not seqs:
            return None
        starts = np.array([seq.num_written for seq in seqs], np.int32)
        ends = np.array([seq.num_computed for seq in seqs], np.int32)
        sample_counts = np.ones(len(seqs), np.int32)
        sample_counts[num_decodes:] = self._chunk_samples
        sample_ends = np.cumsum(sample_counts)
        feed_rows, drawn_rows = self._sample(seqs, (sample_ends - 1).tolist())
        token_ids = self._tokens(seqs, feed_rows, num_tokens=int((ends - starts).sum()))
        return StepPlan(
            seq_ids=[seq.seq_id for seq in seqs],
            request_ids=[seq.request.request_id for seq in seqs],
            token_ids=token_ids,
            block_tables=blocks.tables([seq.row for seq in seqs], int(ends.max())),
            copies=blocks.take_copies(),
            starts=starts,
            counts=ends - starts,
            sample_counts=sample_counts,
            feed_rows=np.array(feed_rows, np.int32),
            drawn_rows=np.array(drawn_rows, np.int32),
            num_tokens=len(token_ids),
            num_samples=int(sample_ends[-1]),
            num_decodes=num_decodes,
            preempted=tuple(seq.seq_id for seq in preempted),
        )

    def _sample(self, seqs: list[Sequence], rows: list[int]) -> tuple[list[int], list[int]]:
        """Let the sequences go on with the tokens that the step samples.

        Args:
            seqs: the sequences of the step.
            rows: the last sample row of each.

        Returns:
            `StepPlan.feed_rows` and `StepPlan.drawn_rows`.
        """
        feed_rows: list[int] = []
        drawn_rows: list[int] = []
        for seq, row in zip(seqs, rows, strict=True):
            end = seq.num_computed
            feed_rows.append(seq.pending_row if end > seq.num_known else NO_ROW)
            if end < seq.num_tokens:  # the step does not come to its end
                drawn_rows.append(NO_ROW)
                continue
            drawn_rows.append(row)
            if not seq.held:
                seq.num_tokens += 1
                seq.pending_row = row
        return feed_rows, drawn_rows

    def _tokens(self, seqs: list[Sequence], feed_rows: list[int], *, num_tokens: int) -> Int32:
        """`StepPlan.token_ids`; of the decode rows, only those that are not fed take a look."""
        tokens = np.zeros(num_tokens, np.int32)
        num_decodes = len(self._decodes)
        for row, feed_row in enumerate(feed_rows[:num_decodes]):
            if feed_row == NO_ROW:
                tokens[row] = seqs[row].token(seqs[row].num_written)
        at = num_decodes
        for seq in self._chunks:
            end = at + seq.num_computed - seq.num_written
            tokens[at:end] = seq.tokens(seq.num_written, seq.num_computed)
            at = end
        return tokens

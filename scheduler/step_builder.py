"""The budgets of one step, and the plan that grows inside them."""

from __future__ import annotations

import numpy as np

from scheduler.block_manager import BlockManager
from scheduler.config import SchedulerConfig
from scheduler.plan import Int32, ScheduledSeq, StepPlan
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
        self._decodes: list[ScheduledSeq] = []
        self._decode_tokens: list[int] = []
        self._decode_table_rows: list[int] = []
        self._chunks: list[tuple[Sequence, ScheduledSeq]] = []
        self.ending: list[Sequence] = []
        """Sequences of the step that need no other one."""

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has been planned."""
        return not (self._decodes or self._chunks)

    def chunk(self, seq: Sequence) -> int:
        """How many tokens of a sequence the budgets allow now; 0 means that the step is full."""
        if not self._rows_left:
            return 0
        count = seq.num_known + seq.num_pending - seq.num_computed
        if count > 1:
            count = min(count, self._max_chunk)
            if seq.score_from < len(seq.prompt):
                unscored = max(seq.num_computed, seq.score_from)
                count = min(count, unscored - seq.num_computed + self._rows_left)
        return min(count, self._tokens_left)

    def add(self, seq: Sequence, count: int) -> None:
        """Plan the next `count` tokens of a sequence, as `chunk` allowed."""
        start = seq.num_computed
        end = start + count
        is_last = end == seq.num_known + seq.num_pending
        num_samples = int(is_last)
        if start < len(seq.prompt):
            unscored = min(end, len(seq.prompt)) - max(start, seq.score_from)
            if unscored > 0:
                num_samples = unscored
                seq.score_from = end
        feed_row = seq.pending_row if end > seq.num_known else NO_ROW
        sample_row = len(self._decodes) if is_last else NO_ROW
        request_id = seq.request.request_id
        planned = ScheduledSeq(
            seq.seq_id, request_id, start, count, num_samples, feed_row, sample_row
        )
        if count == num_samples == 1:
            self._decodes.append(planned)
            self._decode_tokens.append(seq.token(start))
            self._decode_table_rows.append(seq.row)
        else:
            self._chunks.append((seq, planned))
        self._tokens_left -= count
        self._rows_left -= num_samples
        seq.num_written = start
        seq.num_computed = end
        if is_last and seq.request.beam:
            seq.held = True
        elif is_last:
            seq.num_pending += 1
            seq.pending_row = sample_row
            if seq.num_known + seq.num_pending >= seq.limit:
                self.ending.append(seq)

    def build(self, blocks: BlockManager, preempted: list[Sequence]) -> StepPlan | None:
        """The plan of the step, or None when it has no sequences."""
        seqs = self._decodes
        num_decodes = num_samples = len(seqs)
        tokens: list[Int32] = [np.array(self._decode_tokens, np.int32)]
        table_rows = self._decode_table_rows
        for seq, planned in self._chunks:
            num_samples += planned.num_samples
            if planned.sample_row != NO_ROW:  # now that all rows before it are known
                seq.pending_row = num_samples - 1
                planned = planned._replace(sample_row=num_samples - 1)
            seqs.append(planned)
            tokens.append(seq.tokens(planned.start, planned.start + planned.num_tokens))
            table_rows.append(seq.row)
        if not seqs:
            return None
        starts, counts, sample_counts, feed_rows = np.array(
            [planned[2:6] for planned in seqs], np.int32
        ).T.copy()
        return StepPlan(
            seqs=seqs,
            token_ids=np.concatenate(tokens),
            block_tables=blocks.tables(table_rows, int((starts + counts).max())),
            copies=blocks.take_copies(),
            starts=starts,
            counts=counts,
            sample_counts=sample_counts,
            feed_rows=feed_rows,
            num_tokens=int(counts.sum()),
            num_samples=num_samples,
            num_decodes=num_decodes,
            preempted=tuple(seq.seq_id for seq in preempted),
        )

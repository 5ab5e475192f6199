"""From a plan of the scheduler to the packed inputs of compiled code, without a token loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedjax.engine.block_tables import TableChanges, padded_edits
from pagedjax.engine.requests import PromptTarget
from pagedjax.engine.sampling_records import NO_ID
from pagedjax.engine.step_inputs import (
    DRAWN,
    PENALTIES,
    UNREPORTED,
    SamplingLayout,
    StepLayout,
)
from scheduler import StepPlan


def sampled_positions(plan: StepPlan) -> np.ndarray:
    """Position of the token that each sampled row draws or predicts, int32[num_samples]."""
    ends = np.cumsum(plan.sample_counts, dtype=np.int32)
    first = plan.seq_lens() + 1 - ends  # the position that row 0 would have, were it the sequence's
    return np.arange(plan.num_samples, dtype=np.int32) + np.repeat(first, plan.sample_counts)


def pack_inputs(plan: StepPlan, layout: StepLayout, tables: TableChanges) -> np.ndarray:
    """What a step computes, as a fresh sealed vector; never written again: the device may alias it.

    Args:
        plan: what to compute.
        layout: the bucket's layout; its bucket holds the plan.
        tables: where the block tables are, and at most `layout.max_edits` changes of them.
    """
    packed = np.zeros(layout.size, np.int32)
    view = layout.views(packed)
    seqs = plan.num_seqs
    view["token_ids"][: plan.num_tokens] = plan.token_ids
    view["table_rows"][:seqs] = tables.rows
    view["table_edits"][:] = padded_edits(tables.edits, layout.max_edits)
    view["starts"][:seqs] = plan.starts
    view["feed_rows"][:seqs] = plan.feed_rows
    view["query_start"][: seqs + 1] = plan.query_start()
    view["query_start"][seqs + 1 :] = plan.num_tokens  # padding sequences own no token
    view["sample_rows"][: plan.num_samples] = plan.sample_rows()
    return layout.sealed(packed)


def pack_sampling(
    layout: SamplingLayout,
    records: np.ndarray,
    targets: Sequence[PromptTarget],
    *,
    positions: np.ndarray,
    seen_rows: np.ndarray,
) -> np.ndarray:
    """How a step's rows are drawn, as a fresh sealed vector.

    Args:
        layout: for at least as many rows as there are records.
        records: sampling record of each sampled row.
        targets: rows that predict prompt tokens.
        positions: `sampled_positions` of the plan.
        seen_rows: int32, where the counts of each row's sequence would be, if it has penalties.
    """
    packed = np.zeros(layout.size, np.int32)
    view = layout.views(packed)
    rows = len(records)
    for name in ("temperature", "top_p", "min_p", "top_k", "sample_index"):
        view[name][:rows] = records[name]
    view["seed"][:rows] = records["seed"].view(np.int32)
    view["position"][:rows] = positions
    view["target"][:] = UNREPORTED
    view["target"][:rows][records["reports"]] = DRAWN
    for target in targets:
        view["target"][target.row] = target.token_id
    view["banned_ids"][:] = NO_ID
    view["banned_ids"][:rows] = records["stop_ids"]
    if layout.penalties:
        view["repetition_penalty"][:] = 1.0
        for name in PENALTIES:
            view[name][:rows] = records[name]
        view["seen_row"][:] = NO_ID
        view["seen_row"][:rows] = np.where(records["penalized"], seen_rows, NO_ID)
    return layout.sealed(packed)

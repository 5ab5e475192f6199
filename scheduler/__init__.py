"""Host-side scheduling over a block-structured KV cache: standard library and numpy only.

In reading order: `request` (what is asked for), `plan` (what a step computes), `scheduler` (who is
served when), `queue` (in which order), `deadlines` (or in which other one), `sequence` (its state
of one request), `siblings` (samples and beams of one prompt), `step_builder` (a step's budgets),
`step_update` (what came of it), `block_manager` (block tables), `admission` (what a sequence
begins with), `block_pool` (who owns which block), `free_lists` (which one is handed out next),
`prefix_index` (which block holds what), `tiers` and `transfers` (what lies below the pool).
`block_map` is a picture of the pool, and `invariants` says what is true between any two calls.
"""

from scheduler.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from scheduler.config import BLOCK_SIZES, SchedulerConfig
from scheduler.plan import ScheduledSeq, StepPlan
from scheduler.request import FinishReason, Request, StopRules
from scheduler.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from scheduler.siblings import BeamChoice
from scheduler.step_update import SeqEnd, StepUpdate

__all__ = [
    "BLOCK_SIZES",
    "MAX_PLANS_IN_FLIGHT",
    "BeamChoice",
    "NULL_BLOCK",
    "BlockPool",
    "FinishReason",
    "OutOfBlocks",
    "Request",
    "ScheduledSeq",
    "Scheduler",
    "SchedulerConfig",
    "SeqEnd",
    "StepPlan",
    "StepUpdate",
    "StopRules",
]

"""Host-side scheduling over a block-structured KV cache: standard library and numpy only."""

from scheduler.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from scheduler.config import BLOCK_SIZES, SchedulerConfig
from scheduler.plan import ScheduledSeq, SeqUpdate, StepPlan
from scheduler.request import FinishReason, Request, StopRules
from scheduler.scheduler import Scheduler

__all__ = [
    "BLOCK_SIZES",
    "NULL_BLOCK",
    "BlockPool",
    "FinishReason",
    "OutOfBlocks",
    "Request",
    "ScheduledSeq",
    "Scheduler",
    "SchedulerConfig",
    "SeqUpdate",
    "StepPlan",
    "StopRules",
]

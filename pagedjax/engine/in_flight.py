"""Steps on their way: launched, and read but not yet told to the requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pagedjax.engine.buckets import Bucket
from pagedjax.engine.logprobs import HostSamples
from pagedjax.engine.requests import Completion, LiveRequest, PromptTarget
from pagedjax.engine.sampler import SampleOutputs
from scheduler import StepPlan, StepUpdate


class Members(NamedTuple):
    """The requests in a step.

    Attributes:
        request_ids: `StepPlan.request_ids`.
        pairs: the request and the completion of each sequence.
        records: int64[seqs], its row in the sampling records.
        plain_from: int32[seqs], `SamplingRecords.plain_from` of these.
    """

    request_ids: list[str]
    pairs: list[tuple[LiveRequest, Completion]]
    records: np.ndarray
    plain_from: np.ndarray


NOBODY = Members([], [], np.zeros(0, np.int64), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and whose tokens have not been read.

    Attributes:
        plan: what it computes.
        members: the requests in it; nobody once all there were have ended.
        bucket: its sizes.
        samples: its tokens, once it is done.
        targets: prompt tokens whose log-probabilities are wanted.
        planned: when the plan was there, by the monotonic clock.
        launched: when the launch was over.
    """

    plan: StepPlan
    members: Members
    bucket: Bucket
    samples: SampleOutputs
    targets: list[PromptTarget]
    planned: float
    launched: float

    def for_nobody(self) -> InFlight:
        """The same step without its requests, all of which have ended."""
        return replace(self, members=NOBODY, targets=[])

    def wait(self) -> None:
        """Sleep until the device has computed its tokens."""
        self.samples.token_ids.block_until_ready()

    def is_done(self) -> bool:
        """Whether the device has computed its tokens."""
        token_ids: Any = self.samples.token_ids  # jax.Array's type does not show the method
        return token_ids.is_ready()


@dataclass(frozen=True, slots=True)
class Done:
    """A step whose tokens have been read, at `time` by the monotonic clock."""

    step: InFlight
    samples: HostSamples
    update: StepUpdate
    time: float

    def row(self, index: int) -> int:
        """The sample row of a sequence, by its index in the plan."""
        return int(self.step.plan.drawn_rows[index])

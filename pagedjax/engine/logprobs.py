"""A step's outputs on the host, and the log-probabilities in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedjax.engine.sampler import SampleOutputs
from pagedjax.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class HostSamples:
    """`SampleOutputs` as numpy arrays."""

    token_ids: np.ndarray
    logprob: np.ndarray | None
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None

    @classmethod
    def read(cls, outputs: SampleOutputs) -> HostSamples:
        """Wait for the device and take its arrays."""
        reported = (outputs.logprob, outputs.top_ids, outputs.top_logprobs)
        return cls(
            np.asarray(outputs.token_ids),
            *(None if field is None else np.asarray(field) for field in reported),
        )

    def logprobs_at(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """What the model thought at a sampled row, about `token_id` and its likeliest tokens.

        Not after a greedy step, which reports nothing.
        """
        assert self.logprob is not None
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        ids = self.top_ids[row, :num_top].tolist()
        values = self.top_logprobs[row, :num_top].tolist()
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(self.logprob[row]),
            top=tuple(zip(ids, values, strict=True)),
        )

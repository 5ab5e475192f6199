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
    logprob: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @classmethod
    def read(cls, outputs: SampleOutputs) -> HostSamples:
        """Wait for the device and take its arrays."""
        return cls(
            np.asarray(outputs.token_ids),
            np.asarray(outputs.logprob),
            np.asarray(outputs.top_ids),
            np.asarray(outputs.top_logprobs),
        )

    def logprobs_at(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """What the model thought at a sampled row, about `token_id` and its likeliest tokens."""
        ids = self.top_ids[row, :num_top].tolist()
        values = self.top_logprobs[row, :num_top].tolist()
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(self.logprob[row]),
            top=tuple(zip(ids, values, strict=True)),
        )

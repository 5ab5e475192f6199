"""Every live sequence's sampling parameters in one numpy table, gathered per step."""

from __future__ import annotations

import numpy as np

from pagedjax.engine.sampler import MIN_TEMPERATURE
from pagedjax.engine.step_inputs import MAX_BANNED_IDS, PENALTIES
from pagedjax.sampling_params import SamplingParams

NO_ID = np.iinfo(np.int32).max  # beyond every vocabulary, so that banning it does nothing
NEVER = np.iinfo(np.int32).max  # beyond every position
MIN_TOP_P = np.finfo(np.float32).tiny  # anything smaller may round to 0, which keeps no token

RECORD = np.dtype(
    [
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),
        ("seed", np.uint32),
        ("sample_index", np.int32),
        ("prompt_len", np.int32),
        ("min_tokens", np.int32),
        ("reports", np.bool_),  # log-probabilities of generated tokens are wanted
        *((name, np.float32) for name in PENALTIES),
        ("penalized", np.bool_),  # one of them is not neutral
        ("filtered", np.bool_),  # top_k, top_p or min_p leave something out
        ("plain_from", np.int32),  # position from which on the argmax is all that is wanted
        ("stop_ids", np.int32, (MAX_BANNED_IDS,)),
    ]
)


class SamplingRecords:
    """A growing table with a row per live sequence; rows are used again."""

    def __init__(self, capacity: int = 64):
        self._table = np.zeros(capacity, RECORD)
        self._free = list(range(capacity - 1, -1, -1))

    def add(
        self,
        params: SamplingParams,
        *,
        seed: int,
        sample_index: int,
        prompt_len: int,
        stop_ids: frozenset[int],
    ) -> int:
        """Store a sequence's parameters and return its row.

        Raises:
            ValueError: `min_tokens` would have to ban more ids than a step has room for.
        """
        if params.min_tokens and len(stop_ids) > MAX_BANNED_IDS:
            raise ValueError(
                f"min_tokens works with at most {MAX_BANNED_IDS} end-of-text and stop ids, "
                f"got {len(stop_ids)}"
            )
        if not self._free:
            size = len(self._table)
            self._table = np.concatenate([self._table, np.zeros(size, RECORD)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        row = self._free.pop()
        record = self._table[row]
        greedy = params.temperature < MIN_TEMPERATURE or params.top_k == 1
        record["temperature"] = 0.0 if greedy else params.temperature
        record["top_k"] = min(max(params.top_k, 0), np.iinfo(np.int32).max)
        record["top_p"] = max(params.top_p, MIN_TOP_P)
        record["min_p"] = params.min_p
        record["seed"], record["sample_index"] = seed, sample_index
        record["prompt_len"], record["min_tokens"] = prompt_len, params.min_tokens
        record["reports"] = params.logprobs is not None
        record["filtered"] = not greedy and (
            params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        )
        for name in PENALTIES:
            record[name] = getattr(params, name)
        record["penalized"] = params.is_penalized
        unreported = params.logprobs is None and params.prompt_logprobs is None
        is_plain = greedy and unreported and not params.is_penalized
        record["plain_from"] = min(prompt_len + params.min_tokens, NEVER) if is_plain else NEVER
        record["stop_ids"] = NO_ID
        if params.min_tokens:
            record["stop_ids"][: len(stop_ids)] = sorted(stop_ids)
        return row

    def seed(self, row: int) -> int:
        """The seed of a row."""
        return int(self._table["seed"][row])

    def remove(self, row: int) -> None:
        """Give a row back."""
        self._free.append(row)

    def plain_from(self, rows: np.ndarray) -> np.ndarray:
        """Position of each row's first token of which the argmax is all that is wanted, int32."""
        return self._table["plain_from"][rows]

    def gather(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Records of the sampled rows of a step.

        Args:
            rows: each sampled row's record.
            positions: position of the token each of them draws.

        Returns:
            A copy, in which `stop_ids` bans nothing where `min_tokens` is reached, and rows that
            predict prompt tokens are not penalized.
        """
        records = self._table[rows]
        reached = positions - records["prompt_len"] >= records["min_tokens"]
        records["stop_ids"][reached] = NO_ID
        records["penalized"] &= positions >= records["prompt_len"]
        return records

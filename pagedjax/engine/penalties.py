"""Penalties on tokens that a sequence has already, and the memory on the device that they need.

What a sequence has is counted where its tokens are drawn, since with steps in flight the host does
not know the newest of them. The counts are an array of the device, `seen`, with a row per sequence:

    seen[row, token] = 2 * times generated + (1 if it is in the prompt)

The draw that penalizes also counts. The host fills in what a sequence brings along: its prompt,
and after a preemption or a restart the tokens that it has. Steps without penalties know none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.engine.block_tables import edit_tables, padded_edits
from pagedjax.engine.step_inputs import PenaltyArrays

# Counts that one call fills in: 48 KiB, below what would make the host wait for the device.
_EDITS = 4096
_NO_ROW = np.iinfo(np.int32).max


def penalize(
    logits: Float[Array, "rows vocab"], seen: Int[Array, "seqs vocab"], how: PenaltyArrays
) -> Float[Array, "rows vocab"]:
    """The logits with penalties, in the order of vLLM: repetition, then frequency and presence.

    The repetition penalty is that of CTRL (Keskar et al. 2019, section 4.1) as
    `transformers.RepetitionPenaltyLogitsProcessor` has it: of tokens in prompt or output a logit
    above 0 is divided by it, one below multiplied. The other two are OpenAI's: of tokens in the
    output, frequency is subtracted as often as the token is there, and presence once.

    Args:
        logits: raw, float32.
        seen: what the sequences have, as the module's docstring says.
        how: each row's penalties and its row of `seen`; neutral ones change no bit.
    """
    had = seen.at[how.seen_row].get(mode="fill", fill_value=0)
    generated = had >> 1
    repetition = how.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(had > 0, scaled, logits)
    logits -= how.frequency_penalty[:, None] * generated.astype(jnp.float32)
    return logits - jnp.where(generated > 0, how.presence_penalty[:, None], 0.0)


def count_drawn(
    seen: Int[Array, "seqs vocab"], how: PenaltyArrays, token_ids: Int[Array, " rows"]
) -> Int[Array, "seqs vocab"]:
    """`seen` once the rows have these tokens; rows without penalties have no place in it."""
    return seen.at[how.seen_row, token_ids].add(2, mode="drop")


class SeenTokens:
    """`seen` on the device; takes memory from its first use on.

    Args:
        max_seqs: rows.
        vocab: columns.
        sharding: where it is.

    Attributes:
        abstract: its shape, dtype and place.
        array: the counts; whoever donates it puts what comes of it back. None before its use.
    """

    def __init__(self, max_seqs: int, vocab: int, sharding: jax.sharding.Sharding) -> None:
        self.abstract = jax.ShapeDtypeStruct((max_seqs, vocab), np.int32, sharding=sharding)
        self.array: jax.Array | None = None
        self._programs: tuple[Any, Any] | None = None

    def compile(self) -> tuple[Any, Any]:
        """The programs that make the array, and that reset rows of it; compiled once."""
        if self._programs is None:
            shape, sharding = self.abstract.shape, self.abstract.sharding

            def make() -> jax.Array:
                return jnp.zeros(shape, jnp.int32)

            def reset(seen: jax.Array, rows: jax.Array, counts: jax.Array) -> jax.Array:
                return edit_tables(seen.at[rows].set(0, mode="drop"), counts)

            arguments = [
                jax.ShapeDtypeStruct(size, np.int32, sharding=sharding)
                for size in ((shape[0],), (_EDITS, 3))
            ]
            self._programs = (
                jax.jit(make, out_shardings=sharding).lower().compile(),
                jax.jit(reset, donate_argnums=(0,)).lower(self.abstract, *arguments).compile(),
            )
        return self._programs

    def reset(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Let rows hold other counts, before the draw that is launched next.

        Args:
            rows: int32[at most max_seqs], those that are emptied first.
            counts: int32[counts, 3], (row, token, value) of what is not 0 in them.
        """
        make, reset = self.compile()
        if self.array is None:
            self.array = make()
        for start in range(0, max(len(counts), 1), _EDITS):
            emptied = np.full(self.abstract.shape[0], _NO_ROW, np.int32)
            if start == 0:
                emptied[: len(rows)] = rows
            now = padded_edits(counts[start : start + _EDITS], _EDITS)
            self.array = reset(self.array, emptied, now)


class SeenOwners:
    """Whose tokens each row of `seen` counts, as the host knows it.

    Args:
        max_seqs: rows.
    """

    def __init__(self, max_seqs: int) -> None:
        self._owners = np.full(max_seqs, -1, np.int64)

    def take(
        self, rows: np.ndarray, seq_ids: np.ndarray, tokens: Callable[[int], tuple[Any, Any]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Let sequences have rows, and say what is to change so that they find their tokens there.

        One that has been drawn in the row that it has now, and in no other since, changes nothing.
        Any other is in no step in flight, so that the host knows all its tokens: a sequence keeps
        its row from one step to the next (`TableMirror`).

        Args:
            rows: int32[seqs].
            seq_ids: int64[seqs], to whom they belong from now on.
            tokens: prompt and generated tokens of the sequence at an index of these.

        Returns:
            Arguments of `SeenTokens.reset`.
        """
        fresh = np.flatnonzero(self._owners[rows] != seq_ids)
        self._owners[np.isin(self._owners, seq_ids[fresh])] = -1
        self._owners[rows[fresh]] = seq_ids[fresh]
        counts = [np.zeros((0, 3), np.int32)]
        for index in fresh.tolist():
            ids, values = _counts(*tokens(index))
            counts.append(np.stack([np.full_like(ids, rows[index]), ids, values], axis=1))
        return rows[fresh], np.concatenate(counts)


def _counts(prompt: Any, outputs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Token ids that a sequence has, and what `seen` holds for them, both int32."""
    prompt, outputs = np.asarray(prompt, np.int32), np.asarray(outputs, np.int32)
    ids, index = np.unique(np.concatenate([prompt, outputs]), return_inverse=True)
    values = 2 * np.bincount(index[len(prompt) :], minlength=len(ids)).astype(np.int32)
    values[index[: len(prompt)]] |= 1
    return ids, values

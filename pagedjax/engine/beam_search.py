"""Beam search over the likeliest continuations that steps report; knows nothing of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedjax.sampling_params import BeamSearchParams
from scheduler import BeamChoice


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Tokens that follow the prompt, and how likely they are.

    Attributes:
        token_ids: generated tokens, the end-of-text token included.
        logprob: sum of their log-probabilities, float32.
        score: `logprob / len(token_ids) ** length_penalty` once it has ended.
    """

    token_ids: tuple[int, ...] = ()
    logprob: np.float32 = np.float32(0)
    score: float = 0.0


def num_candidates(params: BeamSearchParams, num_eos_ids: int) -> int:
    """Continuations that a step looks at, of each beam and in all.

    So many that `beam_width` remain to go on with though each beam may end with each
    end-of-text token.
    """
    return max(2, 1 + num_eos_ids) * params.beam_width


class BeamSearch:
    """One search, as `transformers` does it (`GenerationMixin._beam_search`, version 5).

    Each round ranks the continuations of all beams by the sum of log-probabilities. Those among
    the best `beam_width` that end, by an end-of-text token or at the length limit, become results,
    of which the best `beam_width` by score are kept; the best that do not end are the beams of the
    next round. The search is over when all continuations end; with `early_stopping` when there are
    `beam_width` results; without it when there are, and the best beam can no longer beat the worst
    of them, supposing that it ends here, or with "never" at the length that suits it best.

    Args:
        keys: names of the beams; the first one stands for the prompt alone.
        params: width, penalty and when to stop.
        eos_ids: tokens that end a beam.
        max_tokens: most tokens of a beam.
    """

    def __init__(
        self,
        keys: Sequence[str],
        params: BeamSearchParams,
        *,
        eos_ids: Iterable[int],
        max_tokens: int,
    ) -> None:
        self._keys = list(keys)
        self.params = params
        self._eos_ids = frozenset(eos_ids)
        self._max_tokens = max_tokens
        self._num_candidates = num_candidates(params, len(self._eos_ids))
        self._beams: dict[str, Hypothesis] = {keys[0]: Hypothesis()}  # best first
        self._reports: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.results: list[Hypothesis] = []
        """What has ended, best first."""

    def report(self, key: str, top_ids: np.ndarray, top_logprobs: np.ndarray) -> bool:
        """Take in the likeliest continuations of one beam.

        Args:
            key: the beam.
            top_ids: token ids, likeliest first, int32[at least `num_candidates`].
            top_logprobs: their log-probabilities, float32 of the same shape.

        Returns:
            Whether all beams have reported, so that `advance` can be called.
        """
        count = self._num_candidates
        self._reports[key] = top_ids[:count], top_logprobs[:count]
        return self._reports.keys() == self._beams.keys()

    def advance(self) -> list[BeamChoice]:
        """Choose the beams of the next round; none when the search is over."""
        ranked = self._ranked()
        length = len(ranked[0][1].token_ids)
        going: list[tuple[str, Hypothesis]] = []
        for rank, (parent, hypothesis) in enumerate(ranked):
            if length >= self._max_tokens or hypothesis.token_ids[-1] in self._eos_ids:
                if rank < self.params.beam_width:
                    self._keep(hypothesis)
            elif len(going) < self.params.beam_width:
                going.append((parent, hypothesis))
        if not going or self._is_over(going[0][1]):
            return []
        return self._assigned(going)

    def is_stopped(self, hypothesis: Hypothesis) -> bool:
        """Whether a result ended with an end-of-text token, not at the length limit."""
        return hypothesis.token_ids[-1] in self._eos_ids

    def _ranked(self) -> list[tuple[str, Hypothesis]]:
        """The best continuations of all beams, each with the beam that it continues."""
        keys = list(self._beams)
        logprobs = np.stack(
            [self._beams[key].logprob + self._reports[key][1] for key in keys], dtype=np.float32
        )
        ids = np.stack([self._reports[key][0] for key in keys])
        best = np.argsort(-logprobs, axis=None, kind="stable")[: self._num_candidates]
        self._reports.clear()
        ranked: list[tuple[str, Hypothesis]] = []
        for row, column in zip(*np.unravel_index(best, ids.shape), strict=True):
            tokens = (*self._beams[keys[row]].token_ids, int(ids[row, column]))
            ranked.append((keys[row], Hypothesis(tokens, np.float32(logprobs[row, column]))))
        return ranked

    def _keep(self, ended: Hypothesis) -> None:
        """Add a result, if it is among the best."""
        is_full = len(self.results) == self.params.beam_width
        score = float(self._score(ended.logprob, len(ended.token_ids)))
        self.results.append(Hypothesis(ended.token_ids, ended.logprob, score))
        self.results.sort(key=lambda result: -result.score)
        if is_full:
            self.results.pop()

    def _is_over(self, best: Hypothesis) -> bool:
        """Whether no beam, of which `best` is the likeliest, is to be followed any further."""
        params, length = self.params, len(best.token_ids)
        if len(self.results) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        return not self._score(best.logprob, length) > self.results[-1].score

    def _score(self, logprob: np.float32, length: int) -> np.float32:
        return logprob / np.float32(length**self.params.length_penalty)

    def _assigned(self, going: list[tuple[str, Hypothesis]]) -> list[BeamChoice]:
        """Give each hypothesis a name, its parent's own if that is still free."""
        free = [key for key in self._keys if key not in {parent for parent, _ in going}]
        taken: set[str] = set()
        self._beams, choices = {}, []
        for parent, hypothesis in going:
            key = free.pop() if parent in taken else parent
            taken.add(parent)
            self._beams[key] = hypothesis
            choices.append(BeamChoice(key, parent, hypothesis.token_ids[-1]))
        return choices

"""The padded sizes that steps are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Static sizes of one compiled step.

    Attributes:
        tokens: token rows computed.
        seqs: block-table rows, and rows that are sampled.
        decode: every sequence has exactly one token, so `tokens == seqs`.
    """

    tokens: int
    seqs: int
    decode: bool


def ladder(smallest: int, largest: int, growth: int) -> tuple[int, ...]:
    """Sizes from `smallest` on, each `growth` times the one before, ending with `largest` itself.

    >>> ladder(16, 100, 2)
    (16, 32, 64, 100)
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= growth
    return (*sizes, largest)


class Buckets:
    """All sizes of an engine: decode steps by sequences, mixed steps by tokens.

    A mixed step always has table rows for `max_seqs` sequences, since those are cheap beside the
    tokens it computes.

    Args:
        max_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
        growth: ratio of neighbouring sizes. A larger one means fewer compiles and more padding.
        few_seqs: smallest decode step for more than one sequence.
        few_tokens: smallest mixed step, in tokens.
        many_seqs: decode step from which on there are also those half as large again; None: no.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        growth: int,
        few_seqs: int = 1,
        few_tokens: int = 32,
        many_seqs: int | None = None,
    ):
        seqs = {1, *ladder(min(few_seqs, max_seqs), max_seqs, growth)}
        if many_seqs is not None:
            seqs |= {n + n // 2 for n in seqs if n >= many_seqs and n + n // 2 < max_seqs}
        seqs = sorted(seqs)
        self.decode = tuple(Bucket(n, n, True) for n in seqs)
        sizes = ladder(min(few_tokens, max_tokens), max_tokens, growth)
        self.mixed = tuple(Bucket(n, max_seqs, False) for n in sizes)

    def __iter__(self) -> Iterator[Bucket]:
        """The decode buckets, then the mixed ones, smallest first."""
        return iter((*self.decode, *self.mixed))

    def fit(self, *, tokens: int, seqs: int) -> Bucket:
        """The smallest bucket for a step with this many tokens over this many sequences.

        A step with as many tokens as sequences has one of each: it decodes.

        Raises:
            ValueError: the step is larger than every bucket.
        """
        for bucket in self.decode if tokens == seqs else self.mixed:
            if tokens <= bucket.tokens and seqs <= bucket.seqs:
                return bucket
        raise ValueError(f"no bucket holds {tokens=} of {seqs=}")

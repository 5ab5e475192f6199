"""How streamed answers look: panels that grow side by side, or plain text in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

if TYPE_CHECKING:
    from pagedjax.llm import Deltas

STDERR = Console(stderr=True)


def until_first(deltas: Deltas) -> Deltas:
    """The same deltas, with a sign of life on a terminal until the first one comes."""
    with STDERR.status("reading (the first time, steps are compiled as well)"):
        first = next(deltas, None)
    if first is not None:
        yield first
        yield from deltas


class Answers(Protocol):
    """Shows the answers to several prompts while they come."""

    def __enter__(self) -> Answers: ...

    def __exit__(self, *error: Any) -> None: ...

    def add(self, index: int, text: str) -> None:
        """More text of the answer to prompt `index`."""
        ...

    def finish(self, index: int) -> None:
        """The answer to prompt `index` is complete."""
        ...


class OrderedAnswers:
    """Plain text in the order of the prompts: the first unfinished answer streams, others wait.

    Args:
        headings: one per prompt, printed above its answer; empty for none.
        out: where the text goes; None means standard output.
    """

    def __init__(self, headings: Sequence[str], out: TextIO | None = None) -> None:
        self._headings = headings
        self._waiting = ["" for _ in headings]
        self._finished = [False for _ in headings]
        self._current = 0
        self._out = out or sys.stdout

    def __enter__(self) -> OrderedAnswers:
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._out.flush()

    def add(self, index: int, text: str) -> None:
        """More text of the answer to prompt `index`."""
        if index == self._current:
            self._write(text)
        else:
            self._waiting[index] += text

    def finish(self, index: int) -> None:
        """The answer to prompt `index` is complete."""
        self._finished[index] = True
        while self._current < len(self._headings) and self._finished[self._current]:
            self._write("\n")
            self._current += 1
            self._begin()

    def _begin(self) -> None:
        if self._current < len(self._headings):
            heading = self._headings[self._current]
            self._write((f"\n{heading}\n" if heading else "") + self._waiting[self._current])

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class LiveAnswers:
    """One panel per prompt, all growing at once, under a progress bar."""

    def __init__(self, headings: Sequence[str], console: Console) -> None:
        self._texts = [Text() for _ in headings]
        self._bar = progress_bar(console)
        self._task = self._bar.add_task("answers", total=len(headings))
        panels = (
            Panel(text, title=heading, title_align="left")
            for text, heading in zip(self._texts, headings, strict=True)
        )
        # The bar comes first: a screen that is too low for all panels cuts off the lower ones.
        self._live = Live(Group(self._bar, *panels), console=console)

    def __enter__(self) -> LiveAnswers:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)

    def add(self, index: int, text: str) -> None:
        """More text of the answer to prompt `index`."""
        self._texts[index].append(text)

    def finish(self, index: int) -> None:
        """The answer to prompt `index` is complete."""
        self._bar.advance(self._task)


def progress_bar(console: Console) -> Progress:
    """A bar that counts finished answers; nothing unless `console` is a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )

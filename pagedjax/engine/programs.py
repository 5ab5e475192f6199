"""Brings an engine's programs into being: taken from an earlier start, or lowered and compiled.

Tracing and lowering is Python, which one thread at a time can run; compiling is XLA's and runs
beside it. So one thread lowers, program after program, and others compile what it has lowered: the
first program is being compiled while the second is lowered. Were each thread to do both, all would
share the interpreter and nothing would be lowered until nearly everything is. For the same reason
nothing is written for the next start until all is lowered.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pagedjax.engine.program_store import Program, ProgramStore
from pagedjax.heap import uncollected_heap

_log = logging.getLogger(__name__)

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(slots=True, kw_only=True)
class BuildTimes:
    """Where the time of `build` went. Seconds.

    Attributes:
        programs: how many there are now.
        kept: how many of these an earlier start had left.
        load_s: until those were loaded.
        lower_s: tracing and lowering of the others, one after another.
        compile_s: compiling them, summed over threads that do so at the same time.
        rest_s: from the last one's lowering until everything was compiled.
        wall_s: in all.
    """

    programs: int = 0
    kept: int = 0
    load_s: float = 0.0
    lower_s: float = 0.0
    compile_s: float = 0.0
    rest_s: float = 0.0
    wall_s: float = 0.0


def build(
    programs: Mapping[KeyT, Program],
    *,
    store: ProgramStore | None = None,
    others: Sequence[Callable[[], object]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[KeyT, Any], BuildTimes]:
    """Load or compile programs, several at a time.

    Args:
        programs: what takes longest to compile comes first.
        store: has those of earlier starts, and gets what is compiled; None compiles all.
        others: small things to compile beside them.
        progress: called with (programs done, programs in all) after each.

    Returns:
        The compiled programs, and where the time went.
    """
    begin = time.perf_counter()
    times, built = BuildTimes(programs=len(programs)), {}
    to_keep: list[KeyT] = []

    def done(key: KeyT, code: Any) -> None:
        built[key] = code
        if progress is not None:
            progress(len(built), len(programs))

    def finish(jobs: Iterable[Future[_Compiled[KeyT]]]) -> None:
        for job in jobs:
            made = job.result()
            times.compile_s += made.seconds
            if made.can_be_kept:
                to_keep.append(made.key)
            done(made.key, made.code)

    # A thread for each core: most of a compile is a single thread. There is never more to compile
    # than has been lowered, so that lowering gets the core that it needs.
    with uncollected_heap(), ThreadPoolExecutor(num_cores()) as threads:
        beside = [threads.submit(other) for other in others]
        if store is not None:
            for key, code in zip(programs, threads.map(store.load, programs.values()), strict=True):
                if code is not None:
                    done(key, code)
        times.kept, times.load_s = len(built), time.perf_counter() - begin
        waiting: set[Future[_Compiled[KeyT]]] = set()
        for key in [key for key in programs if key not in built]:
            start = time.perf_counter()
            lowered = programs[key].lower()
            times.lower_s += time.perf_counter() - start
            waiting.add(threads.submit(_compile, key, programs[key], lowered, store))
            ready, waiting = wait(waiting, timeout=0)
            finish(ready)
        start = time.perf_counter()
        while waiting or to_keep:
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            finish(ready)
            if store is not None:
                keep = store.keep
                beside += [threads.submit(keep, programs[key], built[key]) for key in to_keep]
                to_keep.clear()
        for job in beside:
            job.result()
    if store is not None:
        store.trim()
    now = time.perf_counter()
    times.rest_s, times.wall_s = now - start, now - begin
    return built, times


@dataclass(frozen=True, slots=True)
class _Compiled(Generic[KeyT]):
    key: KeyT
    code: Any
    can_be_kept: bool
    seconds: float


def _compile(
    key: KeyT, program: Program, lowered: Any, store: ProgramStore | None
) -> _Compiled[KeyT]:
    start = time.perf_counter()
    if store is None:
        code, can_be_kept = lowered.compile(program.options), False
    else:
        code, can_be_kept = store.compile(program, lowered)
    return _Compiled(key, code, can_be_kept, time.perf_counter() - start)


def report(what: str, times: BuildTimes) -> None:
    """Log where the time went, at level INFO."""
    _log.info(
        "%s: %d programs in %.1f s, %d of them from an earlier start (%.1f s); the others: "
        "lowered in %.1f s, compiled in %.1f s of several threads, the last %.1f s later",
        what,
        times.programs,
        times.wall_s,
        times.kept,
        times.load_s,
        times.lower_s,
        times.compile_s,
        times.rest_s,
    )


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

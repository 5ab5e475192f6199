"""What Python's garbage collector need not look at, as programs are made and tokens generated."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Objects more than were freed, after which the collector looks at the new ones. A step's are freed
# while the next are made, a few for each sequence: they alone are never a reason to look.
_NEW_OBJECTS = 50_000

_lock = threading.Lock()
_inside = 0  # blocks that have begun and not ended, of all threads
_thresholds = gc.get_threshold()  # from before the first of them


@contextmanager
def settled_heap() -> Iterator[None]:
    """Keep the collector, inside the block, to what is made inside the block, and to less often.

    A full collection looks at every object that there is, which with JAX loaded are hundreds of
    thousands: a pause of a tenth of a second, as long as dozens of steps, and each step makes
    enough objects to bring the next one nearer. Whatever was there before is looked at again
    afterwards, so that nothing is lost for good. Blocks of several threads may overlap: the first
    to begin settles the heap, and the last to end unsettles it.
    """
    global _inside, _thresholds
    with _lock:
        if not _inside:
            _thresholds = gc.get_threshold()
            gc.freeze()
            gc.set_threshold(_NEW_OBJECTS, *_thresholds[1:])
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                gc.set_threshold(*_thresholds)
                gc.unfreeze()


@contextmanager
def uncollected_heap() -> Iterator[None]:
    """Keep the collector off inside the block, and leave it as it was.

    Tracing makes many objects that stay, so that even looking at the new ones alone, as in
    `settled_heap`, finds next to nothing and takes a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

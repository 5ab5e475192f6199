"""When the next step has to be planned, so that who comes meanwhile may be in it."""

from __future__ import annotations

import time
from collections import defaultdict, deque

from pagedjax.engine.buckets import Bucket
from pagedjax.engine.in_flight import InFlight

_REMEMBERED = 8  # durations of each size of step; the shortest of them is what is counted on
_MARGIN_S = 2e-3  # besides twice the time that it takes to launch
_LOOK_S = 1e-3  # how often to look whether the step is done sooner than foreseen


class Pace:
    """Predicts when the device will want another step, from how long such steps have taken.

    A step that is planned as soon as there is room for it waits behind a whole other one, and a
    request that comes after its plan waits for both. Planned shortly before the device is done
    with the other one, it keeps the device as busy. Callers hear of the step before in between,
    not behind a plan and a launch that take longer the more requests there are.
    """

    def __init__(self) -> None:
        self._took: defaultdict[Bucket, deque[float]] = defaultdict(
            lambda: deque(maxlen=_REMEMBERED)
        )
        self._read = self._due = 0.0

    def read(self, done: InFlight, running: InFlight, now: float) -> None:
        """Take in that a step is done and the next one has begun.

        Args:
            done: whose tokens have been read.
            running: what the device does now.
            now: by the monotonic clock.
        """
        # The device was idle between the end of one step and the late launch of the next.
        self._took[done.bucket].append(now - max(self._read, done.launched))
        self._read = self._due = now
        if self._took[running.bucket]:
            launch_s = running.launched - running.planned
            self._due += min(self._took[running.bucket]) - 2 * launch_s - _MARGIN_S

    def has_time(self) -> bool:
        """Whether the next step is better planned later."""
        return time.monotonic() < self._due

    def sleep(self, running: InFlight) -> None:
        """Until the next step has to be planned, or the device has nothing else to do.

        Where the host was held up, as by a compile, all it knows of such steps may be too long.
        Sleeping for as long would have the next one seem just as long.

        Args:
            running: what the device does now.
        """
        while (left := self._due - time.monotonic()) > 0 and not running.is_done():
            time.sleep(min(left, _LOOK_S))

"""What the device did while a function ran: time idle, kernels by time, from the JAX profiler.

    profile = profile_device(lambda: run_steps(50))
    print(profile.idle_share, profile.kernels[:10])

Whoever looks disturbs: inside a CUDA graph every traced kernel starts a little later. So only gaps
of more than `WAIT_US` between kernels count as idle: then the device waits for the host. The others
are `gap_share`, and mostly the profiler's. Copies between host and device do not count as work. On
a CPU, for dry runs, the operations of the compiled programs stand in for kernels.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

HOST_COPIES = ("MemcpyH2D", "MemcpyD2H")
WAIT_US = 10.0
Event = tuple[str, float, float]  # name, start and end in nanoseconds


class Kernel(NamedTuple):
    """All runs of the kernels of one name, numbers at its end left out."""

    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What one device did.

    Attributes:
        window_us: from the start of the first kernel to the end of the last.
        busy_us: of that, time in which at least one kernel ran.
        waiting_us: of that, gaps of more than `WAIT_US` in which none ran.
        host_copies_us: time of copies between host and device, which may run beside kernels.
        kernels: by total time, longest first.
    """

    window_us: float
    busy_us: float
    waiting_us: float
    host_copies_us: float
    kernels: list[Kernel]

    @property
    def idle_share(self) -> float:
        """Share of the window in which the device had nothing to do, 0 to 1."""
        return self.waiting_us / self.window_us

    @property
    def gap_share(self) -> float:
        """Share of the window in the other gaps between kernels."""
        return 1 - (self.busy_us + self.waiting_us) / self.window_us

    @property
    def num_kernels(self) -> int:
        """Kernels run, each time counted."""
        return sum(kernel.count for kernel in self.kernels)

    def figures(self, steps: int, top: int = 20) -> dict[str, Any]:
        """Per step, for a line of `record`, when the function ran `steps` steps."""
        return {
            "profiled_step_us": round(self.window_us / steps, 1),
            "idle_share": round(self.idle_share, 4),
            "gap_share": round(self.gap_share, 4),
            "host_copies_us": round(self.host_copies_us / steps, 2),
            "kernels_per_step": round(self.num_kernels / steps, 1),
            "top_kernels": [
                {
                    "name": kernel.name[:100],
                    "per_step": round(kernel.count / steps, 2),
                    "us_per_step": round(kernel.total_us / steps, 2),
                }
                for kernel in self.kernels[:top]
            ],
        }


def profile_device(fn: Callable[[], object], *, keep: Path | None = None) -> DeviceProfile:
    """Run `fn` under the profiler.

    Args:
        fn: what to run, compiled before; arrays that it returns are waited for.
        keep: leave the trace in this directory, for a viewer.

    Raises:
        ValueError: the trace shows no kernel of the default device.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as scratch:
        directory = keep or Path(scratch)
        with jax.profiler.trace(str(directory), profiler_options=options):
            jax.block_until_ready(fn())
        # a directory that is kept may hold older traces
        latest = max(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
        data = ProfileData.from_file(str(latest))
        return summary(device_events(data, jax.default_backend()))


def device_events(data: ProfileData, platform: str) -> Iterator[Event]:
    """Everything that ran on the first GPU, or on a CPU the operations of programs.

    Args:
        data: a trace.
        platform: `gpu` or `cpu`.

    Raises:
        ValueError: the trace has no such part, or the GPU's part no line of a stream.
    """
    planes = {plane.name: plane for plane in data.planes}
    wanted = {"gpu": "/device:GPU:0", "cpu": "/host:CPU"}[platform]
    if wanted not in planes:
        raise ValueError(f"want {wanted} in the trace, got {sorted(planes)}")
    if platform == "cpu":
        yield from _cpu_operations(planes[wanted])
        return
    gpu = planes[wanted]
    # Other lines repeat the events of the streams, by module or by operation.
    lines = list(gpu.lines)
    streams = [line for line in lines if line.name.startswith("Stream")]
    if not streams:
        names = [line.name for line in lines]
        raise ValueError(f"want lines named Stream in the trace of a GPU, got {names}")
    for line in streams:
        for event in line.events:
            yield event.name, event.start_ns, event.start_ns + event.duration_ns


def _cpu_operations(plane: Any) -> Iterator[Event]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="builtin type event_stats")
        for line in plane.lines:
            for event in line.events:
                if any(name == "hlo_op" for name, _ in event.stats):
                    yield event.name, event.start_ns, event.start_ns + event.duration_ns


def summary(events: Iterable[Event]) -> DeviceProfile:
    """Figures of events in any order, overlapping or not.

    Raises:
        ValueError: none of them is a kernel.
    """
    spans: list[tuple[float, float]] = []
    kernels: dict[str, list[float]] = defaultdict(list)
    host_copies = 0.0
    for name, start, end in events:
        if name.startswith(HOST_COPIES):
            host_copies += end - start
        else:
            spans.append((start, end))
            kernels[re.sub(r"([._]\d+)+$", "", name)].append(end - start)
    if not spans:
        raise ValueError("got a trace without kernels")
    busy, waiting, until = 0.0, 0.0, min(spans)[0]
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        if start - until > WAIT_US * 1e3:
            waiting += start - until
        until = max(until, end)
    totals = [Kernel(name, len(laps), sum(laps) / 1e3) for name, laps in kernels.items()]
    return DeviceProfile(
        window_us=(until - min(spans)[0]) / 1e3,
        busy_us=busy / 1e3,
        waiting_us=waiting / 1e3,
        host_copies_us=host_copies / 1e3,
        kernels=sorted(totals, key=lambda kernel: -kernel.total_us),
    )

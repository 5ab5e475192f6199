"""Reading back what `record` wrote: which lines count, and what stands beside what."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]
Lines = dict[tuple[str, ...], Line]  # bench, device, case, and what else tells lines apart

# What tells the lines of one case apart, where one run writes several.
VARIED = {
    "serving": ("arrivals", "load", "max_num_seqs", "max_num_batched_tokens", "ttft_target_s"),
    "step": ("without_cuda_graphs",),
    "kv_memory": ("trace",),
    "offline": (
        "max_num_seqs", "max_num_batched_tokens", "block_size", "prefix_caching",
        "contiguous_blocks",
    ),
}  # fmt: skip
BENCHES = (
    "offline", "torch_generate", "torch_continuous", "step", "torch_step", "serving",
    "profile", "golden", "shared_prompt", "preemption", "offload", "generate", "kv_accuracy",
    "kv_memory", "sharing",
)  # fmt: skip


def read_lines(paths: Iterable[Path]) -> Lines:
    """The latest line of every case.

    Raises:
        ValueError: a line is no JSON object, or lacks its benchmark or case.
    """
    latest: Lines = {}
    for path in sorted(paths):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path.name}, line {number}: {error}") from None
            if not isinstance(line, dict) or not {"bench", "case"} <= set(line):
                raise ValueError(f"{path.name}, line {number}: want an object with bench and case")
            if line["bench"] in BENCHES:
                latest.pop(key(line), None)  # the order is that of the lines that count
                latest[key(line)] = line
    return latest


def key(line: Line) -> tuple[str, ...]:
    """Which measurement a line is."""
    varied = [line.get(name) or "" for name in VARIED.get(line["bench"], ())]
    if line["bench"] == "serving" and line.get("load") is None:
        # A load is a fraction of what was measured in the same run, so that its rate differs from
        # run to run; only without one is it the rate that was asked for.
        varied.append(line.get("rate_per_s") or "")
    return (line["bench"], device(line), line["case"], *map(str, varied))


def device(line: Line) -> str:
    """The device that was measured; PyTorch's lines name the processor beside it."""
    name = line.get("torch_device") or line["device"]
    return line.get("cpu", line["device"]) if name == "cpu" else name


def of_bench(lines: Lines, bench: str) -> list[Line]:
    """The lines of one benchmark."""
    return [line for line in lines.values() if line["bench"] == bench]


def beside(lines: Lines, line: Line, bench: str) -> Line | None:
    """Another contender's line of the same case on the same device.

    None of them compresses its cache, so a case with a compressed one is set beside theirs.
    """
    dtype = line["case"].split()[1]
    case = line["case"].replace(dtype, dtype.split("/")[0])
    return lines.get((bench, device(line), case))

"""The tables of the README and the plots, from the committed lines of measurements.

    python -m benchmarks.compare             write them anew
    python -m benchmarks.compare --check     exit with 1 if the README says something else

Everything comes from `benchmarks/results/*.jsonl`. Of several lines of one case on one device, the
last one counts, files in the order of their names. Lines of other benchmarks are passed over. A
contender is set beside this engine only on the same device, and whoever wins is not asked.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lines import Lines, device, read_lines
from benchmarks.memory_tables import (
    free_list_table,
    golden_table,
    kv_accuracy_table,
    offload_table,
    preemption_table,
    prefix_table,
    shared_prompt_table,
    sharing_table,
    waste_table,
)
from benchmarks.tables import (
    WIDTH,
    generate_table,
    memory_table,
    offline_table,
    profile_table,
    serving_table,
    step_table,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks.compare: begin -->\n", "<!-- benchmarks.compare: end -->\n"


TABLES: tuple[Callable[[Lines], str], ...] = (
    offline_table, memory_table, step_table, serving_table, profile_table, golden_table,
    shared_prompt_table, preemption_table, offload_table, generate_table, kv_accuracy_table,
    sharing_table, waste_table, free_list_table, prefix_table,
)  # fmt: skip


def versions(lines: Lines) -> str:
    """What software the lines were measured with."""
    found: dict[str, set[str]] = {}
    for line in lines.values():
        for name in ("jax", "torch", "transformers", "commit"):
            if name in line:
                found.setdefault(name, set()).add(str(line[name]))
    text = ", ".join(f"{name} {', '.join(sorted(found[name]))}" for name in found)
    weights = (
        "Weights are random in the named shape"
        if any(line.get("weights") == "random" for line in lines.values())
        else "Weights are those of the named model"
    )
    return textwrap.fill(f"{weights}; greedy, outputs of exact length. {text}.", WIDTH) + "\n"


def section(lines: Lines) -> str:
    """The README's part: for each device its tables, those without lines left out."""
    parts = []
    devices = {device(line) for line in lines.values()}
    for name in sorted(devices, key=lambda name: (not name.startswith("NVIDIA"), name)):
        own = {k: line for k, line in lines.items() if device(line) == name}
        tables = [text for text in (make(own) for make in TABLES) if text]
        if tables:
            parts += [f"### {name}\n", versions(own), *tables]
    parts += [f"![{path.stem}]({path.relative_to(ROOT)})\n" for path in plots()]
    return "\n".join(parts)


def plots() -> list[Path]:
    """The plots that there are."""
    return sorted((RESULTS / "plots").glob("*.png"))


def renewed(readme: str, text: str) -> str:
    """The README with `text` between its marks.

    Raises:
        ValueError: it has not each mark once, in order.
    """
    before, found, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not found or not end or BEGIN in rest or END in after:
        raise ValueError(f"want {BEGIN.strip()} and then {END.strip()} in the README, once each")
    return before + BEGIN + "\n" + text + "\n" + END + after


def main(argv: Sequence[str] | None = None) -> int:
    """Write, or check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    args = parser.parse_args(argv)
    lines = read_lines(RESULTS.glob("*.jsonl"))
    readme = README.read_text(encoding="utf-8")
    if not args.check:
        from benchmarks.plots import draw

        draw(lines, RESULTS / "plots")
    wanted = renewed(readme, section(lines))
    if args.check:
        if readme != wanted:
            print("the README differs from the measurements: python -m benchmarks.compare")
        return int(readme != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

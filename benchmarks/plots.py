"""Plots of measurements as PNG files, for `benchmarks.compare`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lines import Line, Lines, beside
from benchmarks.tables import serving_label

CONTENDERS = {
    "offline": "pagedjax",
    "torch_generate": "transformers generate, padded batches",
    "torch_continuous": "transformers continuous batching",
}
COLOURS = ("#1f6feb", "#9a9a9a", "#d29922", "#57606a")


def draw(lines: Lines, folder: Path) -> list[Path]:
    """Draw anew what there are lines for, and take away what there are none for.

    Args:
        lines: the lines that count.
        folder: where the files belong, and nothing else.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for old in folder.glob("*.png"):
        old.unlink()
    files = []
    for name, figure in figures(lines, pyplot).items():
        folder.mkdir(parents=True, exist_ok=True)
        files.append(folder / f"{name}.png")
        # no date and no version inside: the same lines give the same file
        figure.savefig(files[-1], dpi=110, bbox_inches="tight", metadata={"Software": None})
        pyplot.close(figure)
    return files


def figures(lines: Lines, pyplot: Any) -> dict[str, Any]:
    """A figure for every GPU and kind of measurement, by the name of its file."""
    drawers: dict[str, Callable[[list[Line], Lines, Any], Any]] = {
        "offline": offline, "step": step, "serving": serving, "preemption": preemption,
    }  # fmt: skip
    drawn = {}
    for bench, drawer in drawers.items():
        by_device: dict[str, list[Line]] = defaultdict(list)
        for (kind, device, *_), line in lines.items():
            if kind == bench and device.startswith("NVIDIA"):
                by_device[device].append(line)
        for device, own in by_device.items():
            name = f"{bench}_{device.removeprefix('NVIDIA ').replace(' ', '_').lower()}"
            drawn[name] = drawer(own, lines, pyplot)
            drawn[name].suptitle(device)
    return drawn


def bars(
    pyplot: Any, labels: list[str], values: dict[str, list[float | None]], colours: Sequence[str]
) -> tuple[Any, Any]:
    """Groups of bars next to each other, each bar with its value; None leaves a gap."""
    figure, axes = pyplot.subplots(figsize=(3.5 + 1.2 * len(labels), 3.8), layout="constrained")
    width = 0.82 / len(values)
    for index, (name, colour) in enumerate(zip(values, colours, strict=True)):
        heights = [value or 0.0 for value in values[name]]
        places = [at + (index - (len(values) - 1) / 2) * width for at in range(len(labels))]
        drawn = axes.bar(places, heights, width, color=colour, label=name)
        texts = ["" if value is None else f"{value:.3g}" for value in values[name]]
        axes.bar_label(drawn, texts, fontsize=7, padding=1)
    axes.set_xticks(range(len(labels)), [x.replace(" ", "\n") for x in labels], fontsize=8)
    axes.margins(y=0.1)
    figure.legend(loc="outside lower center", ncols=len(values), fontsize=8)
    return figure, axes


def offline(own: list[Line], lines: Lines, pyplot: Any) -> Any:
    """Requests per second of every load with the options that serve it fastest, beside others."""
    fastest: dict[str, Line] = {}
    for line in sorted(own, key=lambda line: line["requests_per_s"]):
        fastest[line["case"]] = line
    own = [line for line in own if fastest[line["case"]] is line]
    rates: dict[str, list[float | None]] = {name: [] for name in CONTENDERS.values()}
    for line in own:
        for bench, name in CONTENDERS.items():
            found = line if bench == "offline" else beside(lines, line, bench)
            rates[name].append(None if found is None else found["requests_per_s"])
    figure, axes = bars(pyplot, [line["case"] for line in own], rates, COLOURS[:3])
    axes.set_yscale("log")  # loads differ by tens
    axes.set_ylabel("requests/s")
    return figure


def step(own: list[Line], lines: Lines, pyplot: Any) -> Any:
    """Milliseconds of a decode step of every case, with floor and PyTorch."""
    theirs = [beside(lines, line, "torch_step") for line in own]
    times: dict[str, list[float | None]] = {
        "floor": [line["floor_us"] / 1e3 for line in own],
        "pagedjax": [line["step_us"] / 1e3 for line in own],
        "PyTorch: compiled, CUDA graph": [x["step_us"] / 1e3 if x else None for x in theirs],
    }
    colours = (COLOURS[3], COLOURS[0], COLOURS[1])
    figure, axes = bars(pyplot, [line["case"] for line in own], times, colours)
    axes.set_ylabel("decode step, ms")
    return figure


def serving(own: list[Line], lines: Lines, pyplot: Any) -> Any:
    """Time to first token and interval between tokens against the rate of arrival."""
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 4), layout="constrained")
    by_case: dict[str, list[Line]] = defaultdict(list)
    for line in own:
        by_case[serving_label(line)].append(line)
    shown = {"ttft": "time to first token, ms", "itl": "interval between tokens, ms"}
    for axes, (name, title) in zip(panels, shown.items(), strict=True):
        for (case, points), colour in zip(by_case.items(), COLOURS * len(by_case), strict=False):
            points.sort(key=lambda line: line["rate_per_s"])
            rates = [line["rate_per_s"] for line in points]
            for percentile, style in ((50, "-"), (90, "--"), (99, ":")):
                values = [line[f"{name}_p{percentile}_ms"] for line in points]
                label = f"{case}, p{percentile}" if name == "ttft" else None
                axes.plot(rates, values, style, marker="o", color=colour, label=label, ms=3)
        axes.set_xlabel("requests/s")
        axes.set_ylabel(title)
        axes.set_yscale("log")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    return figure


def preemption(own: list[Line], lines: Lines, pyplot: Any) -> Any:
    """Milliseconds to bring back sequences of every length, measured and modelled."""
    del lines
    by_model: dict[str, list[Line]] = defaultdict(list)
    for line in own:
        if "swap_ms" in line:
            by_model[line["case"].partition(" length")[0]].append(line)
    count = max(len(by_model), 1)
    figure, panels = pyplot.subplots(
        1, count, figsize=(1 + 5 * count, 4), layout="constrained", squeeze=False
    )
    for axes, (model, rows) in zip(panels[0], by_model.items(), strict=False):
        rows.sort(key=lambda line: line["tokens"])
        lengths = [row["tokens"] for row in rows]
        for name, colour in (("swap", COLOURS[0]), ("recompute", COLOURS[2])):
            axes.plot(lengths, [row[f"{name}_ms"] for row in rows], "o-", color=colour, label=name)
            modelled = [row[f"modelled_{name}_ms"] for row in rows]
            axes.plot(lengths, modelled, ":", color=colour, label=f"{name}, cost model")
        axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="ms")
        axes.set_title(model, fontsize=9)
        axes.legend()
    return figure

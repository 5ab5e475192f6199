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

from benchmarks.lines import Line, Lines, beside, device, of_bench, read_lines

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- benchmarks.compare: begin -->\n", "<!-- benchmarks.compare: end -->\n"
WIDTH = 110  # of text in the README


def number(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def ratio(ours: float, theirs: float | None) -> str:
    """How many times as good this engine is; a dash without a contender."""
    return "–" if theirs is None else f"{ours / theirs:.2f}"


def table(note: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A note and a table, first column to the left, the others to the right; empty without rows."""
    if not rows:
        return ""
    aligned = ["---", *["---:"] * (len(head) - 1)]
    body = "".join("| " + " | ".join(row) + " |\n" for row in (head, aligned, *rows))
    return f"{textwrap.fill(note, WIDTH)}\n\n{body}"


def throughput_cell(line: Line | None) -> str:
    """Requests per second and output tokens per second."""
    if line is None:
        return "–"
    mark = "" if line.get("complete", True) else " †"
    per_s = number(line["requests_per_s"])
    return f"{per_s} · {number(line['output_tokens_per_s'])}{mark}"


def offline_table(lines: Lines) -> str:
    """Lists of requests, beside transformers."""
    rows = []
    for line in of_bench(lines, "offline"):
        static, paged = (beside(lines, line, b) for b in ("torch_generate", "torch_continuous"))
        rates = [None if x is None else x["requests_per_s"] for x in (static, paged)]
        count = line["requests"]
        lengths = (f"{line[name] / count:,.0f}" for name in ("prompt_tokens", "output_tokens"))
        rows.append([
            f"{line['case']} ({count} × {' + '.join(lengths)})",
            throughput_cell(line), throughput_cell(static), throughput_cell(paged),
            *(ratio(line["requests_per_s"], rate) for rate in rates),
        ])  # fmt: skip
    note = (
        "Requests to the end, all there at the start: requests/s · output tokens/s. In brackets: "
        "requests × mean prompt + output tokens. Beside it (a) transformers' `generate` in padded "
        "batches with contiguous caches, (b) its continuous batching. The ratios are this engine's "
        "requests/s over theirs. † broken off at a time limit; the rate is that of the requests "
        "finished."
    )
    head = ["shape, dtype, load", "pagedjax", "(a)", "(b)", "to (a)", "to (b)"]
    return table(note, head, rows)


def memory_table(lines: Lines) -> str:
    """What the same runs did with the KV pool."""
    rows = [
        [
            line["case"],
            f"{100 * line['mean_kv_utilisation']:.0f} / {100 * line['peak_kv_utilisation']:.0f}",
            f"{100 * line['mean_kv_waste']:.1f}",
            str(line["preemptions"]),
            f"{100 * line['kv_saving']:.0f}",
            f"{line['peak_running']:,}",
            f"{100 * line['matmul_share']:.0f}",
            "–" if line["peak_device_bytes"] is None else number(line["peak_device_bytes"] / 1e9),
            number(line["weights_s"] + line["engine_start_s"]),
        ]
        for line in of_bench(lines, "offline")
        if "mean_kv_waste" in line
    ]
    note = (
        "The same runs: share of the KV pool in use, mean / peak; positions in these blocks "
        "without a token; sequences preempted; by how much the most blocks in use are smaller than "
        "contiguous caches of the model's maximum length for the most sequences that ran at once; "
        "operations of the model per second over those of a large matrix product; peak of the "
        "device's memory; seconds from nothing to a warm engine, imports left out."
    )
    head = ["shape, dtype, load", "pool used, %", "waste, %", "preempted", "saved, %", "at once",
            "of matmul, %", "peak, GB", "start, s"]  # fmt: skip
    return table(note, head, rows)


def step_table(lines: Lines) -> str:
    """Decode steps, beside plain PyTorch and the floor."""
    rows = []
    for line in of_bench(lines, "step"):
        torch = beside(lines, line, "torch_step")
        theirs = None if torch is None else torch["step_us"]
        rows.append([
            line["case"], number(line["step_us"] / 1e3), number(line["caller_us"] / 1e3),
            number(line["floor_us"] / 1e3), f"{line['ratio_to_floor']:.2f}",
            "–" if theirs is None else number(theirs / 1e3),
            "–" if theirs is None else f"{theirs / line['step_us']:.2f}",
        ])  # fmt: skip
    note = (
        "One decode step of batch × context, ms: with the device always busy, per token seen by a "
        "caller, and the least time that reading weights, keys and values takes at the rate of a "
        "device copy. Beside it (c) a step by hand in PyTorch: torch.compile, one CUDA graph, SDPA "
        "on contiguous keys and values; how many times as fast this engine's step is."
    )
    head = [
        "shape, dtype, case",
        "pagedjax",
        "caller",
        "floor",
        "to floor",
        "(c)",
        "(c) / pagedjax",
    ]
    return table(note, head, rows)


def serving_table(lines: Lines) -> str:
    """Latencies under load."""
    rows = []
    for line in of_bench(lines, "serving"):
        load = "" if line["load"] is None else f" ({100 * line['load']:.0f} %)"
        cells = [
            " / ".join(number(line[f"{name}_p{p}_ms"]) for p in (50, 90, 99))
            for name in ("ttft", "itl", "e2e")
        ]
        rows.append([
            f"{line['case']}, {line['arrivals']}", f"{number(line['rate_per_s'])}{load}", *cells,
            f"{number(line['goodput_per_s'])} ({100 * line['good_share']:.0f} %)",
        ])  # fmt: skip
    note = (
        "Requests that arrive over time, through `AsyncLLM`: requests/s (share of saturation), "
        "then p50 / p90 / p99 in ms of the time to the first token, the interval between tokens "
        "and the whole request, and requests/s within the bounds of the line on the first two."
    )
    head = ["shape, dtype, load", "rate", "TTFT", "ITL", "whole", "goodput"]
    return table(note, head, rows)


def shared_prompt_table(lines: Lines) -> str:
    """First tokens under one system prompt."""
    rows = [
        [
            line["case"], f"{100 * line['hit_share']:.0f}",
            *(number(line[f"ttft_{part}_ms"]) for part in ("p50", "p99", "mean")),
            number(line["ttft_mean_speedup"]) if "ttft_mean_speedup" in line else "–",
        ]
        for line in of_bench(lines, "shared_prompt")
    ]  # fmt: skip
    note = (
        "Requests x (system prompt + tokens of their own) + output: without prefix caching, with "
        "an empty cache, and with the system prompt in it. Share of the prompts' tokens found; "
        "time to the first token in ms; how many times as long it is without the cache. All "
        "requests are there at once unless a rate is named."
    )
    head = ["shape, dtype, load", "found, %", "TTFT p50", "p99", "mean", "mean without / with"]
    return table(note, head, rows)


def profile_table(lines: Lines) -> str:
    """Idle time of the device in the middle of a run."""
    rows = [
        [
            line["case"], str(line["running_at_start"]), number(line["step_us"] / 1e3),
            f"{100 * line['idle_share']:.1f}", f"{line['kernels_per_step']:,.0f}",
            str(line["compiles_after_warmup"]),
        ]
        for line in of_bench(lines, "profile")
    ]  # fmt: skip
    note = "The device in the middle of a run of so many sequences, by the JAX profiler."
    head = ["shape, dtype, sequences × prompt", "running", "step, ms", "idle, %", "kernels a step",
            "compiles after warm-up"]  # fmt: skip
    return table(note, head, rows)


def generate_table(lines: Lines) -> str:
    """Prompts at once, beside transformers with the same weights."""
    rows = []
    for line in of_bench(lines, "generate"):
        padded, alone = (line[f"{n}_tokens_per_s"] for n in ("padded_batch", "one_by_one"))
        ours = line["engine_tokens_per_s"]
        rows.append([
            f"{line['model']} {line['dtype']}, {line['case'].replace('_', ' ')}", number(ours),
            number(padded), number(alone), ratio(ours, padded), ratio(ours, alone),
        ])  # fmt: skip
    note = (
        "Prompts at once with real weights, tokens/s, beside transformers' `generate` on the same "
        "device: (a) all in one padded batch, (b) one after another."
    )
    head = ["model, load", "pagedjax", "(a)", "(b)", "to (a)", "to (b)"]
    return table(note, head, rows)


def kv_accuracy_table(lines: Lines) -> str:
    """What a compressed KV cache costs in accuracy."""
    rows = [
        [
            line["case"], f"{line['kv_bytes_per_token']:,}", f"{line['perplexity']:.3f}",
            f"{100 * line['agreement']:.1f}", f"{line['mean_abs_logprob_error']:.3f}",
        ]
        for line in of_bench(lines, "kv_accuracy")
    ]  # fmt: skip
    note = (
        "Compressed KV caches, calibrated by the built-in text: bytes of a token; perplexity over "
        "prompts and answers; share of the golden answers' tokens that are the likeliest ones when "
        "all before them are given; mean difference of a token's log-probability from the cache "
        "that is not compressed."
    )
    head = ["model", "bytes", "perplexity", "agreement, %", "difference"]
    return table(note, head, rows)


TABLES: tuple[Callable[[Lines], str], ...] = (
    offline_table, memory_table, step_table, serving_table, shared_prompt_table, profile_table,
    generate_table, kv_accuracy_table,
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

"""The README's tables of speed, each made from the lines of one benchmark."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.lines import Line, Lines, beside, of_bench
from pagedjax import EngineConfig

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


def offline_label(line: Line) -> str:
    """The case of a list of requests, and how the engine was set up for it."""
    options = [f"{line['max_num_seqs']} at once", f"{line['max_num_batched_tokens']:,} a step"]
    if line["block_size"] != EngineConfig().block_size:
        options.append(f"blocks of {line['block_size']}")
    options += [
        name.replace("_", " ") for name in ("prefix_caching", "contiguous_blocks") if line.get(name)
    ]
    return ", ".join((line["case"], *options))


def offline_table(lines: Lines) -> str:
    """Lists of requests, beside transformers."""
    rows = []
    for line in of_bench(lines, "offline"):
        static, paged = (beside(lines, line, b) for b in ("torch_generate", "torch_continuous"))
        rates = [None if x is None else x["requests_per_s"] for x in (static, paged)]
        count = line["requests"]
        lengths = (f"{line[name] / count:,.0f}" for name in ("prompt_tokens", "output_tokens"))
        rows.append([
            f"{offline_label(line)} ({count} × {' + '.join(lengths)})",
            throughput_cell(line), throughput_cell(static), throughput_cell(paged),
            *(ratio(line["requests_per_s"], rate) for rate in rates),
        ])  # fmt: skip
    note = (
        "Requests to the end, all there at the start: requests/s · output tokens/s, with so many "
        "sequences at once (`max_num_seqs`) and tokens in a step (`max_num_batched_tokens`) at "
        "most. In brackets: requests × mean prompt "
        "+ output tokens. Beside it (a) transformers' `generate` in padded "
        "batches with contiguous caches, (b) its continuous batching. The ratios are this engine's "
        "requests/s over theirs. Prefix caching, on by default, is off where a line does not name "
        "it. † broken off at a time limit; the rate is that of the requests finished."
    )
    head = ["shape, dtype, load", "pagedjax", "(a)", "(b)", "to (a)", "to (b)"]
    return table(note, head, rows)


def memory_table(lines: Lines) -> str:
    """What the same runs did with the KV pool."""
    rows = [
        [
            offline_label(line),
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
            line["case"] + (", without CUDA graphs" if line.get("without_cuda_graphs") else ""),
            number(line["step_us"] / 1e3), number(line["caller_us"] / 1e3),
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


def serving_label(line: Line) -> str:
    """The case of a load, how requests arrive, and how the engine was set up for it."""
    options = [f"{line['max_num_seqs']} at once", f"{line['max_num_batched_tokens']:,} a step"]
    if line.get("ttft_target_s") is not None:
        options.append(f"target {1e3 * line['ttft_target_s']:.0f} ms")
    return ", ".join((line["case"], line["arrivals"], *options))


def serving_table(lines: Lines) -> str:
    """Latencies under load."""
    rows, bounds = [], set()
    for line in of_bench(lines, "serving"):
        bounds.add(f"{line['ttft_bound_ms']:.0f} and {line['itl_bound_ms']:.0f} ms")
        load = "" if line["load"] is None else f" ({100 * line['load']:.0f} %)"
        cells = [
            " / ".join(number(line[f"{name}_p{p}_ms"]) for p in (50, 90, 99))
            for name in ("ttft", "itl", "e2e")
        ]
        rows.append([
            serving_label(line), f"{number(line['rate_per_s'])}{load}", *cells,
            f"{number(line['goodput_per_s'])} ({100 * line['good_share']:.0f} %)",
        ])  # fmt: skip
    note = (
        "Requests that arrive over time, through `AsyncLLM`, with so many requests and tokens in a "
        "step at most and, where it is named, a target for the first token (`ttft_target_s`): "
        "requests/s (share of saturation), then p50 / p90 / p99 in ms of the time to the first "
        "token, the interval between tokens and the whole request. Goodput: requests/s, over all "
        "the time until the last one ended, whose first token and 99th percentile of intervals "
        f"were within {' or '.join(sorted(bounds))}, and their share of the requests. Engines with "
        "other options reach another saturation, and so another rate."
    )
    head = ["shape, dtype, load", "rate", "TTFT", "ITL", "whole", "goodput"]
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
    note = (
        "The device in the middle of a run of so many sequences, from that step of the run on, by "
        "the JAX profiler."
    )
    head = ["shape, dtype, load", "running", "step, ms", "idle, %", "kernels a step",
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

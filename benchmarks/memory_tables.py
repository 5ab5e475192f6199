"""The README's tables of the memory system and of accuracy."""

from __future__ import annotations

from benchmarks.lines import Lines, of_bench
from benchmarks.tables import number, table


def waste_table(lines: Lines) -> str:
    """What paging leaves unused, beside contiguous caches."""
    rows = [
        [
            line["trace"], line["case"].removeprefix("waste_").replace("_", " "),
            f"{100 * line['waste_share']:.2f}", number(line["mean_running"]),
        ]
        for line in of_bench(lines, "kv_memory")
        if line["case"].startswith("waste_")
    ]  # fmt: skip
    note = (
        "Simulated without a model, all requests of a trace at once into memory for 448,000 "
        "tokens: share of the memory given to sequences that holds no token, and sequences at the "
        "same time. Paged in blocks of so many tokens; contiguous, reserved for the trace's "
        "longest request; contiguous, reserved for exactly what each request will need, which "
        "nobody knows in advance."
    )
    return table(note, ["trace", "memory", "without a token, %", "sequences"], rows)


def prefix_table(lines: Lines) -> str:
    """Prompt tokens found in the cache, beside what could be found."""
    shares = ("hit_share", "hit_share_lru", "hit_share_belady", "hit_share_infinite")
    rows = [
        [
            f"{line['trace']}, {line['case'].removeprefix('prefix_')}",
            *(f"{100 * line[share]:.1f}" for share in shares),
        ]
        for line in of_bench(lines, "kv_memory")
        if line["case"].startswith("prefix_")
    ]
    note = (
        "Simulated prefix caching, requests at the times of the trace: percent of the prompts' "
        "tokens found by the block manager; by an LRU cache and by one that knows the future "
        "(Belady), which no running sequence takes room from; by an infinite one."
    )
    return table(note, ["trace, memory in tokens", "found", "LRU", "Belady", "infinite"], rows)


def free_list_table(lines: Lines) -> str:
    """What a buddy system keeps together, beside a stack, and what that takes."""
    shares = ("external_fragmentation", "free_share", "unusable_16", "outside_longest_run")
    rows = [
        [
            f"{line['trace']}, {when}, {kind}",
            *(f"{100 * line[share]:.2f}" for share in shares),
            number(line["runs_per_seq"]), number(line["million_blocks_per_s"]),
        ]
        for line in of_bench(lines, "kv_memory")
        if line["case"].startswith("free_list_")
        for when, kind in [line["case"].removeprefix("free_list_").split("_")]
    ]  # fmt: skip
    note = (
        "The two free lists, simulated: a stack of single blocks, which is the default, and a "
        "buddy system of runs (`contiguous_blocks=True`); requests of a trace at its times, or all "
        "at once into a pool that is always full. Percent of the pool that is lost to who wants "
        "runs of 16 blocks, since it lies free in shorter ones (external fragmentation, Randell, "
        "1969; a sequence takes any block, so that none is ever refused for it); percent of the "
        "pool that is free; percent of this free part in runs shorter than 16 (Gorman and "
        "Whitcroft, 2006), and outside the longest run. Runs that a sequence lies in, which is how "
        "many copies would move it run by run; million blocks given and taken back per second."
    )
    head = ["trace, load, free list", "lost, %", "free, %", "of it < 16, %", "not longest, %",
            "runs", "M blocks/s"]  # fmt: skip
    return table(note, head, rows)


def sharing_table(lines: Lines) -> str:
    """Blocks that samples and beams of one prompt save."""
    rows = [
        [
            line["model"], line["case"].replace("_", " of "), f"{100 * line['saved_share']:.1f}",
            f"{line['peak_blocks']} / {line['peak_blocks_unshared']}",
        ]
        for line in of_bench(lines, "sharing")
    ]  # fmt: skip
    note = (
        "Samples and beams of 16 prompts, as in section 6.3 of the PagedAttention paper (Kwon et "
        "al., 2023): percent fewer blocks than if every sequence had its own, mean over all steps; "
        "most blocks in use / without sharing."
    )
    return table(note, ["model", "sequences of a prompt", "saved, %", "peak"], rows)


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


def preemption_table(lines: Lines) -> str:
    """How a preempted sequence comes back, and what that is worth in a burst."""
    rows = [
        [
            line["case"],
            *(number(line[f"{way}_ms"]) for way in ("swap", "recompute")),
            *(number(line[f"modelled_{way}_ms"]) for way in ("swap", "recompute")),
            line["chosen"], "–", "–",
        ]
        if "swap_ms" in line
        else [
            line["case"], *("–",) * 5, number(line["output_tokens_per_s"]),
            f"{line['preemptions']} / {line['swaps']}",
        ]
        for line in of_bench(lines, "preemption")
    ]  # fmt: skip
    note = (
        "Preemption. Lengths: milliseconds to copy the blocks of so many tokens to the host and "
        "back, and to compute them again, measured and as the cost model says, and what it "
        "chooses. Bursts, in a pool of a quarter of what all requests need: output tokens/s by "
        "policy, and preemptions / by swap."
    )
    head = ["shape, dtype, case", "swap", "recompute", "swap, model", "recompute, model", "chosen",
            "tokens/s", "preempted / swapped"]  # fmt: skip
    return table(note, head, rows)


def offload_table(lines: Lines) -> str:
    """Copies of blocks between device and host."""
    rows = [
        [
            line["case"],
            *(number(line[f"{what}_gb_per_s"]) for what in ("blocks", "plain")),
            f"{100 * line['link_share']:.0f}",
        ]
        for line in of_bench(lines, "offload")
        if "link_share" in line
    ]  # fmt: skip
    note = (
        "Blocks from anywhere in the pool to pinned host memory (store) and back (load), GB/s, "
        "beside one plain copy of as many bytes, in turns."
    )
    head = ["shape, dtype, direction", "blocks", "plain copy", "share, %"]
    return table(note, head, rows)


def golden_table(lines: Lines) -> str:
    """A real model's greedy tokens against those of transformers."""
    ways = ("alone", "batched", "chunked", "preempted")
    rows = [
        [
            line["case"],
            *(f"{line[way]} / {line['prompts']}" if way in line else "–" for way in ways),
            f"{100 * line['agreement']:.1f}",
        ]
        for line in of_bench(lines, "golden")
    ]
    note = (
        "A real model on this device: prompts whose greedy tokens are those of transformers in "
        "float32 on a CPU, one by one, all at once, in prefill chunks of 16, and in a pool so "
        "small that requests are preempted; share of the tokens that are the likeliest ones when "
        "all before them are given."
    )
    head = ["model, dtype", *ways, "agreement, %"]
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

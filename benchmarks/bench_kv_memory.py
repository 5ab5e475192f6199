"""What paging does for KV memory, simulated: `python -m benchmarks.bench_kv_memory --trace PATH`.

Without a model, on the lengths of a trace (Azure's `.csv` or Mooncake's `.jsonl`):

- `waste_*`: all requests at once into the same memory. Share of the memory given to sequences that
  holds no token, and sequences at the same time: blocks of 16 to 128 tokens, room for the longest
  request of the trace for each (what a contiguous cache has to reserve), and, as a bound for
  contiguous caches, room for exactly what each request will need.
- `free_list_*`: what the first of these asks of the block pool, with all requests at once (`full`)
  and with requests at the times of the trace (`timed`), on its two free lists. Blocks given and
  taken back per second of CPU time, and where they lie (`kv_simulation.Layout` defines it).
- `prefix_*` (traces that tell common prefixes): prompt tokens found in the cache, of those that an
  infinite one would find, by the block manager with requests at the times of the trace, by an LRU
  cache, and by one that knows the future (Belady). The last two keep whole pieces of 512 tokens,
  and no running sequence takes room from them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import kv_simulation as sim
from benchmarks.record import Figure, record
from benchmarks.workloads import PIECE, RequestShape, trace
from scheduler.config import BLOCK_SIZES
from scheduler.free_lists import BuddyFreeList, StackFreeList

Row = tuple[str, dict[str, Figure]]
PARTS = ("waste", "free_list", "prefix")


def waste(shapes: Sequence[RequestShape], pool_tokens: int, max_seqs: int) -> Iterator[Row]:
    """One row for each way to give memory to sequences."""
    longest = max(shape.prompt_len + shape.output_len for shape in shapes)
    ways = {f"paged_{size}": (sim.paged(size), size) for size in BLOCK_SIZES}
    ways |= {"reserved": (sim.reserved(longest), 1), "reserved_exactly": (sim.reserved_exactly, 1)}
    for name, (need, unit_tokens) in ways.items():
        units = pool_tokens // unit_tokens
        load = sim.simulate(shapes, need, units=units, unit_tokens=unit_tokens, max_seqs=max_seqs)
        yield (
            f"waste_{name}",
            {
                "requests": len(shapes),
                "pool_tokens": pool_tokens,
                "longest_request_tokens": longest,
                "waste_share": round(load.waste, 4),
                "mean_running": round(load.mean_running, 1),
                "tokens_held_share": round(load.utilisation, 4),
                "preemptions": load.preemptions,
                "steps": load.steps,
            },
        )


def free_lists(
    shapes: Sequence[RequestShape], pool_tokens: int, max_seqs: int, token_s: float
) -> Iterator[Row]:
    """One row for each free list and load, under the same operations."""
    units = pool_tokens // 16
    full = sim.simulate(shapes, sim.paged(16), units=units, unit_tokens=16, max_seqs=max_seqs)
    timed = sim.timed_operations(shapes, units=units, block_size=16, token_s=token_s)
    for when, operations in (("full", full.operations), ("timed", timed)):
        moved = 2 * sum(blocks for _, blocks in operations)
        for name, kind in (("stack", StackFreeList), ("buddy", BuddyFreeList)):
            seconds = min(sim.replay_seconds(operations, kind(1, units + 1)) for _ in range(3))
            layout = sim.replay_layout(operations, kind(1, units + 1), units + 1)
            yield (
                f"free_list_{when}_{name}",
                {
                    "requests": len({number for number, _ in operations}),
                    "operations": len(operations),
                    "blocks_moved": moved,
                    "million_blocks_per_s": round(moved / seconds / 1e6, 2),
                    "us_per_operation": round(seconds / len(operations) * 1e6, 2),
                    **{key: round(value, 4) for key, value in asdict(layout).items()},
                },
            )


def prefixes(
    shapes: Sequence[RequestShape], pools: Sequence[int], block_size: int, token_s: float
) -> Iterator[Row]:
    """One row for each size of the cache, in tokens."""
    prompt_tokens = sum(shape.prompt_len for shape in shapes)
    everything = sim.findable(shapes, block_size)
    enough = sum(shape.prompt_len + shape.output_len + 2 * block_size for shape in shapes)
    for tokens in (*pools, enough):
        found, evicted = sim.found_by_the_block_manager(
            shapes, num_blocks=tokens // block_size + 1, block_size=block_size, token_s=token_s
        )
        lru, belady = (
            bounded(shapes, tokens // PIECE, block_size)
            for bounded in (sim.found_by_lru, sim.found_by_belady)
        )
        name = "unbounded" if tokens == enough else f"{tokens // 1000}k"
        yield (
            f"prefix_{name}",
            {
                "block_size": block_size,
                "requests": len(shapes),
                "prompt_tokens": prompt_tokens,
                "pool_tokens": tokens,
                "evicted_blocks": evicted,
                "hit_share_infinite": round(everything / prompt_tokens, 4),
                "hit_share": round(found / prompt_tokens, 4),
                "hit_share_lru": round(lru / prompt_tokens, 4),
                "hit_share_belady": round(belady / prompt_tokens, 4),
                "of_infinite": round(found / everything, 4),
            },
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True, help="a trace, .csv or .jsonl")
    parser.add_argument("--requests", type=int, help="how many of its requests; all of them")
    parser.add_argument("--pool-tokens", type=int, default=448_000, help="size of the memory")
    parser.add_argument("--max-seqs", type=int, default=1024, help="most running sequences")
    parser.add_argument(
        "--caches",
        type=int,
        nargs="*",
        default=[1_000_000, 3_000_000, 10_000_000, 30_000_000],
        help="sizes of the prefix cache in tokens",
    )
    parser.add_argument("--cache-block", type=int, default=128, help="tokens of its blocks")
    parser.add_argument("--token-ms", type=float, default=20.0, help="a request's time per token")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()

    shapes = trace(args.trace, args.requests)
    token_s = args.token_ms / 1e3
    rows = {
        "waste": waste(shapes, args.pool_tokens, args.max_seqs),
        "free_list": free_lists(shapes, args.pool_tokens, args.max_seqs, token_s),
        "prefix": prefixes(shapes, args.caches, args.cache_block, token_s),
    }
    if not shapes[0].pieces:
        del rows["prefix"]
    for part in args.parts:
        for case, figures in rows.get(part, ()):
            record("kv_memory", case, out=args.out, trace=args.trace.stem, **figures)


if __name__ == "__main__":
    main()

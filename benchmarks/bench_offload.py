"""Copies of blocks between the KV pool and host memory, beside plain copies of as many bytes.

    python -m benchmarks.bench_offload --shape llama3.1-8b --out benchmarks/results/offload.jsonl
    python -m benchmarks.bench_offload --shape tiny --dtype float32 --blocks 64

Per direction one JSON line: the rate for blocks that lie anywhere in the pool (`--neighbours`: in
one run), and that of one plain copy to or from pinned memory, measured in turns. `link_share` is
their ratio. A third line tells how much of the copies hides behind matrix products that run
meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import record
from benchmarks.shapes import SHAPES
from pagedjax import EngineConfig
from pagedjax.config import KV_CACHE_DTYPES
from pagedjax.engine.kv_pool import KVPool, KVSpec, kv_spec
from pagedjax.engine.offload import BlockMover, pinned_memory


class Bench:
    """A pool, host memory, and as many bytes in one piece on either side.

    Args:
        spec: of the pool; half of its blocks are moved at a time.
        neighbours: whether these lie side by side, or anywhere.
    """

    def __init__(self, spec: KVSpec, *, neighbours: bool = False) -> None:
        self.device = jax.devices()[0]
        self.pool: KVPool = spec.pool_of(
            [
                jax.random.normal(jax.random.key(index), x.shape).astype(x.dtype)
                for index, x in enumerate(jax.tree.leaves(spec.create(self.device)))
            ]
        )
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.pool
        )
        self.count = spec.num_blocks // 2
        self.mover = BlockMover(abstract, self.count)
        self.mover.warm_up()
        order = np.arange(spec.num_blocks - 1)
        blocks = 1 + (order if neighbours else np.random.default_rng(0).permutation(order))
        blocks = blocks[: self.count]
        slots = np.arange(self.count)
        self.stores = np.stack([blocks, slots], axis=1).astype(np.int32)
        self.loads = self.stores[:, ::-1].copy()
        self.size = self.count * spec.block_bytes
        self.on_host = pinned_memory(self.device)
        self.on_device = jax.sharding.SingleDeviceSharding(self.device)
        self.plain = jnp.zeros(self.size // 4, jnp.uint32, device=self.on_device)
        self.plain_host = jax.block_until_ready(jax.device_put(self.plain, self.on_host))

    def store(self) -> None:
        self.mover.store(self.pool, self.stores)

    def load(self) -> None:
        self.pool = self.mover.load(self.pool, self.loads)

    def returns_every_bit(self, spec: KVSpec) -> bool:
        """Whether stored blocks arrive unchanged in another pool."""
        self.store()
        other = self.mover.load(spec.create(self.device), self.loads)
        blocks = self.stores[:, 0]
        same = jax.tree.map(lambda a, b: (a[blocks] == b[blocks]).all(), self.pool, other)
        return all(map(bool, jax.tree.leaves(same)))

    def wait(self) -> None:
        slots = [self.mover.content(slot) for slot in range(self.count)]
        jax.block_until_ready((slots, self.pool))

    def plain_store(self) -> None:
        jax.block_until_ready(jax.device_put(self.plain, self.on_host))

    def plain_load(self) -> None:
        jax.block_until_ready(jax.device_put(self.plain_host, self.on_device))


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turns(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, by turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            took = seconds(run)
            if turn:
                times[name].append(took)
    return {name: statistics.median(took) for name, took in times.items()}


def overlap(bench: Bench, repeats: int) -> dict[str, float]:
    """Medians of products alone, copies both ways alone, and both at once."""
    width = 512 if bench.device.platform == "cpu" else 8192
    dtype = jnp.float32 if bench.device.platform == "cpu" else jnp.bfloat16
    matrix = jnp.eye(width, dtype=dtype, device=bench.on_device)

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = x @ matrix
        return x

    once = seconds(lambda: jax.block_until_ready(products(matrix)))
    once = min(once, seconds(lambda: jax.block_until_ready(products(matrix))))

    def copies() -> None:
        bench.store()
        bench.load()
        bench.wait()

    def compute() -> None:
        jax.block_until_ready([products(matrix) for _ in range(2 * launches)])

    launches = max(1, round(seconds(copies) / once))

    def both() -> None:
        results = []
        # A few launches at a time, as steps and their transfers alternate in an engine.
        parts = np.array_split(np.arange(bench.count), launches)
        for part in parts:
            bench.mover.store(bench.pool, bench.stores[part])
            results.append(products(matrix))
        for part in parts:
            bench.pool = bench.mover.load(bench.pool, bench.loads[part])
            results.append(products(matrix))
        bench.wait()
        jax.block_until_ready(results)

    return in_turns({"copies": copies, "compute": compute, "both": both}, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1024, help="how many to move")
    parser.add_argument("--neighbours", action="store_true", help="blocks that lie side by side")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    args = parser.parse_args()
    config = EngineConfig(block_size=args.block_size, kv_cache_dtype=args.kv_cache_dtype)
    spec = kv_spec(
        SHAPES[args.shape], config, num_blocks=2 * args.blocks, dtype=jnp.dtype(args.dtype)
    )
    bench = Bench(spec, neighbours=args.neighbours)
    case = f"{args.shape} {spec.dtype_name} block {args.block_size}"
    case += " neighbours" if args.neighbours else ""
    if not bench.returns_every_bit(spec):
        raise RuntimeError("blocks came back changed")
    facts = {"blocks": bench.count, "block_bytes": spec.block_bytes, "bytes": bench.size}

    def stored() -> None:
        bench.store()
        bench.wait()

    def loaded() -> None:
        bench.load()
        bench.wait()

    for name, ours, plain in (
        ("store", stored, bench.plain_store),
        ("load", loaded, bench.plain_load),
    ):
        took = in_turns({"blocks": ours, "plain": plain}, args.repeats)
        launch = seconds(bench.store if name == "store" else bench.load)
        bench.wait()
        record(
            "offload", f"{case} {name}", args.out, **facts,
            blocks_ms=round(took["blocks"] * 1e3, 3), plain_ms=round(took["plain"] * 1e3, 3),
            blocks_gb_per_s=round(bench.size / took["blocks"] / 1e9, 2),
            plain_gb_per_s=round(bench.size / took["plain"] / 1e9, 2),
            link_share=round(took["plain"] / took["blocks"], 4),
            host_us_per_block=round(launch / bench.count * 1e6, 2),
        )  # fmt: skip
    took = overlap(bench, args.repeats)
    hidden = took["compute"] + took["copies"] - took["both"]
    record(
        "offload", f"{case} overlap", args.out, **facts,
        copies_ms=round(took["copies"] * 1e3, 3), compute_ms=round(took["compute"] * 1e3, 3),
        both_ms=round(took["both"] * 1e3, 3),
        hidden_share=round(hidden / min(took["compute"], took["copies"]), 4),
    )  # fmt: skip


if __name__ == "__main__":
    main()

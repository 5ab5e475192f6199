"""Matrix products of a decode step: in how many pieces, and computed by whom.

    python -m benchmarks.bench_products --shape llama3.1-8b --rows 8,32,64,128,192,256
    python -m benchmarks.bench_products --shape qwen3-0.6b --products out,down --pieces 1,2,4,8
    python -m benchmarks.bench_products --shape tiny --dtype float32 --rows 4        (on a CPU)

What `pagedjax.layers.linear` and `pagedjax.engine.compiler_options` choose between: every product
of a layer, and that of the output projection, is timed divided into different numbers of pieces,
each by XLA's choice of kernels and by the device's library alone. A product is repeated over
different weights, of several times the L2 cache together, as in a step: repeated over one weight it
would find that in the cache. Adding up the pieces is not part of the time, since the next kernel of
a step does that. One JSON line each, `chosen` for what a step does; `weight_tb_per_s` goes by the
bytes of the weight alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_timing import L2_BYTES, median_seconds
from benchmarks.record import record
from benchmarks.shapes import SHAPES
from pagedjax.engine.compiler_options import compiler_options, left_to_library
from pagedjax.layers.linear import multiply, num_pieces, product_dtype
from pagedjax.models.arch import ArchConfig

COMPILE_THREADS = 8
MOST_COPIES = 64  # of a weight


@dataclass(frozen=True, slots=True)
class Product:
    """A weight `[outputs, inner]` of the model.

    Attributes:
        name: of the weight.
        outputs: rows of the weight.
        inner: columns, which are summed over.
        divisible: whether the kernel after it can add up pieces.
    """

    name: str
    outputs: int
    inner: int
    divisible: bool


@dataclass(frozen=True, slots=True)
class Way:
    """How a product is computed."""

    pieces: int
    library: bool

    @classmethod
    def chosen(cls, product: Product, rows: int) -> Way:
        """What a step on this device does."""
        pieces = num_pieces(rows, product.outputs, product.inner) if product.divisible else 1
        return cls(pieces, left_to_library(rows) and jax.default_backend() == "gpu")


def products_of(arch: ArchConfig) -> list[Product]:
    """Those of a layer, in their order, and the output projection."""
    heads = arch.q_heads * arch.head_dim
    qkv = heads + 2 * arch.kv_heads * arch.head_dim
    return [
        Product("qkv", qkv, arch.embed, divisible=True),
        Product("out", arch.embed, heads, divisible=True),
        Product("gate_up", 2 * arch.mlp, arch.embed, divisible=False),
        Product("down", arch.embed, arch.mlp, divisible=True),
        Product("head", arch.vocab, arch.embed, divisible=False),
    ]


def ways(product: Product, pieces: list[int]) -> Iterator[Way]:
    """Those that are possible on the default device; only a GPU has a choice of kernels."""
    choices = (False, True) if jax.default_backend() == "gpu" else (False,)
    for number in pieces:
        if product.inner % number == 0 and (product.divisible or number == 1):
            yield from (Way(number, library) for library in choices)


def compiled(product: Product, rows: int, way: Way, dtype: jnp.dtype, copies: int) -> Any:
    """All copies of a product, one after another, and what they are computed from.

    Whole products of the library are rounded as a step's are, all others are float32.
    """
    as_in_a_step = way.library and way.pieces == 1
    out_dtype = product_dtype(rows, dtype) if as_in_a_step else jnp.dtype(jnp.float32)

    # Each has activations of its own: XLA would make one product of those that share them.
    def run(xs: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
        return [
            multiply(x, weight, contract=1, pieces=way.pieces, out_dtype=out_dtype)
            for x, weight in zip(xs, weights, strict=True)
        ]

    shapes = [
        [jax.ShapeDtypeStruct((n, product.inner), dtype)] * copies for n in (rows, product.outputs)
    ]
    options = compiler_options(jax.default_backend(), products=rows, library=way.library)
    return jax.jit(run).lower(*shapes).compile(options)


def time_product(
    product: Product, rows: int, pieces: list[int], dtype: jnp.dtype, args: argparse.Namespace
) -> None:
    """Time a product in every way, and record each."""
    weight_bytes = product.outputs * product.inner * dtype.itemsize
    copies = min(MOST_COPIES, max(2, math.ceil(8 * L2_BYTES / weight_bytes)))
    candidates = list(ways(product, pieces))
    with ThreadPoolExecutor(COMPILE_THREADS) as threads:
        built = [threads.submit(compiled, product, rows, w, dtype, copies) for w in candidates]
    keys = jax.random.split(jax.random.key(rows), 2 * copies)
    xs, weights = (
        [jax.random.normal(key, (n, product.inner), dtype) for key in some]
        for n, some in ((rows, keys[:copies]), (product.outputs, keys[copies:]))
    )
    chosen = Way.chosen(product, rows)
    for way, code in zip(candidates, built, strict=True):
        seconds, spread = median_seconds(code.result(), (xs, weights), copies, args.seconds)
        record(
            "products", f"{args.shape} {args.dtype} {product.name} {rows} rows", args.out,
            rows=rows, outputs=product.outputs, inner=product.inner, pieces=way.pieces,
            library=way.library, chosen=way == chosen, median_us=round(seconds * 1e6, 2),
            spread=round(spread, 4), weight_tb_per_s=round(weight_bytes / seconds / 1e12, 3),
            tflop_per_s=round(2 * rows * product.outputs * product.inner / seconds / 1e12, 1),
            copies=copies,
        )  # fmt: skip


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", default="1,8,16,32,64,128,192,256", help="tokens of a step")
    parser.add_argument("--products", default="qkv,out,gate_up,down,head")
    parser.add_argument("--pieces", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=0.04, help="of calls, per way")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    return parser


def main() -> None:
    args = options().parse_args()
    arch = SHAPES[args.shape]
    by_name = {product.name: product for product in products_of(arch)}
    names = args.products.split(",")
    for name in names:
        if name not in by_name:
            raise SystemExit(f"--products: {name!r} is none of {', '.join(by_name)}")
    pieces = [int(text) for text in args.pieces.split(",")]
    for rows in map(int, args.rows.split(",")):
        for name in names:
            time_product(by_name[name], rows, pieces, jnp.dtype(args.dtype), args)


if __name__ == "__main__":
    main()

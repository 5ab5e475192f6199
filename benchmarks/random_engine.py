"""An engine around random weights of a named shape, and its options on the command line."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.shapes import SHAPES, random_model
from pagedjax import EngineConfig, SamplingParams
from pagedjax.config import KV_CACHE_DTYPES
from pagedjax.engine.engine import Engine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The shape, the engine's options, and `--out`."""
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--max-prefill-chunk", type=int)
    parser.add_argument("--ttft-target-s", type=float, help="as of EngineConfig")
    parser.add_argument("--max-model-len", type=int, help="default: the longest request's")
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--memory-fraction", type=float)
    parser.add_argument("--bucket-growth", type=int)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--contiguous-blocks", action="store_true")
    parser.add_argument("--implementation", help="backend of the paged operations")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")


def engine_config(args: argparse.Namespace, longest_request: int) -> EngineConfig:
    """The engine's options, tables no wider than the longest request needs."""
    return EngineConfig(
        dtype=args.dtype, kv_cache_dtype=args.kv_cache_dtype, block_size=args.block_size,
        num_blocks=args.num_blocks,
        memory_fraction=args.memory_fraction, max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len or longest_request,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_prefill_chunk=args.max_prefill_chunk, ttft_target_s=args.ttft_target_s,
        bucket_growth=args.bucket_growth,
        prefix_caching=args.prefix_caching, contiguous_blocks=args.contiguous_blocks,
        implementation=args.implementation,
    )  # fmt: skip


def case_name(args: argparse.Namespace, load: str) -> str:
    """Shape, dtype (and that of a compressed cache, after a slash) and load, as in a line."""
    compressed = "" if args.kv_cache_dtype == "auto" else f"/{args.kv_cache_dtype}"
    return f"{args.shape} {args.dtype}{compressed} {load}"


def random_engine(
    args: argparse.Namespace, longest_request: int
) -> tuple[Engine, dict[str, float]]:
    """A warm engine, and figures of its start: seconds for the weights, and for the engine.

    `warm_up_*` says what the engine's programs are of this (`pagedjax.engine.programs.BuildTimes`).

    One short request has been through it, so that the first transfers are no part of a run.
    """
    start = time.perf_counter()
    model = random_model(SHAPES[args.shape], args.dtype)
    weights_s = time.perf_counter() - start
    start = time.perf_counter()
    engine = Engine(model, None, engine_config(args, longest_request))
    engine_s = time.perf_counter() - start
    warm(engine)
    seconds = {"weights_s": weights_s, "engine_start_s": engine_s}
    seconds |= {f"warm_up_{k}": v for k, v in asdict(engine._runner.warm_up_times).items()}
    return engine, {name: round(value, 2) for name, value in seconds.items()}


def exact_length(output_len: int) -> SamplingParams:
    """Greedy, to exactly so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def warm(engine: Engine) -> None:
    """Serve one short request."""
    prompt = [index % engine.arch.vocab for index in range(min(8, engine.max_model_len - 4))]
    engine.add_request("warm", None, prompt, exact_length(4))
    while engine.has_unfinished():
        engine.step()

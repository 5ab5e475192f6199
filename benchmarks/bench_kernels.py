"""Check, tune and time the attention kernels on the default device.

    python -m benchmarks.bench_kernels check      numbers over all options, against float64
    python -m benchmarks.bench_kernels decode     [--heads 32:8:128,40:40:128] [--seqs 1,8,32,128]
    python -m benchmarks.bench_kernels prefill    [--prompts 1x4k,32x1k] [--backends mosaic,triton]
    python -m benchmarks.bench_kernels cascade    64 sequences over a shared prefix
    python -m benchmarks.bench_kernels write_kv
    python -m benchmarks.bench_kernels torch      decode cases for PyTorch, keys not paged

One JSON line per case. A timed decode calls the kernel many times in one compiled program, each
output being the next query, over block tables that rotate through more memory than the L2 cache
holds; its line has the median over repeats, the bytes of keys and values per second, and their
shares of what a device copy moves (bytes read plus bytes written) and of what a reduction reads.
`benchmarks.tuned_table` makes the kernels' table of configurations from these lines.
`prefill_timing` says how prompts are timed.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from benchmarks.decode_timing import bench_decode, selected_cases
from benchmarks.kernel_checks import check
from benchmarks.kernel_timing import L2_BYTES
from benchmarks.operation_timing import bench_cascade, bench_write
from benchmarks.prefill_timing import CASES, bench_prefill
from benchmarks.torch_attention import time_sdpa

warnings.filterwarnings("ignore", category=DeprecationWarning, module="jax")


def bench_torch(args: argparse.Namespace) -> None:
    """Time PyTorch on the decode cases."""
    for case in selected_cases(args):
        time_sdpa(case, L2_BYTES, args.out)


TIMED = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "cascade": bench_cascade,
    "write_kv": bench_write,
    "torch": bench_torch,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["check", *TIMED])
    parser.add_argument("--backends", default="mosaic,triton", help="sdpa, too, for prefill")
    parser.add_argument("--heads", help="query:key/value:head_dim, ... (32:8:128, and 40:40:128)")
    parser.add_argument("--block-sizes", default="16", help="only decode takes several")
    parser.add_argument("--kv-dtypes", default="bfloat16", help="float8_e4m3fn, int8")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file as well")
    decode = parser.add_argument_group("decode and torch")
    decode.add_argument("--seqs", default="1,8,32,128")
    decode.add_argument("--contexts", default="1024,4096,32768")
    decode.add_argument("--rows", type=int, default=1, help="queries of each sequence")
    decode.add_argument("--skip", default="", help="cells to leave out, such as 128x32768")
    decode.add_argument(
        "--ragged", action="store_true", help="each case with lognormal lengths, too"
    )
    decode.add_argument("--only", default="", help="variants to time, such as mosaic:64x3w4@264")
    decode.add_argument("--best", action="store_true", help="list only the best of each backend")
    prefill = parser.add_argument_group("prefill")
    prefill.add_argument("--prompts", default=",".join(CASES))
    prefill.add_argument("--repeats", type=int, default=7)
    prefill.add_argument("--seconds", type=float, default=0.025, help="of calls per repeat")
    write = parser.add_argument_group("write_kv")
    write.add_argument("--writers", default="xla", help="implementations")
    args = parser.parse_args()
    if args.heads is None:
        args.heads = "32:8:128,40:40:128" if args.what in ("decode", "torch") else "32:8:128"
    if args.what == "check":
        raise SystemExit(not check(args.backends.split(","), args.out))
    TIMED[args.what](args)


if __name__ == "__main__":
    main()

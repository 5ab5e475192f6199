"""XLA's options for the engine's programs, by what they compute.

`python -m benchmarks.bench_products` times what the products' options choose between.
"""

from typing import Any

from pagedjax.layers.linear import MANY_TOKENS

# XLA's threads for each program on a GPU, that compile the candidates of a matrix product.
# Left to itself it takes as many as there are cores, for each of the programs that are compiled at
# the same time, and they leave the one thread that lowers a small share of a core.
_THREADS_EACH = 2
# Products of so many rows, besides those of many, that cuBLAS computes faster than what XLA would
# choose: that goes by times with the weights in the cache, which is not where a step finds them.
_LIBRARY_ROWS = range(17, 33)
_NO_GRAPH = 2**31 - 1  # more kernels than any program has


def compiler_options(
    platform: str, *, products: int, library: bool | None = None, cuda_graphs: bool = True
) -> dict[str, Any]:
    """Options for code whose matrix products have so many rows.

    Args:
        platform: of the device.
        products: rows of the products; 0: there are none.
        library: whether the products of a GPU are all cuBLAS's; `left_to_library` if None.
        cuda_graphs: whether an NVIDIA GPU captures what is launched as CUDA graphs.
    """
    if platform == "cpu":
        # The time is spent in library matrix products, so that LLVM's dearest passes buy nothing,
        # and they are half of the time to compile.
        return {"xla_llvm_disable_expensive_passes": True}
    # Candidates are timed on the device, by one thread at a time: measure them, do not check them.
    options: dict[str, Any] = {
        "xla_gpu_autotune_level": 2,
        "xla_gpu_force_compilation_parallelism": _THREADS_EACH,
    }
    if 1 < products < MANY_TOKENS:  # divided already, where it pays
        options["xla_gpu_experimental_force_split_k"] = 1
    if left_to_library(products) if library is None else library:
        options["xla_gpu_enable_triton_gemm"] = False
    if not cuda_graphs:
        options["xla_gpu_graph_min_graph_size"] = _NO_GRAPH
    if not products:
        # There are candidates for every fusion, too: a redraw would be compiled as dozens of pieces
        # before it is as one, and timing would decide in which order the sums behind a draw round.
        options["xla_gpu_autotune_level"] = 0
    return options


def left_to_library(rows: int) -> bool:
    """Whether cuBLAS is as fast as anything that XLA could generate and choose from, or faster."""
    return rows >= MANY_TOKENS or rows in _LIBRARY_ROWS

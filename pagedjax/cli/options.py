"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pagedjax.frontend import MAX_PORT

Model = Annotated[
    str, typer.Argument(help="Native or Hugging Face directory, or a .gguf file.", metavar="MODEL")
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
Temperature = Annotated[
    float | None,
    typer.Option(help="Softness of sampling; 0 is greedy. Default: what the checkpoint says."),
]
TopP = Annotated[float | None, typer.Option(help="Nucleus mass, above 0 and at most 1.")]
TopK = Annotated[int | None, typer.Option(help="Most probable tokens to choose from; 0 for all.")]
MinP = Annotated[float | None, typer.Option(help="Least share of the best token's probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]

Dtype = Annotated[
    str, typer.Option(help="Of weights and activations: auto, bfloat16, float16 or float32.")
]
KVCacheDtype = Annotated[
    str,
    typer.Option(
        help="Of the KV cache: auto (as the weights), fp8 or int8 (twice the tokens of 16 bits), "
        "fp8-values or int8-values (keys as the weights)."
    ),
]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block: 16, 32, 64 or 128.")]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks; default: as memory allows.")]
MemoryFraction = Annotated[
    float | None, typer.Option(help="Share of the device's memory to use, above 0 to 1.")
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Longest prompt and answer in tokens; default: the model's.")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="Sequences in one step; default: 256 on a GPU, 32 on a CPU.")
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="Tokens in one step; default: 2048 on a GPU, 512 on a CPU.")
]
HostCacheBytes = Annotated[
    int, typer.Option(help="Pinned memory of the host for what the KV pool has no room for.")
]
DiskCachePath = Annotated[
    str | None, typer.Option(help="Directory for what the host has no room for.")
]
DiskCacheBytes = Annotated[int, typer.Option(help="How much of the disk, with the path.")]

MetricsPort = Annotated[
    int | None,
    typer.Option(
        help="Serve Prometheus metrics at this port, for `pagedjax top` too.",
        min=0,
        max=MAX_PORT,
    ),
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given, by name."""
    return {name: value for name, value in options.items() if value is not None}

"""What a PyTorch user would run: transformers on the same request lists, a decode step by hand.

    python -m benchmarks.pytorch_baseline generate --shape llama2-13b --workload short mixed
    python -m benchmarks.pytorch_baseline continuous --shape llama2-13b --workload short mixed
    python -m benchmarks.pytorch_baseline step --shape llama3.1-8b \\
        --cases 1x1024,8x1024,32x1024,128x1024,32x4000 --out benchmarks/results/step.jsonl
    python -m benchmarks.pytorch_baseline generate --shape tiny --dtype float32 --limit 6 --batch 3

- `generate`: padded batches in the order of the list, as long as their longest member.
- `continuous`: transformers' continuous batching. `--attention varlen` is PyTorch's own
  FlashAttention kernel; `sdpa` or, with its package, `flash_attention_3` are transformers'.
- `step`: `benchmarks.torch_step`, torch.compile and a CUDA graph on contiguous keys and values.

Random weights of a named shape, random prompts, greedy, end of text ignored: every output has
exactly the length asked for, and only those tokens count. One JSON line per list or case. A list
that takes longer than `--max-seconds` is broken off, and the rates are those of the requests
finished.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import torch_models, torch_step
from benchmarks.record import record
from benchmarks.request_lists import (
    add_list_options,
    random_prompts,
    request_lists,
    throughput,
)
from benchmarks.shapes import SHAPES
from benchmarks.workloads import RequestShape

Prompts = Sequence[Sequence[int]]


def left_padded(prompts: Prompts) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of equal length with zeros in front, and the mask of what is real."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return rows, mask


def generate_batch(model: Any, shapes: Sequence[RequestShape], prompts: Prompts) -> int:
    """One padded batch through `generate`; returns the positions computed, padding included."""
    import torch
    from transformers import GenerationConfig

    rows, mask = left_padded(prompts)
    new = max(shape.output_len for shape in shapes)
    config = GenerationConfig(
        max_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None
    )
    ids, mask = (torch.tensor(x, device=model.device) for x in (rows, mask))
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, generation_config=config)
    torch_models.synchronize()
    if out.shape[1] != ids.shape[1] + new:
        raise RuntimeError(f"got {out.shape[1] - ids.shape[1]} tokens, wanted {new}")
    return out.numel()


def run_generate(
    model: Any, shapes: list[RequestShape], prompts: Prompts, args: argparse.Namespace
) -> dict[str, Any]:
    """Static batching."""
    size = args.batch
    brief = [RequestShape(s.prompt_len, min(4, s.output_len), 0.0) for s in shapes[:size]]
    generate_batch(model, brief, prompts[:size])
    torch_models.forget_peak()
    done, positions, start = 0, 0, time.perf_counter()
    while done < len(shapes) and time.perf_counter() - start < args.max_seconds:
        part = slice(done, done + size)
        positions += generate_batch(model, shapes[part], prompts[part])
        done = min(done + size, len(shapes))
    seconds = time.perf_counter() - start
    useful = sum(shape.prompt_len + shape.output_len for shape in shapes[:done])
    return {
        **throughput(shapes[:done], seconds),
        "complete": done == len(shapes),
        "batch": size,
        "padding": round(1 - useful / positions, 4),
    }


def drive(
    manager: Any, shapes: Sequence[RequestShape], prompts: Prompts, limit_s: float, tag: str
) -> tuple[list[int], float]:
    """Serve the requests; returns the indices of those finished, and the seconds.

    Raises:
        RuntimeError: the serving thread ended, a request failed, or a length is wrong.
    """
    start = time.perf_counter()
    for index, (shape, prompt) in enumerate(zip(shapes, prompts, strict=True)):
        manager.add_request(
            list(prompt), request_id=f"{tag}{index}", max_new_tokens=shape.output_len,
            eos_token_id=-1,
        )  # fmt: skip
    done: list[int] = []
    while len(done) < len(shapes) and time.perf_counter() - start < limit_s:
        result = manager.get_result(timeout=0.2)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the serving thread of transformers has ended")
        elif result.is_finished():
            index = int(result.request_id.removeprefix(tag))
            got, wanted = len(result.generated_tokens), shapes[index].output_len
            if result.error or got != wanted:
                raise RuntimeError(f"request {index}: got {got} of {wanted}, {result.error}")
            done.append(index)
    return done, time.perf_counter() - start


def run_continuous(
    model: Any, shapes: list[RequestShape], prompts: Prompts, args: argparse.Namespace
) -> dict[str, Any]:
    """Continuous batching with what transformers picks for the list, prefix sharing off."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    attention = args.attention or ("varlen" if torch_models.torch_device() == "cuda" else "sdpa")
    if attention == "varlen":
        # Not by `set_attn_implementation`, which looks for the flash-attn package.
        model.config._attn_implementation = torch_models.use_torch_varlen()
    else:
        model.set_attn_implementation(attention)
    output_len = max(shape.output_len for shape in shapes)
    torch_models.forget_peak()
    start = time.perf_counter()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            allow_block_sharing=False, max_memory_percent=args.memory_fraction,
            num_blocks=args.num_blocks, max_batch_tokens=args.max_batch_tokens,
        ),
        workload_hints=WorkloadHints(
            max_prompt_length=max(shape.prompt_len for shape in shapes),
            max_generated_length=output_len, num_requests=len(shapes),
        ),
    )  # fmt: skip
    used = model.config._attn_implementation
    if attention not in used and attention != "varlen":
        raise ValueError(f"asked for attention {attention!r}, transformers switched to {used!r}")
    manager.warmup()
    manager.start()
    warmup_s = time.perf_counter() - start
    try:
        brief = [RequestShape(s.prompt_len, min(4, s.output_len), 0.0) for s in shapes[:4]]
        drive(manager, brief, prompts[:4], 120.0, "warm")
        done, seconds = drive(manager, shapes, prompts, args.max_seconds, "run")
    finally:
        manager.stop(block=True, timeout=20, hard_stop=True)
        manager.destroy()
    settled = manager.continuous_batching_config
    return {
        **throughput([shapes[index] for index in done], seconds),
        "complete": len(done) == len(shapes),
        "attention": attention,
        "attention_path": used,
        "warmup_s": round(warmup_s, 2),
        "cuda_graphs": str(settled.use_cuda_graph),
        "asynchronous": bool(settled.use_async_batching),
        "max_batch_tokens": settled.max_batch_tokens,
        "num_blocks": settled.num_blocks,
    }


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("generate", "continuous", "step"))
    add_list_options(parser)
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file")
    parser.add_argument("--max-seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=32, help="of generate")
    parser.add_argument("--attention", help="of continuous: varlen, sdpa, eager, ...")
    parser.add_argument("--memory-fraction", type=float, default=0.85, help="of continuous")
    parser.add_argument("--num-blocks", type=int, help="of continuous; default: what fits")
    parser.add_argument("--max-batch-tokens", type=int, help="of continuous")
    torch_step.add_options(parser)
    return parser


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # kernels are those installed
    # Caches that grow by a token a step otherwise leave memory in pieces.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    args = options().parse_args()
    arch = SHAPES[args.shape]
    if args.what == "step":
        torch_step.run(args.shape, arch, args)
        return
    model = torch_models.hugging_face_model(arch, args.dtype)
    run = {"generate": run_generate, "continuous": run_continuous}[args.what]
    for name, shapes in request_lists(args.workload, args.requests, args.limit).items():
        figures = run(model, shapes, random_prompts(shapes, arch.vocab), args)
        record(
            f"torch_{args.what}", f"{args.shape} {args.dtype} {name}", args.out, **figures,
            peak_device_bytes=torch_models.peak_bytes(), weights="random",
            torch_device=torch_models.device_name(),
        )  # fmt: skip


if __name__ == "__main__":
    main()

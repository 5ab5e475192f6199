"""A decode step in plain PyTorch: torch.compile, one CUDA graph, SDPA on contiguous keys.

The fastest that PyTorch gives without kernels of one's own. All sequences have the same length,
their keys and values lie in one array, and the whole step is replayed as one graph, so that the
host's work does not count. On a CPU, for dry runs, it runs eagerly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import torch_models
from benchmarks.record import record
from pagedjax.models import ArchConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--cases`, `--steps`, `--repeats`, `--compile-mode`."""
    parser.add_argument("--cases", default="1x1024,8x1024,32x1024", help="BATCHxCONTEXT, ...")
    parser.add_argument("--steps", type=int, default=50, help="replayed in a row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--compile-mode", default="default", help="such as max-autotune-no-cudagraphs"
    )


class DecodeStep:
    """One greedy decode step of a transformers model, every sequence at the same position.

    Args:
        model: a `torch_models.hugging_face_model`; its weights are shared where they are not
            fused (query, key and value; gate and up).
        arch: its shape.
    """

    def __init__(self, model: Any, arch: ArchConfig):
        import torch

        self.arch = arch
        self.rotary = model.model.rotary_emb
        self.table = model.model.embed_tokens.weight
        self.unembed = model.lm_head.weight
        self.norm = model.model.norm.weight
        self.layers = []
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            self.layers.append({
                "norm": layer.input_layernorm.weight,
                "qkv": torch.cat([p.weight for p in projections]),
                "qk_norm": (
                    (attention.q_norm.weight, attention.k_norm.weight) if arch.qk_norm else None
                ),
                "out": attention.o_proj.weight,
                "mlp_norm": layer.post_attention_layernorm.weight,
                "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
                "down": mlp.down_proj.weight,
            })  # fmt: skip
            # The parts are not needed again: never two copies of the model.
            for part in (*projections, mlp.gate_proj, mlp.up_proj):
                part.weight = None
        self.before, self.after = self._before, self._after

    def compile(self, mode: str) -> None:
        """Compile what comes before and after the attention of a layer."""
        import torch

        torch.compiler.reset()
        options = {"mode": mode, "dynamic": False, "fullgraph": True}
        self.before = torch.compile(self._before, **options)
        self.after = torch.compile(self._after, **options)

    def allocate(self, batch: int, context: int) -> None:
        """Random keys and values; the step will compute position `context - 1`."""
        import torch

        arch, table = self.arch, self.table
        shape = (batch, arch.kv_heads, context, arch.head_dim)
        self.kv = [
            tuple(
                torch.empty(shape, dtype=table.dtype, device=table.device).normal_() for _ in "kv"
            )
            for _ in range(arch.layers)
        ]
        self.tokens = torch.zeros(batch, dtype=torch.long, device=table.device)
        self.position = torch.full((1,), context - 1, device=table.device)
        cos, sin = self.rotary(table[:1], self.position[None])
        self.cos, self.sin = cos[0], sin[0]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads in full."""
        tensors = [self.unembed, self.norm]
        for layer in self.layers:
            tensors += [x for name, x in layer.items() if name != "qk_norm"]
            tensors += layer["qk_norm"] or ()
        return sum(x.numel() * x.element_size() for x in tensors)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.numel() * x.element_size() for layer in self.kv for x in layer)

    def logits(self) -> Any:
        """Write the tokens' keys and values; `[batch, vocab]`."""
        from torch.nn import functional as F

        x = F.embedding(self.tokens, self.table)
        for layer, (keys, values) in zip(self.layers, self.kv, strict=True):
            q = self.before(x, layer, keys, values, self.cos, self.sin, self.position)
            grouped = self.arch.group > 1
            mixed = F.scaled_dot_product_attention(q, keys, values, enable_gqa=grouped)
            x = self.after(x, mixed.flatten(1), layer)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.arch.norm_eps)
        return F.linear(x, self.unembed)

    def step(self) -> None:
        """Draw the next token of every sequence, in place of its last."""
        self.tokens.copy_(self.logits().argmax(-1))

    def _before(self, x, layer, keys, values, cos, sin, position):
        """Norm, projections, rotation; keys and values into the cache. Returns the queries."""
        import torch
        from torch.nn import functional as F

        a = self.arch
        normed = F.rms_norm(x, x.shape[-1:], layer["norm"], a.norm_eps)
        qkv = F.linear(normed, layer["qkv"]).unflatten(-1, (-1, a.head_dim))
        q, k, v = qkv.split((a.q_heads, a.kv_heads, a.kv_heads), dim=1)
        if layer["qk_norm"] is not None:
            q_scale, k_scale = layer["qk_norm"]
            q = F.rms_norm(q, (a.head_dim,), q_scale, a.norm_eps)
            k = F.rms_norm(k, (a.head_dim,), k_scale, a.norm_eps)
        qk = torch.cat([q, k], dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = qk * cos + torch.cat([-second, first], dim=-1) * sin
        keys.index_copy_(2, position, qk[:, a.q_heads :, None])
        values.index_copy_(2, position, v[:, :, None])
        return qk[:, : a.q_heads, None].contiguous()

    def _after(self, x, mixed, layer):
        """Output projection and MLP, with their residuals."""
        from torch.nn import functional as F

        x = x + F.linear(mixed, layer["out"])
        normed = F.rms_norm(x, x.shape[-1:], layer["mlp_norm"], self.arch.norm_eps)
        gate, up = F.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer["down"])


def replayed(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph; itself on a CPU."""
    import torch

    if not torch.cuda.is_available():
        step()
        return step
    torch.cuda.synchronize()  # the arrays were filled on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds_per_step(replay: Callable[[], None], steps: int) -> float:
    """With the device never idle."""
    replay()
    torch_models.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        replay()
    torch_models.synchronize()
    return (time.perf_counter() - start) / steps


def run(shape: str, arch: ArchConfig, args: argparse.Namespace) -> None:
    """One JSON line per case."""
    import torch

    with torch.no_grad():
        decode = DecodeStep(torch_models.hugging_face_model(arch, args.dtype), arch)
        for case in args.cases.split(","):
            batch, context = map(int, case.split("x"))
            decode.kv = []  # the case before gives its memory back
            torch_models.forget_peak()
            start = time.perf_counter()
            decode.allocate(batch, context)
            if torch_models.torch_device() == "cuda":
                decode.compile(args.compile_mode)
            replay = replayed(decode.step)
            warmup_s = time.perf_counter() - start
            seconds_per_step(replay, args.steps)
            laps = [seconds_per_step(replay, args.steps) for _ in range(args.repeats)]
            del replay
            record(
                "torch_step", f"{shape} {args.dtype} {case}", args.out, batch=batch,
                context=context, step_us=round(statistics.median(laps) * 1e6, 1),
                spread=round(max(laps) / min(laps) - 1, 4), weight_bytes=decode.weight_bytes,
                kv_bytes=decode.kv_bytes, warmup_s=round(warmup_s, 2), steps=args.steps,
                repeats=args.repeats, compile_mode=args.compile_mode, weights="random",
                peak_device_bytes=torch_models.peak_bytes(),
                torch_device=torch_models.device_name(),
            )  # fmt: skip

"""Engines around tiny random models, and the plain forward as their second computation."""

import contextlib
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.engine.engine import Engine
from pagedjax.loading import LoadedModel
from pagedjax.models import (
    ArchConfig,
    Decoder,
    GenerationDefaults,
    RopeConfig,
    decoder_from_params,
    params_of,
)
from pagedjax.outputs import RequestOutput

VOCAB = 128


def tiny_arch(**changes):
    settings = dict(
        family="llama",
        vocab=VOCAB,
        embed=32,
        layers=2,
        q_heads=4,
        kv_heads=2,
        head_dim=8,
        mlp=48,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        windows=(None, None),
        max_positions=256,
    )
    return ArchConfig(**{**settings, **changes})


@functools.cache
def tiny_model(seed=0, **changes):
    """Random parameters, scaled so that the next token is neither certain nor uniform."""
    arch = tiny_arch(**changes)
    params = params_of(Decoder(arch, rngs=nnx.Rngs(params=seed)))
    scaled = {k: v * jnp.float32(1.0 if k.endswith("scale") else 8.0) for k, v in params.items()}
    return LoadedModel(
        arch=arch, params=scaled, generation=GenerationDefaults(), tokenizer_dir=None
    )


def tiny_engine(model=None, tokenizer=None, **options):
    """Small sizes, few compiles; options as in `EngineConfig`."""
    settings = dict(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=200, bucket_growth=16)
    config = EngineConfig(**{**settings, "warm_up": False, **options})
    engine = Engine(model or tiny_model(), tokenizer, config)
    if engine._lower is not None and engine._lower._disk is not None:
        engine._lower._disk._patience_s = 60.0  # a busy machine is no disk that stands still
    return engine


def drain(engine, *, on_step=None) -> dict[str, RequestOutput]:
    """Run until nothing is left; whole outputs by request id."""
    deltas: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished():
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        if on_step is not None:
            on_step()
    return {request_id: RequestOutput.joined(parts) for request_id, parts in deltas.items()}


def serve(engine, prompts, params) -> list[RequestOutput]:
    """Outputs of `prompts`, served together, in order."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(index), None, prompt, one)
    outputs = drain(engine)
    return [outputs[str(index)] for index in range(len(prompts))]


def settle(engine, timeout_s=60.0) -> None:
    """Step an engine with nothing to do until every write to the disk has ended and is counted.

    Until then the disk may have less than was sent there, by as much as the machine is busy.
    """
    tiers, disk = engine._scheduler.blocks.tiers, engine._lower._disk
    end = time.monotonic() + timeout_s
    while tiers.num_pending_writes:
        assert time.monotonic() < end, f"{tiers.num_pending_writes} writes have not ended"
        disk.wait(0.1)
        assert not engine.step()


@contextlib.contextmanager
def compiles():
    """A list that what is compiled inside the block adds to, by JAX's own event counter."""
    found = []

    def listen(event, duration, **kwargs):
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def _logits_fn(length, model_key):
    model = model_key.model
    return jax.jit(lambda tokens: decoder_from_params(model.arch, model.params)(tokens)[0])


class _Key:
    """Hash a model by identity, for the cache of compiled forwards."""

    def __init__(self, model):
        self.model = model

    def __hash__(self):
        return id(self.model)

    def __eq__(self, other):
        return self.model is other.model


def plain_logits(model, tokens) -> np.ndarray:
    """Logits after every token of one sequence, by the plain forward; float32 `[len, vocab]`."""
    length = -(-len(tokens) // 64) * 64
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_logits_fn(length, _Key(model))(padded))[: len(tokens)]


def plain_greedy(model, prompt, count, stop=()) -> tuple[int, ...]:
    """`count` greedy tokens by whole recomputation, fewer if one of `stop` comes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(model, tokens)[-1].argmax()))
        if tokens[-1] in stop:
            break
    return tuple(tokens[len(prompt) :])


def random_prompts(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]

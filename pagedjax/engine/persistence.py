"""An engine's cache and running requests beyond its life, or in a pool of another size.

Between two steps all there is to know of a request is its tokens, how many of them the pool holds
the keys and values of, and how to sample the next. Steps in flight are left out: what they compute
is computed again, from the same numbers, in steps of the same sequences. Beam searches begin anew.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.engine.kv_pool import KVPool, check_memory, free_device_bytes
from pagedjax.engine.kv_scales import calibrate, scales_for
from pagedjax.engine.request_checks import checked_tokens
from pagedjax.engine.requests import LiveRequest
from pagedjax.engine.scheduler_options import scheduler_config
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from scheduler.snapshot import SchedulerState, export_state, restore_state

if TYPE_CHECKING:
    from pagedjax.config import EngineConfig
    from pagedjax.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryImage:
    """Sequences, cache, and the content of the blocks that these need.

    Attributes:
        state: names blocks of the pool that the image was taken of.
        content: the arrays of all layers, as in `KVPool` but for the blocks, which are in the order
            of `state.blocks()`.
    """

    state: SchedulerState
    content: list[np.ndarray]


def take_image(engine: Engine) -> MemoryImage:
    """Copy to the host what an engine's memory holds; waits for the steps in flight."""
    untold: dict[str, int] = {}
    for step in engine._in_flight:
        for target in step.targets:
            key = target.request.completions[0].key
            untold[key] = min(untold.get(key, target.position), target.position - 1)
    state = export_state(engine._scheduler, untold)
    blocks = np.array(state.blocks(), np.int32)
    content: list[np.ndarray] = []

    def read(pool: KVPool) -> KVPool:
        content.extend(np.asarray(array[blocks]) for array in jax.tree.leaves(pool))
        return pool

    engine._runner.update_pool(read)
    return MemoryImage(state=state, content=content)


def put_image(engine: Engine, image: MemoryImage) -> None:
    """Put an image into an engine whose scheduler knows its requests, and runs none of them."""
    sources = restore_state(engine._scheduler, image.state)
    at = {block: index for index, block in enumerate(image.state.blocks())}
    rows = np.array([at[source] for source in sources.values()], np.int32)
    blocks = np.array(list(sources), np.int32)
    if len(blocks):
        write = jax.jit(lambda array, new: array.at[blocks].set(new), donate_argnums=(0,))
        engine._runner.update_pool(
            lambda pool: engine.kv_spec.pool_of(
                [
                    write(array, jnp.asarray(content[rows]))
                    for array, content in zip(jax.tree.leaves(pool), image.content, strict=True)
                ]
            )
        )


def resize_pool(engine: Engine, num_blocks: int) -> None:
    """Give an engine's KV pool another size; requests and as much of the cache as fits stay.

    Compiles every step anew if the engine was warmed up. Counters of the pool begin at 0, and host
    memory below the pool is emptied.

    Args:
        engine: between two steps.
        num_blocks: blocks of the pool, the null block included.

    Raises:
        ValueError: a request is longer than such a pool, a beam search runs, or the memory is too
            small: nothing has changed. If that shows only when the pool is made, the old pool is
            made again, with what was in it.
    """
    config = dataclasses.replace(engine.config, num_blocks=num_blocks)
    if config.num_blocks is None:
        raise ValueError("num_blocks must be an integer, got None")
    spec = dataclasses.replace(engine.kv_spec, num_blocks=num_blocks)
    limit = scheduler_config(config, engine.arch, spec).max_seq_len
    seqs = sorted(engine._scheduler.sequences(), key=lambda seq: seq.seq_id)
    if any(seq.request.beam for seq in seqs):
        raise ValueError("the pool cannot be resized while beam searches run")
    longest = max((seq.num_known for seq in seqs), default=0)
    if longest >= limit:
        raise ValueError(
            f"a request has {longest} tokens, a pool of {num_blocks} blocks holds {limit}: "
            "at least one more is needed to go on"
        )
    params, kv_scales = engine._runner.params, engine._runner.kv_scales
    (device,) = params["embed.table"].devices()
    there = free_device_bytes(device)
    if device.platform != "cpu":
        there += engine.kv_spec.pool_bytes  # the old pool goes before the new one comes
    check_memory(spec, config, device_bytes=there, platform=device.platform)
    image = take_image(engine)
    requests = [
        dataclasses.replace(seq.request, sibling_of=_live_sibling(seq.siblings, seq))
        for seq in seqs
    ]
    arrived = {seq.request.request_id: seq.arrived for seq in seqs}

    def reopen(chosen: EngineConfig) -> None:
        engine._runner.update_pool(lambda _: [])
        engine._open(chosen, params, kv_scales)
        for request in requests:
            engine._scheduler.add(request)
        for seq in engine._scheduler.sequences():
            seq.arrived = arrived[seq.request.request_id]
        put_image(engine, image)

    before, refusal = engine.config, None
    try:
        reopen(config)
    except (MemoryError, ValueError, jax.errors.JaxRuntimeError) as error:
        refusal = str(error) or type(error).__name__
    # Not in the handler: the traceback of the error keeps what had been allocated by then.
    if refusal is not None:
        reopen(before)
        raise ValueError(
            f"a pool of {num_blocks} blocks takes {spec.pool_bytes} bytes, the device had {there} "
            f"for it; the one of {before.num_blocks} blocks is back: {refusal}"
        )


def recalibrate(engine: Engine, sequences: Sequence[Sequence[int]]) -> None:
    """Choose the scales of a compressed KV cache by token sequences of the caller's.

    The cache is emptied, since what is in it was stored with other scales.

    Args:
        engine: without requests.
        sequences: token ids, typical of what will be served.

    Raises:
        ValueError: the cache is not compressed, requests are being served, there is no token, or
            something else than token ids.
    """
    spec, kind = engine.kv_spec, engine.config.kv_cache_dtype
    if not spec.is_compressed:
        raise ValueError(f"calibration is for kv_cache_dtype fp8 and int8, got {kind}")
    if engine._live:
        raise ValueError(f"calibration needs an idle engine, got {len(engine._live)} requests")
    params, vocab = engine._runner.params, engine.arch.vocab
    for sequence in sequences:
        if len(sequence):  # an empty one is none; an id beyond the vocabulary would be another
            checked_tokens(sequence, vocab)
    measured = calibrate(engine.arch, params, sequences, max_len=engine.max_model_len)
    scales = scales_for(measured, spec.dtype, with_keys=spec.key_dtype is None)
    engine._runner.set_kv_scales(scales)
    engine._scheduler.reset_prefix_cache()


def _live_sibling(siblings: Sequence[Any], seq: Any) -> str | None:
    """The oldest live sequence of the same prompt, unless it is the one itself."""
    oldest = min(siblings, key=lambda one: one.seq_id, default=seq)
    return None if oldest is seq else oldest.request.request_id


def request_records(engine: Engine) -> list[dict[str, Any]]:
    """The live requests as plain data, oldest first."""
    return [_request_record(engine, live) for live in engine._live.values()]


def restore_requests(engine: Engine, records: Sequence[Mapping[str, Any]]) -> None:
    """Queue the requests of another engine, so that only the image of its memory is missing.

    Raises:
        ValueError: one of them can not be served here; none has been queued.
    """
    serial = engine._serial
    try:
        for record in records:
            _restore_request(engine, record)
    except ValueError:
        for record in records:
            engine.abort(record["request_id"])
        engine._news.clear()
        raise
    finally:
        engine._serial = max(serial, engine._serial)


def outputs_so_far(engine: Engine, state: SchedulerState) -> list[RequestOutput]:
    """What restored requests had generated, handed out or not, without log-probabilities."""
    tokens = {seq.request_id: seq.outputs for seq in state.sequences}
    for live in engine._live.values():
        for completion in live.completions:
            if completion.finish_reason is None:
                completion.token_ids.extend(tokens.get(completion.key, ()))
    return [
        RequestOutput(
            request_id=live.request_id,
            prompt=live.prompt,
            prompt_token_ids=live.prompt_token_ids,
            outputs=tuple(completion.retell() for completion in live.completions),
            num_cached_tokens=live.num_cached_tokens,
            timings=live.timings,
        )
        for live in engine._live.values()
    ]


def _request_record(engine: Engine, live: LiveRequest) -> dict[str, Any]:
    search = live.beams
    params: Any = live.params if search is None else search.params
    # One that goes on: the record of one that has ended may be another's by now.
    completion = next(c for c in live.completions if c.finish_reason is None)
    return {
        "request_id": live.request_id,
        "prompt": live.prompt,
        "prompt_token_ids": list(live.prompt_token_ids),
        "is_beam_search": search is not None,
        "params": dataclasses.asdict(params),
        "priority": live.priority,
        "serial": int(completion.key.split(".")[0]),
        "seed": engine._records.seed(completion.record) if search is None else 0,
        "ended": [
            [c.index, c.token_ids.tolist(), c.finish_reason, c.stop_reason]
            for c in live.completions
            if c.finish_reason is not None
        ],
        "num_cached_tokens": live.num_cached_tokens,
        "has_begun": live.timings.first_token is not None,
        "told_first": live.told_first,
    }


def _restore_request(engine: Engine, record: Mapping[str, Any]) -> None:
    params: SamplingParams | BeamSearchParams
    if record["is_beam_search"]:
        params = BeamSearchParams(**record["params"])
    else:
        params = SamplingParams(**{**record["params"], "seed": record["seed"]})
    engine._serial = record["serial"]  # its sequences get the names that they had
    prompt, tokens = record["prompt"], record["prompt_token_ids"]
    priority = record["priority"]
    engine.add_request(record["request_id"], prompt, tokens, params, priority=priority)
    live = engine._live[record["request_id"]]
    for index, token_ids, finish_reason, stop_reason in record["ended"]:
        completion = live.completions[index]
        completion.token_ids.extend(token_ids)
        completion.finish_reason, completion.stop_reason = finish_reason, stop_reason
        engine._scheduler.finish(completion.key)
        engine._end(live, completion)
    live.num_cached_tokens = record["num_cached_tokens"]
    live.told_first = record["told_first"]
    if record["has_begun"]:
        now = time.monotonic()
        live.stamp(scheduled=now, first_token=now)

"""A snapshot as a directory: what an engine wrote before it ended, and another one goes on with.

manifest.json   format and version, what the content depends on, sizes and digests of the files
state.json      requests, sequences and the prefix cache
blocks.N.bin    layer N's content of the blocks that these need

It is written beside its place and then moved there, so that a directory of this name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pagedjax.engine.fingerprint import weights_digest
from pagedjax.engine.persistence import (
    MemoryImage,
    outputs_so_far,
    put_image,
    request_records,
    restore_requests,
    take_image,
)
from pagedjax.outputs import RequestOutput
from scheduler.snapshot import CachedBlock, SchedulerState, SequenceState

if TYPE_CHECKING:
    from pagedjax.engine.engine import Engine

FORMAT, VERSION = "pagedjax-snapshot", 2
MANIFEST, STATE = "manifest.json", "state.json"


def save_snapshot(engine: Engine, path: str | Path) -> None:
    """Write an engine's prefix cache and running requests to a directory; they go on here too.

    The cache is what the pool holds; files of a disk cache stay where they are, and what lies in
    host memory below the pool is left out.

    Args:
        engine: between two steps.
        path: to be created; an earlier snapshot there is replaced. Of a link, what it points to.

    Raises:
        ValueError: there is something else.
        OSError: it can not be written, or not be moved to its place; an earlier snapshot stays.
    """
    path = Path(os.path.realpath(path))
    if path.exists():
        _check_is_snapshot(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _write(engine, draft)
        _move_into_place(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def restore_snapshot(engine: Engine, path: str | Path) -> list[RequestOutput]:
    """Go on with the requests of a snapshot; `Engine.step` brings what comes after it.

    Args:
        engine: without requests; its pool may have another size. What its pool has cached is
            dropped; host memory and disk below it keep what they have.
        path: a snapshot of the same model with the same weights and kind of KV cache. Beam
            searches in it begin anew.

    Returns:
        What the requests had generated before, handed out or not, without log-probabilities, in
        order of arrival. All of them are streamed from here on.

    Raises:
        ValueError: it is of another model or damaged, a request in it is longer than this engine
            serves, or the engine has requests; nothing has changed.
    """
    path = Path(path)
    if engine.has_unfinished():
        raise ValueError("a snapshot is restored into an idle engine, this one has requests")
    manifest = _read_manifest(path)
    for what, mine in _depends_on(engine).items():
        if (found := manifest["depends_on"].get(what)) != mine:
            raise ValueError(
                f"{str(path)!r} is a snapshot of another {what}: got digest {found!r}, "
                f"wanted {mine!r}"
            )
    files = manifest["files"]
    document = json.loads(_read_file(path / STATE, files))
    state = _state_from_json(document["scheduler"])
    content = [
        np.frombuffer(_read_file(path / _blocks_name(index), files), array.dtype).reshape(
            len(state.blocks()), *array.shape[1:]
        )
        for index, array in enumerate(engine.kv_spec.arrays * engine.kv_spec.layers)
    ]
    _check_lengths(engine, document["requests"], state)
    while engine._in_flight:  # steps of requests that have ended, which the scheduler knows of, too
        engine._read_oldest()
    restore_requests(engine, document["requests"])
    version, internal, gauss = document["seeds"]
    engine._seeds.setstate((version, tuple(internal), gauss))
    engine._serial = document["serial"]
    put_image(engine, MemoryImage(state=state, content=content))
    return outputs_so_far(engine, state)


def _check_lengths(engine: Engine, requests: list[dict[str, Any]], state: SchedulerState) -> None:
    """A sequence that the pool can not hold with another token would wait for ever."""
    prompts = {str(one["serial"]): len(one["prompt_token_ids"]) for one in requests}
    lengths = [
        prompts[seq.request_id.partition(".")[0]] + len(seq.outputs) for seq in state.sequences
    ]
    longest = max((*prompts.values(), *lengths), default=0)
    if longest >= engine.max_model_len:
        raise ValueError(
            f"a request of the snapshot has {longest} tokens, this engine serves sequences of "
            f"{engine.max_model_len}"
        )


def _depends_on(engine: Engine) -> dict[str, str]:
    """What a snapshot is of no use without, by its name in an error, as digests."""
    spec = engine.kv_spec
    cache = hashlib.blake2b(digest_size=16)
    arrays = [(array.shape[1:], array.dtype) for array in spec.arrays]
    cache.update(f"{spec.layers} {arrays}".encode())
    for array in jax.tree.leaves(engine._runner.kv_scales):
        cache.update(np.asarray(array).tobytes())
    return {
        "model": hashlib.blake2b(repr(engine.arch).encode(), digest_size=16).hexdigest(),
        "model's weights": weights_digest(engine._runner.params).hex(),
        "kind of KV cache": cache.hexdigest(),
    }


def _write(engine: Engine, directory: Path) -> None:
    image = take_image(engine)
    document = {
        "requests": request_records(engine),
        "scheduler": _state_to_json(image.state),
        "serial": engine._serial,
        "seeds": engine._seeds.getstate(),
    }
    files = {STATE: _write_file(directory / STATE, json.dumps(document).encode())}
    for index, content in enumerate(image.content):
        name = _blocks_name(index)
        files[name] = _write_file(directory / name, np.ascontiguousarray(content).tobytes())
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "depends_on": _depends_on(engine),
        "files": files,
    }
    _write_file(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync_directory(directory)


def _move_into_place(draft: Path, path: Path) -> None:
    """Give a whole draft its name, which an earlier snapshot gets back if that fails."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)  # of a process with this id that was killed
            path.rename(old)
        draft.rename(path)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
    _sync_directory(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_is_snapshot(path: Path) -> None:
    """Of any version, and whole or not. A checkpoint is a directory with a manifest, too.

    Raises:
        ValueError: something else is there.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        found = repr(manifest.get("format")) if isinstance(manifest, dict) else "no object"
    except (OSError, ValueError) as error:
        found = str(error)
    if found != repr(FORMAT):
        raise ValueError(
            f"{str(path)!r} exists and is no snapshot: wanted {MANIFEST} of format {FORMAT!r}, "
            f"got {found}"
        )


def _read_manifest(path: Path) -> dict[str, Any]:
    path = path / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(path.parent)!r} is no snapshot: {error}") from error
    named = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else ()
    if named != (FORMAT, VERSION):
        raise ValueError(f"{str(path)!r}: wanted {FORMAT!r} version {VERSION}, got {named}")
    for name in ("depends_on", "files"):
        if not isinstance(got := manifest.get(name), dict):
            raise ValueError(f"{str(path)!r} is damaged: wanted an object {name!r}, got {got!r}")
    return manifest


def _blocks_name(index: int) -> str:
    return f"blocks.{index}.bin"


def _write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a file through to the disk; its size and digest."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return _size_and_digest(content)


def _size_and_digest(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "digest": hashlib.blake2b(content, digest_size=16).hexdigest()}


def _read_file(path: Path, files: dict[str, Any]) -> bytes:
    """The content of a file that the manifest lists.

    Raises:
        ValueError: it is absent or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r} is missing from the snapshot: {error}") from error
    if (got := _size_and_digest(content)) != (wanted := files.get(path.name)):
        raise ValueError(f"{str(path)!r} is damaged: got {got}, wanted {wanted}")
    return content


def _sync_directory(path: Path) -> None:
    """Make the names in a directory last, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _state_to_json(state: SchedulerState) -> dict[str, Any]:
    return {
        "sequences": [
            {name: getattr(seq, name) for name in SequenceState.__dataclass_fields__}
            for seq in state.sequences
        ],
        "cached": [
            [one.block, one.parent, np.frombuffer(one.tokens, np.int32).tolist(), one.salt.hex()]
            for one in state.cached
        ],
    }


def _state_from_json(data: dict[str, Any]) -> SchedulerState:
    return SchedulerState(
        sequences=[
            SequenceState(
                **{**seq, "outputs": tuple(seq["outputs"]), "blocks": tuple(seq["blocks"])}
            )
            for seq in data["sequences"]
        ],
        cached=[
            CachedBlock(
                block=block,
                parent=parent,
                tokens=np.array(tokens, np.int32).tobytes(),
                salt=bytes.fromhex(salt),
            )
            for block, parent, tokens, salt in data["cached"]
        ],
    )

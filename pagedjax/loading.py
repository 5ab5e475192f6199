"""From a path to a model's parameters on the device: a native checkpoint, or one converted here."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from convert.checkpoint import Checkpoint, checked_dtype, is_hf_directory, open_checkpoint
from convert.layout import KV_CALIBRATION, MANIFEST, PARAMS, is_native
from convert.native_reader import open_native
from pagedjax.models import ArchConfig, GenerationDefaults
from pagedjax.models.kv_calibration import KVCalibration


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        arch: what it is.
        generation: special ids and sampling defaults of the checkpoint.
        params: `{dotted name: array}` as `pagedjax.models.param_shapes(arch)` lists them.
        tokenizer_dir: directory that transformers loads the tokenizer from, or None.
        kv_calibration: for a compressed KV cache, if the checkpoint brings one.
    """

    arch: ArchConfig
    generation: GenerationDefaults
    params: dict[str, jax.Array]
    tokenizer_dir: Path | None
    kv_calibration: KVCalibration | None = None


def load_model(
    path: str | Path,
    *,
    dtype: str | None = None,
    sharding: Sharding | Mapping[str, Sharding] | None = None,
) -> LoadedModel:
    """Load a native checkpoint, or convert a Hugging Face directory or GGUF file in memory.

    Arrays are read and cast one at a time or piece by piece: there are never two copies of the
    model.

    Args:
        path: native directory, Hugging Face directory, or `.gguf` file.
        dtype: `bfloat16`, `float16` or `float32`; None keeps what each tensor is stored as.
        sharding: where the arrays go, one for all or one per name; None is the default device.

    Raises:
        ValueError: the path is none of the three, or the checkpoint is damaged or unsupported.
    """
    path = Path(path)
    if dtype is not None:
        checked_dtype(dtype)
    if path.is_dir() and is_native(path):
        native = open_native(path)
        return LoadedModel(
            arch=native.arch,
            generation=native.generation,
            params=native.restore(dtype, lambda name: _sharding_of(name, sharding)),
            tokenizer_dir=native.tokenizer_dir,
            kv_calibration=read_kv_calibration(path, native.arch),
        )
    return _convert_in_memory(_open_foreign(path), dtype, sharding)


def read_arch(path: str | Path) -> ArchConfig:
    """The architecture of a checkpoint in any of the formats of `load_model`, without its weights.

    Raises:
        ValueError: as for `load_model`.
    """
    path = Path(path)
    if path.is_dir() and is_native(path):
        return open_native(path).arch
    return _open_foreign(path).arch


def read_kv_calibration(path: Path, arch: ArchConfig) -> KVCalibration | None:
    """The calibration in a native checkpoint, or None if it has none.

    Raises:
        ValueError: it is damaged or does not fit the architecture.
    """
    file = path / KV_CALIBRATION
    if not file.is_file():
        return None
    try:
        return KVCalibration.from_json(json.loads(file.read_bytes()), arch)
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no calibration: {error}") from error


def write_kv_calibration(path: Path, calibration: KVCalibration) -> None:
    """Keep a calibration in a native checkpoint, in place of an earlier one.

    Raises:
        ValueError: `path` is no native checkpoint.
    """
    if not is_native(path):
        raise ValueError(f"a calibration is kept in a native checkpoint, got {str(path)!r}")
    draft = path / f"{KV_CALIBRATION}.{os.getpid()}"
    draft.write_text(json.dumps(calibration.to_json()))
    draft.replace(path / KV_CALIBRATION)


def _open_foreign(path: Path) -> Checkpoint:
    if path.is_dir() and not is_hf_directory(path) and not any(path.glob("*.gguf")):
        raise ValueError(
            f"{str(path)!r} is no checkpoint: looked for {MANIFEST} with {PARAMS}/ (native) and "
            "for config.json (Hugging Face)"
        )
    return open_checkpoint(path)


def _convert_in_memory(
    checkpoint: Checkpoint, dtype: str | None, sharding: Sharding | Mapping[str, Sharding] | None
) -> LoadedModel:
    params = {
        tensor.name: jax.device_put(tensor.load(), _sharding_of(tensor.name, sharding))
        for tensor in checkpoint.tensors(dtype)
    }
    return LoadedModel(
        arch=checkpoint.arch,
        generation=checkpoint.generation,
        params=params,
        tokenizer_dir=_tokenizer_directory(checkpoint),
    )


def _tokenizer_directory(checkpoint: Checkpoint) -> Path | None:
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        return None
    if tokenizer.directory is not None:
        return tokenizer.directory
    # It has to be rebuilt as files; they live as long as the process.
    directory = Path(tempfile.mkdtemp(prefix="pagedjax-tokenizer-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    tokenizer.save(directory)
    return directory


def _sharding_of(name: str, sharding: Sharding | Mapping[str, Sharding] | None) -> Sharding:
    if isinstance(sharding, Mapping):
        return sharding[name]
    if sharding is not None:
        return sharding
    return SingleDeviceSharding(jax.devices()[0])

"""Reading the native checkpoint back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from convert.layout import ARCH, FORMAT, FORMAT_VERSION, GENERATION, MANIFEST, PARAMS, TOKENIZER
from convert.source import CheckpointError
from pagedjax.models import ArchConfig, GenerationDefaults, param_shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeCheckpoint:
    """A native checkpoint whose descriptions have been read and checked, and whose arrays not.

    Attributes:
        path: its directory.
        arch: what the model is.
        generation: special ids and sampling defaults.
        dtypes: what each tensor is stored as.
        tokenizer_dir: directory that transformers loads the tokenizer from, or None.
    """

    path: Path
    arch: ArchConfig
    generation: GenerationDefaults
    dtypes: Mapping[str, jnp.dtype]
    tokenizer_dir: Path | None

    def restore(
        self, dtype: str | None, sharding_of: Callable[[str], Sharding]
    ) -> dict[str, jax.Array]:
        """Read every array straight onto its devices, cast on the way.

        Args:
            dtype: what to cast to; None keeps each as stored.
            sharding_of: where the array of a name goes.

        Raises:
            CheckpointError: the stored arrays are damaged.
        """
        shapes = param_shapes(self.arch)
        args = {
            name: ocp.ArrayRestoreArgs(
                restore_type=jax.Array,
                sharding=sharding_of(name),
                dtype=jnp.dtype(dtype or self.dtypes[name]),
                global_shape=shape,
            )
            for name, shape in shapes.items()
        }
        target = {
            name: jax.ShapeDtypeStruct(shape, args[name].dtype) for name, shape in shapes.items()
        }
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                return checkpointer.restore(
                    (self.path / PARAMS).absolute(),
                    args=ocp.args.PyTreeRestore(item=target, restore_args=args),
                )
            # What Orbax and TensorStore raise on missing or damaged files.
            except (ValueError, KeyError, OSError) as error:
                raise CheckpointError(
                    f"{str(self.path / PARAMS)!r} cannot be restored: {error}"
                ) from error


def open_native(path: Path) -> NativeCheckpoint:
    """Read and check everything but the arrays.

    Raises:
        CheckpointError: another format or version, or descriptions that do not fit together.
    """
    manifest = _read_json(path / MANIFEST)
    named = (manifest.get("format"), manifest.get("version"))
    if named != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(
            f"{str(path / MANIFEST)!r}: wanted {FORMAT!r} version {FORMAT_VERSION}, "
            f"got {named[0]!r} version {named[1]!r}"
        )
    arch = ArchConfig.from_json(_read_json(path / ARCH))
    try:
        shapes = {name: tuple(one["shape"]) for name, one in manifest["tensors"].items()}
        dtypes = {name: jnp.dtype(one["dtype"]) for name, one in manifest["tensors"].items()}
        sizes = dict(manifest["params_files"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{str(path / MANIFEST)!r} is damaged: {error!r}") from error
    if shapes != param_shapes(arch):
        raise CheckpointError(f"{str(path)!r}: the tensors in {MANIFEST} do not fit {ARCH}")
    for name, size in sizes.items():
        file = path / PARAMS / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "nothing"
            raise CheckpointError(f"{str(file)!r}: wanted {size} bytes, found {found}")
    tokenizer_dir = path / TOKENIZER
    return NativeCheckpoint(
        path=path,
        arch=arch,
        generation=GenerationDefaults.from_json(_read_json(path / GENERATION)),
        dtypes=dtypes,
        tokenizer_dir=tokenizer_dir if tokenizer_dir.is_dir() else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{str(path)!r} must hold an object, got {type(data).__name__}")
    return data

"""Opening a checkpoint: everything is checked from headers, then tensors come one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert import families, gguf_config
from convert.generation_fields import read_generation
from convert.layout import is_native
from convert.rules import Piece, Rule, rules_for, widest
from convert.safetensors_reader import INDEX_NAME, SINGLE_NAME, SafetensorsSource
from convert.source import CheckpointError, TensorSource
from convert.tokenizer_files import TokenizerSource, find_tokenizer
from pagedjax.models.arch import ArchConfig
from pagedjax.models.generation import GenerationDefaults

DTYPES: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
"""What weights may be stored as."""

CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
BLOCK_BYTES = 64 << 20  # how much of a source tensor is in memory beside the native one

# Buffers that old checkpoints carry although the configuration already says them.
_DERIVED = (".self_attn.rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class NativeTensor:
    """One native tensor that has not been read yet.

    Attributes:
        name: dotted name, as in `pagedjax.models.param_shapes`.
        shape: native shape.
        dtype: what `load` returns.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    _parts: tuple[tuple[str, Piece], ...]
    _checkpoint: Checkpoint

    @property
    def num_elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.num_elements * self.dtype.itemsize

    def load(self) -> np.ndarray:
        """Read it. Needs memory for the tensor and one block of `BLOCK_BYTES`."""
        out = np.empty(self.shape, self.dtype)
        for stored_name, piece in self._parts:
            self._checkpoint.fill(out[piece.at], stored_name, piece)
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checked checkpoint in somebody else's format.

    Attributes:
        arch: what the model is.
        generation: special ids and sampling defaults.
        source: the files' tensors, under their own names.
        tokenizer: its tokenizer, or None if it has none.
        description: one line for people.
        notes: remarks, such as defaults that had to be assumed.
        names: `hf` or `gguf`, whose tensor names the source uses.
        pairs_to_halves: whether rotary rows are stored in pairs and must be reordered.
        default_dtype: dtype of all tensors unless asked otherwise; None keeps each as stored.
        described_by: configuration files that were read, beside the files with tensors.
    """

    arch: ArchConfig
    generation: GenerationDefaults
    source: TensorSource
    tokenizer: TokenizerSource | None
    description: str
    notes: tuple[str, ...] = ()
    names: str
    pairs_to_halves: bool = False
    default_dtype: np.dtype | None = None
    described_by: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the weights and the architecture come from."""
        return (*self.described_by, *self.source.files)

    def tensors(self, dtype: str | None = None) -> Iterator[NativeTensor]:
        """Every native tensor in the model's order, unread.

        Args:
            dtype: a key of `DTYPES`; None keeps the stored one (bfloat16 if it was quantized).

        Raises:
            ValueError: an unknown dtype.
        """
        wanted = self.default_dtype if dtype is None else checked_dtype(dtype)
        for rule in rules_for(self.arch):
            parts = tuple((getattr(piece, self.names), piece) for piece in rule.pieces)
            stored = [self.source.stored[name].dtype for name, _ in parts]
            yield NativeTensor(
                rule.native, _native_shape(rule, self.arch), wanted or widest(stored), parts, self
            )

    def fill(self, out: np.ndarray, stored_name: str, piece: Piece) -> None:
        """Copy a stored tensor into its part of a native one, a block of rows at a time.

        Args:
            out: view of the native tensor, shaped like the piece's dimensions taken apart.
            stored_name: the tensor in the source.
            piece: how its dimensions read.
        """
        stored = self.source.stored[stored_name]
        steps = out.shape[0]
        rows_per_step = stored.shape[0] // steps
        step_bytes = 4 * math.prod(stored.shape) // steps  # dequantized blocks are float32
        steps_per_block = max(1, BLOCK_BYTES // max(1, step_bytes))
        for start in range(0, steps, steps_per_block):
            end = min(steps, start + steps_per_block)
            rows = self.source.read_rows(stored_name, start * rows_per_step, end * rows_per_step)
            block = rows.reshape(end - start, *out.shape[1:])
            if piece.rotary and self.pairs_to_halves:
                head_dim_axis = out.ndim - (1 if len(stored.shape) == 1 else 2)
                last = gguf_config.halves_from_pairs(np.moveaxis(block, head_dim_axis, -1))
                block = np.moveaxis(last, -1, head_dim_axis)
            out[start:end] = block.astype(out.dtype, copy=False)


def checked_dtype(dtype: str) -> np.dtype:
    """The numpy dtype of a name.

    Raises:
        ValueError: it is not one that weights may be stored as.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file and check it from its headers.

    Args:
        path: directory with `config.json` and safetensors, or a `.gguf` file.

    Raises:
        CheckpointError: anything that would make the converted model wrong or incomplete.
    """
    path = Path(path)
    if path.is_dir():
        checkpoint = _open_directory(path)
    elif path.is_file() and path.suffix == ".gguf":
        checkpoint = _open_gguf(path)
    else:
        raise CheckpointError(
            f"wanted a Hugging Face directory or a .gguf file, got {str(path)!r}"
            + ("" if path.exists() else ", which does not exist")
        )
    _check_tensors(checkpoint)
    _check_vocabulary(checkpoint)
    return checkpoint


def is_hf_directory(path: Path) -> bool:
    """Whether a directory looks like an unconverted Hugging Face checkpoint."""
    return (path / CONFIG_NAME).is_file()


def _open_directory(path: Path) -> Checkpoint:
    if is_native(path):
        raise CheckpointError(f"{str(path)!r} is a native checkpoint already")
    if not is_hf_directory(path):
        gguf_files = sorted(one.name for one in path.glob("*.gguf"))
        hint = f"; for GGUF name the file itself: {gguf_files[0]}" if gguf_files else ""
        raise CheckpointError(f"{str(path)!r} has no config.json{hint}")
    config = _read_json(path / CONFIG_NAME)
    if (path / "quantize_config.json").exists():
        raise CheckpointError("quantize_config.json: quantized checkpoints are not supported")
    arch, notes = families.read_arch(config, CONFIG_NAME)
    generation_file = path / GENERATION_NAME
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    _check_layout(path)
    source = SafetensorsSource(path)
    return Checkpoint(
        arch=arch,
        generation=read_generation(generation, config),
        source=source,
        tokenizer=find_tokenizer(path),
        description=f"Hugging Face directory {path} ({len(source.files)} safetensors)",
        notes=tuple(notes),
        names="hf",
        described_by=tuple(
            path / name
            for name in (CONFIG_NAME, GENERATION_NAME, INDEX_NAME)
            if (path / name).is_file()
        ),
    )


def _open_gguf(path: Path) -> Checkpoint:
    # The gguf package and tokenizers are only needed here.
    from convert.gguf_reader import GGUFSource
    from convert.gguf_tokenizer import GGUFTokenizer

    source = GGUFSource(path)
    arch, notes = gguf_config.read_arch(source)
    formats = sorted({one.quantized for one in source.stored.values() if one.quantized})
    return Checkpoint(
        arch=arch,
        generation=gguf_config.read_generation(source.metadata),
        source=source,
        tokenizer=GGUFTokenizer(source.metadata, path.name),
        description=f"GGUF file {path} ({', '.join(formats) or 'not quantized'})",
        notes=tuple(notes),
        names="gguf",
        pairs_to_halves=gguf_config.rotary_order(arch),
        default_dtype=DTYPES["bfloat16"] if formats else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} must hold an object, got {type(data).__name__}")
    return data


def _check_layout(path: Path) -> None:
    """Which weight files count must not be in doubt."""
    single, index = (path / SINGLE_NAME).is_file(), (path / INDEX_NAME).is_file()
    if single and index:
        raise CheckpointError(
            f"both {SINGLE_NAME} and {INDEX_NAME} are there; remove the one that is stale"
        )
    if single or index:
        return
    pickles = sorted(one.name for kind in ("*.bin", "*.pt", "*.pth") for one in path.glob(kind))
    if pickles:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code when it is read; "
            "only safetensors are accepted"
        )
    raise CheckpointError(f"{str(path)!r} has neither {SINGLE_NAME} nor {INDEX_NAME}")


def _native_shape(rule: Rule, arch: ArchConfig) -> tuple[int, ...]:
    sizes = rule.pieces[0].dim_sizes(arch)
    if rule.pieces[0].at == ():
        return sizes
    if rule.pieces[0].at == (0,):
        return (len(rule.pieces), *sizes)
    # Fused query, key and value: the first piece is the group of query heads.
    return (sizes[0], sizes[1] + 2, *sizes[2:])


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Every needed tensor is there in the right shape and a plain dtype, and none is left over."""
    stored, arch = checkpoint.source.stored, checkpoint.arch
    wanted = {
        getattr(piece, checkpoint.names): piece.stored_shape(arch)
        for rule in rules_for(arch)
        for piece in rule.pieces
    }
    left = set(stored) - set(wanted)
    left -= {name for name in left if name.endswith(_DERIVED) or name == gguf_config.ROPE_FREQS}
    if arch.tied and "lm_head.weight" in left:
        _check_tied_copy(checkpoint)
        left.remove("lm_head.weight")
    if missing := sorted(set(wanted) - set(stored)):
        hint = ""
        if missing == ["lm_head.weight"]:
            hint = " (is tie_word_embeddings wrong in config.json?)"
        raise CheckpointError(f"{len(missing)} tensors are missing: {_some(missing)}{hint}")
    if left:
        raise CheckpointError(
            f"{len(left)} tensors have no place in the architecture: {_some(sorted(left))}"
        )
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise CheckpointError(f"{name} has shape {stored[name].shape}, wanted {shape}")
        if stored[name].dtype not in DTYPES.values():
            raise CheckpointError(
                f"{name} is stored as {stored[name].dtype}, supported: {', '.join(DTYPES)}"
            )


def _check_tied_copy(checkpoint: Checkpoint) -> None:
    """A tied model may store its output projection again, but not another one."""
    source, head, table = checkpoint.source, "lm_head.weight", "model.embed_tokens.weight"
    if table not in source.stored:
        return  # reported as missing
    problem = CheckpointError(
        f"config.json ties the embeddings, but {head} differs from {table}; "
        "set tie_word_embeddings to false to use it"
    )
    if source.stored[head].shape != source.stored[table].shape:
        raise problem
    rows, row_bytes = source.stored[table].shape[0], 4 * math.prod(source.stored[table].shape[1:])
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        end = min(rows, start + step)
        if not np.array_equal(
            source.read_rows(head, start, end), source.read_rows(table, start, end), equal_nan=True
        ):
            raise problem


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    arch, tokenizer = checkpoint.arch, checkpoint.tokenizer
    if tokenizer is not None and tokenizer.num_ids > arch.vocab:
        raise CheckpointError(
            f"the tokenizer has ids up to {tokenizer.num_ids - 1}, "
            f"the embedding only {arch.vocab} rows"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

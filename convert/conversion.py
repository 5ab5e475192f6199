"""The whole conversion as one call, shared by `python -m convert` and the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from convert.checkpoint import open_checkpoint
from convert.compare import TOLERANCE, largest_difference, require_torch
from convert.writer import Progress, check_destination, write_native
from pagedjax.models.arch import ArchConfig


class CheckFailed(RuntimeError):
    """The converted model's logits are further from transformers' than rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        destination: the native checkpoint.
        arch: what the model is.
        source: description of the source, one line.
        num_tensors: native tensors written.
        num_params: numbers in them.
        nbytes: size of them, in bytes.
        notes: remarks, such as defaults that had to be assumed.
        largest_difference: between the logits and transformers', if that was checked.
    """

    destination: Path
    arch: ArchConfig
    source: str
    num_tensors: int
    num_params: int
    nbytes: int
    notes: tuple[str, ...]
    largest_difference: float | None = None


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    check: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a Hugging Face directory or a GGUF file to the native checkpoint.

    Args:
        src: directory with `config.json` and safetensors, or a `.gguf` file.
        dst: directory to create.
        dtype: `bfloat16`, `float16` or `float32`; None keeps what is stored.
        overwrite: whether to replace a native checkpoint at `dst`.
        check: also run source and result on a prompt in float32 and compare the logits. This
            holds both whole models in memory and needs PyTorch.
        progress: called after each tensor has been written.

    Raises:
        ValueError: the source cannot be converted faithfully, or `dst` may not be written.
        RuntimeError: a check was asked for and PyTorch is not installed.
        CheckFailed: the logits differ too much; the checkpoint at `dst` is left for inspection.
        OSError: the disk is full or `dst` cannot be written; nothing is left behind.
    """
    dst = Path(os.path.abspath(dst))
    check_destination(dst, overwrite)  # before time goes into anything else
    if check:
        require_torch()
    checkpoint = open_checkpoint(src)
    tensors = list(checkpoint.tensors(dtype))
    write_native(checkpoint, dst, dtype=dtype, overwrite=overwrite, progress=progress)
    difference = largest_difference(src, dst) if check else None
    if difference is not None and not difference <= TOLERANCE:
        raise CheckFailed(
            f"the logits differ from transformers' by up to {difference:.3g}, "
            f"more than {TOLERANCE:g}; {str(dst)!r} was written nevertheless"
        )
    return ConversionReport(
        destination=dst,
        arch=checkpoint.arch,
        source=checkpoint.description,
        num_tensors=len(tensors),
        num_params=sum(tensor.num_elements for tensor in tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        notes=checkpoint.notes,
        largest_difference=difference,
    )

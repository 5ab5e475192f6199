"""One file per model family: a reading of its `config.json` that refuses what it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from convert.families import llama, mistral, qwen2, qwen3
from convert.hf_config import Fields
from convert.source import CheckpointError
from pagedjax.models.arch import ArchConfig

ArchReader = Callable[[Fields], ArchConfig]

FAMILIES: Mapping[str, tuple[str, ArchReader]] = {
    "llama": ("LlamaForCausalLM", llama.arch_from_hf),
    "mistral": ("MistralForCausalLM", mistral.arch_from_hf),
    "qwen2": ("Qwen2ForCausalLM", qwen2.arch_from_hf),
    "qwen3": ("Qwen3ForCausalLM", qwen3.arch_from_hf),
}
"""`model_type` to the one class of transformers that is meant and the reading of its fields."""


def read_arch(config: Mapping[str, Any], where: str) -> tuple[ArchConfig, list[str]]:
    """The architecture that a Hugging Face `config.json` describes, and remarks about defaults.

    Raises:
        CheckpointError: unknown architecture, quantized weights, or any field amiss.
    """
    hf = Fields(config, where)
    quantization = hf.take_mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "of an unnamed kind")
        raise CheckpointError(f"{where}: quantized checkpoints ({method}) are not supported")
    model_type = hf.take_text("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{where}: unknown architecture {model_type!r}, known: {', '.join(sorted(FAMILIES))}"
        )
    class_name, read = FAMILIES[model_type]
    classes = hf.take("architectures", [class_name])
    if classes != [class_name]:
        raise CheckpointError(f"{where}: architectures is {classes}, wanted [{class_name!r}]")
    return read(hf), hf.notes

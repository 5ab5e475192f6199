"""Special token ids and sampling defaults, from `generation_config.json` and `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.source import CheckpointError
from pagedjax.models.generation import GenerationDefaults

_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_generation(generation: Mapping[str, Any], config: Mapping[str, Any]) -> GenerationDefaults:
    """Generation defaults; where both files speak, `generation_config.json` wins.

    Args:
        generation: contents of `generation_config.json`, empty if there is none.
        config: contents of `config.json`.

    Raises:
        CheckpointError: a value has the wrong type.
    """
    said = {name: value for name, value in config.items() if value is not None}
    said |= {name: value for name, value in generation.items() if value is not None}
    for name in _NUMBERS:
        if isinstance(said.get(name, 0), bool) or not isinstance(said.get(name, 0), int | float):
            raise CheckpointError(f"generation default {name} must be a number, got {said[name]!r}")
    return GenerationDefaults(
        eos_ids=_ids(said, "eos_token_id"),
        bos_id=next(iter(_ids(said, "bos_token_id")), None),
        pad_id=next(iter(_ids(said, "pad_token_id")), None),
        do_sample=bool(said.get("do_sample", False)),
        **{name: said.get(name) for name in _NUMBERS},
    )


def _ids(said: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = said.get(name, [])
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
        raise CheckpointError(f"{name} must be a token id or a list of them, got {value!r}")
    # Some checkpoints write -1 for "none".
    return tuple(dict.fromkeys(one for one in ids if one >= 0))

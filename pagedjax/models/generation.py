"""What a checkpoint says about generating with it: special ids and default sampling."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Read from `generation_config.json`, which wins over `config.json` where both speak.

    Attributes:
        eos_ids: token ids that end a generation; a checkpoint may have several.
        bos_id: id that begins a text, if the model has one.
        pad_id: id used for padding by other software; the engine itself never pads with it.
        temperature: default softness of sampling; None leaves the caller's default.
        top_k: default number of candidates; None leaves the caller's default.
        top_p: default nucleus mass; None leaves the caller's default.
        min_p: default relative probability floor; None leaves the caller's default.
        repetition_penalty: default penalty on tokens of prompt and output, greedy or not; None
            leaves the caller's default.
        do_sample: False makes greedy decoding the default.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data for the native checkpoint's `generation_config.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GenerationDefaults:
        """Inverse of `to_json`.

        Raises:
            ValueError: a field is unknown.
        """
        try:
            return cls(**{**data, "eos_ids": tuple(data.get("eos_ids", ()))})
        except TypeError as error:
            raise ValueError(f"not a generation description: {error}") from error

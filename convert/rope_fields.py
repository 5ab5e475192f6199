"""The rotary embedding as configurations spell it, before and since transformers 5."""

from __future__ import annotations

from typing import Any

from convert.hf_config import Fields
from convert.source import CheckpointError
from pagedjax.models.arch import Llama3Scaling, RopeConfig

DEFAULT_THETA = 10_000.0  # transformers.modeling_rope_utils.RotaryEmbeddingConfigMixin


def take_rope(hf: Fields, max_positions: int) -> RopeConfig:
    """Read `rope_theta` with `rope_scaling` (old) or `rope_parameters` (new).

    The two spellings may stand side by side, and a scaling's `type` beside its `rope_type`,
    as long as they agree.

    Args:
        hf: the configuration; its rotary fields are taken.
        max_positions: what `original_max_position_embeddings` is when left out.

    Raises:
        CheckpointError: the fields contradict each other, or ask for a scaling other than llama3.
    """
    parameters = hf.take_mapping("rope_parameters")
    scaling = hf.take_mapping("rope_scaling")
    rope = Fields(_merged(parameters, scaling, hf.where), f"{hf.where} rope parameters")
    theta = _theta(hf, rope)
    for fields in (hf, rope):
        if (factor := fields.take_float("partial_rotary_factor", 1.0)) != 1.0:
            raise CheckpointError(
                f"{fields.where}: partial_rotary_factor={factor} is not supported"
            )
    kinds = {rope.take_text(name) for name in ("rope_type", "type") if name in parameters | scaling}
    if len(kinds) > 1:
        raise CheckpointError(f"{rope.where}: rope_type and type contradict: {sorted(kinds)}")
    kind = kinds.pop() if kinds else "default"
    if kind == "default":
        rope.finish()
        return RopeConfig(theta=theta)
    if kind != "llama3":
        raise CheckpointError(f"{rope.where}: scaling {kind!r} is not supported, only 'llama3'")
    llama3 = Llama3Scaling(
        factor=rope.take_float("factor"),
        low_freq_factor=rope.take_float("low_freq_factor"),
        high_freq_factor=rope.take_float("high_freq_factor"),
        original_max_positions=rope.take_int("original_max_position_embeddings", max_positions),
    )
    if llama3.factor < 1 or not 0 < llama3.low_freq_factor < llama3.high_freq_factor:
        raise CheckpointError(
            f"{rope.where}: wanted factor >= 1 and 0 < low_freq_factor < high_freq_factor, "
            f"got {llama3}"
        )
    rope.finish()
    return RopeConfig(theta=theta, scaling=llama3)


def _theta(hf: Fields, rope: Fields) -> float:
    outer, inner = hf.take_float("rope_theta", None), rope.take_float("rope_theta", None)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{hf.where}: rope_theta is {outer}, in the rope parameters {inner}")
    theta = inner if inner is not None else outer
    if theta is None:
        hf.note(f"no rope_theta, the default {DEFAULT_THETA:g} is assumed")
        return DEFAULT_THETA
    if theta <= 0:
        raise CheckpointError(f"{hf.where}: rope_theta must be positive, got {theta}")
    return theta


def _merged(parameters: dict[str, Any], scaling: dict[str, Any], where: str) -> dict[str, Any]:
    clashing = {
        name: (scaling[name], parameters[name])
        for name in scaling.keys() & parameters.keys()
        if scaling[name] != parameters[name]
    }
    if clashing:
        raise CheckpointError(f"{where}: rope_scaling and rope_parameters contradict: {clashing}")
    return parameters | scaling

"""What a model is, in our own words: everything the decoder's maths depends on and nothing else.

A family (`convert.families`) is a reading of a checkpoint's configuration into an `ArchConfig`.
No JAX here, so that conversion and command-line help load quickly.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Rotary frequencies stretched for long contexts, as in Llama 3.1 and later.

    Attributes:
        factor: how much longer the context becomes; low frequencies are divided by it.
        low_freq_factor: wavelengths above `original_max_positions / low_freq_factor` tokens are
            divided by `factor` in full.
        high_freq_factor: wavelengths below `original_max_positions / high_freq_factor` tokens
            are left as they are; those between are interpolated.
        original_max_positions: context length of the pre-training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., arXiv:2104.09864), half-split ("NeoX") layout.

    Attributes:
        theta: base of the geometric series of wavelengths.
        scaling: long-context adjustment of the frequencies, or None for the plain series.
    """

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchConfig:
    """Architecture of a decoder-only transformer with pre-norm, rotary attention and a gated MLP.

    Attributes:
        family: name of the reading that produced it (`llama`, `mistral`, `qwen2`, `qwen3`);
            for people and round trips, the maths never looks at it.
        vocab: rows of the embedding; logits have this many columns.
        embed: width of the residual stream.
        layers: number of decoder layers.
        q_heads: query heads per layer; a multiple of `kv_heads`.
        kv_heads: key/value heads per layer.
        head_dim: width of one head; need not be `embed / q_heads`.
        mlp: inner width of the SiLU-gated MLP.
        norm_eps: epsilon of every RMS norm.
        rope: rotary embedding of queries and keys.
        windows: per layer, how many latest positions a query may see, itself included;
            None for all of them.
        qkv_bias: whether the query, key and value projections add a bias.
        out_bias: whether the attention output projection adds a bias.
        qk_norm: whether each query and key head is RMS-normalised before rotation.
        tied: whether the output projection reuses the embedding table.
        max_positions: longest sequence the checkpoint states, in tokens.
    """

    family: str
    vocab: int
    embed: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_positions: int

    def __post_init__(self) -> None:
        sizes = ("vocab", "embed", "layers", "q_heads", "kv_heads", "head_dim", "mlp")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.q_heads % self.kv_heads:
            raise ValueError(f"{self.q_heads=} is not a multiple of {self.kv_heads=}")
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
        if len(self.windows) != self.layers:
            raise ValueError(f"{len(self.windows)} windows for {self.layers} layers")
        if any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"a sliding window holds at least 1 position, got {self.windows}")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.q_heads // self.kv_heads

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim

    def to_json(self) -> dict[str, Any]:
        """Plain data for `arch.json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ArchConfig:
        """Inverse of `to_json`.

        Raises:
            ValueError: a field is missing, unknown, or holds an impossible value.
        """
        try:
            rope = dict(data["rope"])
            scaling = rope.pop("scaling")
            return cls(
                **{k: v for k, v in data.items() if k not in ("rope", "windows")},
                rope=RopeConfig(**rope, scaling=Llama3Scaling(**scaling) if scaling else None),
                windows=tuple(data["windows"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an architecture description: {error}") from error

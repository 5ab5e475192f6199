"""A fast tokenizer rebuilt from a GGUF file's vocabulary.

The file holds tokens and merges, but only the *name* of the way that text is split before
merging. Each known name is a row of `SPLITTERS`; any other is refused, since a wrong split gives
wrong tokens without any error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from convert.source import CheckpointError

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF: transformers

# The split of Llama 3 and Qwen 2 as their tokenizer.json files spell it; digits are grouped
# by up to three in the first and stand alone in the second.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Splitter(NamedTuple):
    """How text is cut before byte-pair merging.

    Attributes:
        build: makes the pre-tokenizer.
        normalizer: makes the text normalizer, or None.
        whole_words: whether a piece that is a token itself skips merging.
        adds_bos: whether a text begins with BOS when the file does not say.
    """

    build: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    whole_words: bool = False
    adds_bos: bool = False


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _regex(digits: str) -> Callable[[], Any]:
    def build() -> Any:
        split = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, bytes_only])

    return build


SPLITTERS: Mapping[str, Splitter] = {
    "gpt-2": Splitter(_gpt2),
    "smollm": Splitter(_smollm),
    "llama-bpe": Splitter(_regex("{1,3}"), whole_words=True, adds_bos=True),
    "qwen2": Splitter(_regex(""), normalizer=normalizers.NFC),
}
"""`tokenizer.ggml.pre` to the way of splitting it stands for."""


class GGUFTokenizer:
    """The tokenizer that a GGUF file describes; nothing is built before `save`.

    Args:
        metadata: the file's metadata.
        where: the file's name, for errors.

    Raises:
        CheckpointError: no vocabulary, or one of a kind that cannot be rebuilt faithfully.
    """

    directory = None  # there is none until one is saved

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self._metadata = metadata
        kind = self._get("model")
        if kind != "gpt2":
            raise CheckpointError(
                f"{where}: tokenizer model {kind!r} cannot be rebuilt, only byte-level BPE ('gpt2')"
            )
        if self._get("pre") not in SPLITTERS:
            raise CheckpointError(
                f"{where}: pre-tokenizer {self._get('pre')!r} is not known, "
                f"known: {', '.join(SPLITTERS)}"
            )
        missing = [name for name in ("tokens", "token_type", "merges") if not self._get(name)]
        if missing:
            raise CheckpointError(f"{where}: the vocabulary lacks {', '.join(missing)}")
        self._tokens: list[str] = self._get("tokens")
        if len(set(self._tokens)) != len(self._tokens):
            raise CheckpointError(f"{where}: the vocabulary has a token twice")
        num_types = len(self._get("token_type"))
        if num_types != len(self._tokens):
            raise CheckpointError(
                f"{where}: {num_types} token types for {len(self._tokens)} tokens"
            )
        for name in _NAMED:
            if (index := self._get(f"{name}_token_id")) is not None and index >= len(self._tokens):
                raise CheckpointError(f"{where}: {name}_token_id {index} is not in the vocabulary")
        self._merges = [tuple(merge.split(" ")) for merge in self._get("merges")]
        known = set(self._tokens)
        for merge in self._merges:
            if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
                raise CheckpointError(f"{where}: the merge {merge} does not fit the vocabulary")

    @property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return len(self._tokens)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        self._build().save(str(directory / "tokenizer.json"))
        named = {
            f"{name}_token": self._tokens[index]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (index := self._get(f"{key}_token_id")) is not None
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **named,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text)
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None:
            (directory / "chat_template.jinja").write_text(template)

    def _get(self, name: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}")

    def _build(self) -> Tokenizer:
        splitter = SPLITTERS[self._get("pre")]
        vocab = {token: index for index, token in enumerate(self._tokens)}
        model = models.BPE(vocab=vocab, merges=self._merges, ignore_merges=splitter.whole_words)
        tokenizer = Tokenizer(model)
        if splitter.normalizer is not None:
            tokenizer.normalizer = splitter.normalizer()
        tokenizer.pre_tokenizer = splitter.build()
        tokenizer.decoder = decoders.ByteLevel()
        kinds = list(zip(self._tokens, self._get("token_type"), strict=True))
        for kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL
            tokenizer.add_tokens(
                [
                    AddedToken(token, special=special, normalized=False)
                    for token, its_kind in kinds
                    if its_kind == kind
                ]
            )
        if self._get("add_bos_token") or (self._get("add_bos_token") is None and splitter.adds_bos):
            bos = self._get("bos_token_id")
            token = self._tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, bos)]
            )
        return tokenizer

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

from convert.hf_config import Fields
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
        self._where = where
        prefix = "tokenizer.ggml."
        own = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        fields = Fields(own, where)
        if (kind := fields.take_text("model")) != "gpt2":
            raise CheckpointError(
                f"{where}: tokenizer model {kind!r} cannot be rebuilt, only byte-level BPE ('gpt2')"
            )
        if (pre := fields.take_text("pre")) not in SPLITTERS:
            raise CheckpointError(
                f"{where}: pre-tokenizer {pre!r} is not known, known: {', '.join(SPLITTERS)}"
            )
        self._splitter = SPLITTERS[pre]
        self._tokens: list[str] = self._take_list(fields, "tokens", str)
        self._types: list[int] = self._take_list(fields, "token_type", int)
        merges = self._take_list(fields, "merges", str)
        self._merges = [tuple(merge.split(" ")) for merge in merges]
        self._named = {
            name: index
            for key, name in _NAMED.items()
            if (index := fields.take_int(f"{key}_token_id", None)) is not None
        }
        self._adds_bos = fields.take_bool("add_bos_token", self._splitter.adds_bos)
        self._chat_template = Fields(metadata, where).take_text("tokenizer.chat_template", None)
        self._check()

    def _take_list(self, fields: Fields, name: str, kind: type) -> list[Any]:
        value = fields.take(name)
        if not isinstance(value, list) or not value or not isinstance(value[0], kind):
            raise CheckpointError(f"{self._where}: {name} is not a list of {kind.__name__}")
        return value  # a GGUF array holds one type

    def _check(self) -> None:
        """What `save` relies on, so that nothing is written for a vocabulary that cannot be."""
        known = set(self._tokens)
        if len(known) != len(self._tokens):
            raise CheckpointError(f"{self._where}: the vocabulary has a token twice")
        if len(self._types) != len(self._tokens):
            raise CheckpointError(
                f"{self._where}: {len(self._types)} token types for {len(self._tokens)} tokens"
            )
        for name, index in self._named.items():
            if not 0 <= index < len(self._tokens):
                raise CheckpointError(
                    f"{self._where}: {name} token id {index} is not in the vocabulary"
                )
        if self._adds_bos and "bos" not in self._named:
            raise CheckpointError(
                f"{self._where}: texts begin with BOS, but bos_token_id is absent"
            )
        for merge in self._merges:
            if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
                raise CheckpointError(
                    f"{self._where}: the merge {merge} does not fit the vocabulary"
                )

    @property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return len(self._tokens)

    def save(self, directory: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template."""
        directory.mkdir(parents=True, exist_ok=True)
        self._build().save(str(directory / "tokenizer.json"))
        named = {f"{name}_token": self._tokens[index] for name, index in self._named.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **named,
        }
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text)
        if self._chat_template is not None:
            (directory / "chat_template.jinja").write_text(self._chat_template)

    def _build(self) -> Tokenizer:
        splitter = self._splitter
        vocab = {token: index for index, token in enumerate(self._tokens)}
        model = models.BPE(vocab=vocab, merges=self._merges, ignore_merges=splitter.whole_words)
        tokenizer = Tokenizer(model)
        if splitter.normalizer is not None:
            tokenizer.normalizer = splitter.normalizer()
        tokenizer.pre_tokenizer = splitter.build()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind == CONTROL, normalized=False)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if kind in (CONTROL, USER_DEFINED)
            ]
        )
        if self._adds_bos:
            bos = self._named["bos"]
            token = self._tokens[bos]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, bos)]
            )
        return tokenizer

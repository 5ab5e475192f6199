"""A fast tokenizer rebuilt from a GGUF file's vocabulary.

A byte-level vocabulary comes with merges, but only with the *name* of the way that text is split
before merging. Each known name is a row of `SPLITTERS`; any other is refused, since a wrong split
gives wrong tokens without any error.

A vocabulary that SentencePiece trained (Llama 2, Mistral 7B) has a score per piece instead: of all
neighbours that make a piece, those are merged first whose piece scores highest, and the leftmost
of equals. Merging by rank does the same as long as no two pieces that merging makes have the same
score; otherwise the vocabulary is refused. Only the ways to make one and the same piece share a
score then. Where they overlap (`a|aa|a`), the leftmost wins in SentencePiece and the one with the
longer left half here; merging leaves longer pieces on the left, so that the two agree in practice.
Text is not split at all, and spaces become `▁`. As in llama.cpp, the text after a control or
user-defined token begins with a space of its own, like the beginning of the whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF: transformers

_SPACE = "▁"
_BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

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
        if (kind := fields.take_text("model")) not in ("gpt2", "llama"):
            raise CheckpointError(
                f"{where}: tokenizer model {kind!r} cannot be rebuilt, only byte-level BPE "
                "('gpt2') and SentencePiece's BPE ('llama')"
            )
        self._tokens: list[str] = self._take_list(fields, "tokens", str)
        self._types: list[int] = self._take_list(fields, "token_type", int)
        self._named = {
            name: index
            for key, name in _NAMED.items()
            if (index := fields.take_int(f"{key}_token_id", None)) is not None
        }
        self._chat_template = Fields(metadata, where).take_text("tokenizer.chat_template", None)
        self._check_tokens()
        read = self._read_byte_level if kind == "gpt2" else self._read_sentencepiece
        read(fields)
        self._check_ends()

    def _read_byte_level(self, fields: Fields) -> None:
        if (pre := fields.take_text("pre")) not in SPLITTERS:
            raise CheckpointError(
                f"{self._where}: pre-tokenizer {pre!r} is not known, known: {', '.join(SPLITTERS)}"
            )
        splitter = SPLITTERS[pre]
        self._merges = self._take_merges(fields)
        self._ends = self._take_ends(fields, splitter.adds_bos)
        self._build_bare = partial(_build_byte_level, splitter)

    def _read_sentencepiece(self, fields: Fields) -> None:
        # Neither Llama 2 nor Mistral change the text further, and llama.cpp would not do it.
        fields.require("remove_extra_whitespaces", False)
        if fields.take("precompiled_charsmap", None):
            raise CheckpointError(f"{self._where}: precompiled_charsmap is not supported")
        if fields.states("merges"):  # from a tokenizer.json; all scores are the same then
            self._merges = self._take_merges(fields)
        else:
            scores: list[float] = self._take_list(fields, "scores", float)
            self._check_length("scores", scores)
            self._merges = merges_from_scores(self._tokens, self._types, scores, self._where)
        if "unk" not in self._named and UNKNOWN in self._types:
            self._named["unk"] = self._types.index(UNKNOWN)
        if "unk" not in self._named and not _BYTE_PIECES.issubset(self._tokens):
            raise CheckpointError(
                f"{self._where}: neither all bytes nor unknown_token_id, for unknown characters"
            )
        self._ends = self._take_ends(fields, adds_bos=True)
        self._build_bare = partial(
            _build_sentencepiece,
            unknown=self._tokens[self._named["unk"]] if "unk" in self._named else None,
            space_prefix=fields.take_bool("add_space_prefix", True),
        )

    def _take_merges(self, fields: Fields) -> list[tuple[str, str]]:
        known = set(self._tokens)
        merges: list[tuple[str, str]] = []
        for text in self._take_list(fields, "merges", str):
            left, space, right = text.partition(" ")
            if not space or not known.issuperset((left, right, left + right)):
                raise CheckpointError(
                    f"{self._where}: the merge {(left, right)} does not fit the vocabulary"
                )
            merges.append((left, right))
        return merges

    def _take_ends(self, fields: Fields, adds_bos: bool) -> dict[str, bool]:
        """Whether BOS and EOS are put around a text."""
        return {
            "bos": fields.take_bool("add_bos_token", adds_bos),
            "eos": fields.take_bool("add_eos_token", False),
        }

    def _take_list(self, fields: Fields, name: str, kind: type) -> list[Any]:
        value = fields.take(name)
        if not isinstance(value, list) or not value or not isinstance(value[0], kind):
            raise CheckpointError(f"{self._where}: {name} is not a list of {kind.__name__}")
        return value  # a GGUF array holds one type

    # What `save` relies on, so that nothing is written for a vocabulary that cannot be.

    def _check_tokens(self) -> None:
        if len(set(self._tokens)) != len(self._tokens):
            raise CheckpointError(f"{self._where}: the vocabulary has a token twice")
        self._check_length("token types", self._types)
        for name, index in self._named.items():
            if not 0 <= index < len(self._tokens):
                raise CheckpointError(
                    f"{self._where}: {name} token id {index} is not in the vocabulary"
                )

    def _check_length(self, name: str, values: Sequence[Any]) -> None:
        if len(values) != len(self._tokens):
            raise CheckpointError(
                f"{self._where}: {len(values)} {name} for {len(self._tokens)} tokens"
            )

    def _check_ends(self) -> None:
        for name, adds in self._ends.items():
            if adds and name not in self._named:
                where = "begin with BOS" if name == "bos" else "end with EOS"
                raise CheckpointError(
                    f"{self._where}: texts {where}, but {name}_token_id is absent"
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
        vocab = {token: index for index, token in enumerate(self._tokens)}
        tokenizer = self._build_bare(vocab, self._merges)
        tokenizer.add_tokens(
            [
                AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, kind in zip(self._tokens, self._types, strict=True)
                if kind in (UNKNOWN, CONTROL, USER_DEFINED)
            ]
        )
        ends = {name: self._tokens[self._named[name]] for name, adds in self._ends.items() if adds}
        if ends:
            before, after = ([ends[name]] if name in ends else [] for name in ("bos", "eos"))
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                pair=[*before, "$A", *after, *before, "$B", *after],
                special_tokens=[(token, vocab[token]) for token in set(ends.values())],
            )
        return tokenizer


def _build_byte_level(
    splitter: Splitter, vocab: dict[str, int], merges: list[tuple[str, str]]
) -> Tokenizer:
    """The tokenizer without control tokens and template."""
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=splitter.whole_words)
    tokenizer = Tokenizer(model)
    if splitter.normalizer is not None:
        tokenizer.normalizer = splitter.normalizer()
    tokenizer.pre_tokenizer = splitter.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], where: str
) -> list[tuple[str, str]]:
    """The merges that scores stand for, first the ones that apply first.

    Only normal pieces are made and merged: control, unknown and byte pieces never are, and
    user-defined ones are cut out of the text beforehand. The file does not say how its vocabulary
    was trained; it shows in the scores, ranks 0, -1, -2 ... after byte-pair training and
    logarithms of probabilities in a Unigram model.

    Args:
        tokens: the pieces.
        types: their `tokenizer.ggml.token_type`.
        scores: their scores.
        where: the file's name, for errors.

    Raises:
        CheckpointError: scores that are no ranks, as a Unigram model's, or that do not order
            the merges, or a piece that merging by rank could not make.
    """
    normal = {
        token: score
        for token, kind, score in zip(tokens, types, scores, strict=True)
        if kind == NORMAL
    }
    _check_scores(normal, where)
    unused = {token for token, kind in zip(tokens, types, strict=True) if kind == UNUSED}
    for token in unused:
        if _splits(token, normal):
            raise CheckpointError(f"{where}: the unused piece {token!r} takes part in merging")
    merges: list[tuple[str, str]] = []
    made_by: dict[float, str] = {}
    for token in sorted(normal, key=normal.__getitem__, reverse=True):
        if not (splits := _splits(token, normal)):
            continue
        other = made_by.setdefault(normal[token], token)
        if other != token:
            raise CheckpointError(
                f"{where}: the pieces {other!r} and {token!r} have the same score "
                f"{normal[token]}, so that neither is merged before the other"
            )
        merges += splits
    return merges


def _splits(token: str, known: dict[str, float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two known pieces, the longest left half first."""
    pairs = ((token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1))
    return [(left, right) for left, right in pairs if left in known and right in known]


def _check_scores(normal: dict[str, float], where: str) -> None:
    for token, score in normal.items():
        if not float(score).is_integer():  # NaN and infinity are not either
            raise CheckpointError(
                f"{where}: the piece {token!r} has the score {score}, wanted a whole number as "
                "byte-pair training gives; a Unigram model cannot be rebuilt"
            )
        if missing := set(token).difference(normal):
            raise CheckpointError(
                f"{where}: the piece {token!r} has the character {min(missing)!r}, which is no "
                "piece of its own"
            )


def _build_sentencepiece(
    vocab: dict[str, int], merges: list[tuple[str, str]], unknown: str | None, space_prefix: bool
) -> Tokenizer:
    """Model, normalizer and decoder; control tokens and the template are left to the caller.

    Args:
        vocab: pieces and their ids.
        merges: pairs of pieces in the order in which they apply.
        unknown: the piece for characters that are no pieces and have no bytes.
        space_prefix: whether a text begins with a space of its own, which decoding takes off.
    """
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer

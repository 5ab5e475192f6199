"""The tokenizer of a Hugging Face directory: files that are taken over as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

from convert.source import CheckpointError

FAST = "tokenizer.json"
# sentencepiece models, and the vocabularies of byte-level BPE
SLOW = ("tokenizer.model", "vocab.json")
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)


class TokenizerSource(Protocol):
    """A tokenizer that can be written as files which transformers loads without a network."""

    @property
    def directory(self) -> Path | None:
        """A directory that already holds the fast tokenizer, or None if it must be saved first."""
        ...

    @property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        ...

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files into `directory`, which is created."""
        ...


class FastTokenizerFiles:
    """A `tokenizer.json` and what lies beside it; copied byte for byte.

    Raises:
        CheckpointError: `tokenizer.json` is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            data = json.loads((directory / FAST).read_bytes())
            self._num_ids = 1 + max(_ids(data), default=-1)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{FAST} cannot be read: {error!r}") from error

    @property
    def directory(self) -> Path | None:
        """The source directory itself."""
        return self._directory

    @property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return self._num_ids

    def save(self, directory: Path) -> None:
        """Copy the files."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in COMPANIONS:
            if (self._directory / name).is_file():
                shutil.copyfile(self._directory / name, directory / name)


class SlowTokenizerFiles:
    """A tokenizer without `tokenizer.json`: transformers builds the fast one from its model file.

    Raises:
        CheckpointError: transformers cannot build it, for instance without sentencepiece.
    """

    directory = None  # the fast one exists only once saved

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True
            )
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"no fast tokenizer can be built from {_slow_file(directory)}: {error}"
            ) from error
        if not self._tokenizer.is_fast:
            raise CheckpointError(
                f"no fast tokenizer can be built from {_slow_file(directory)}; "
                "is sentencepiece installed?"
            )

    @property
    def num_ids(self) -> int:
        """One more than the highest token id."""
        return 1 + max(self._tokenizer.get_vocab().values())

    def save(self, directory: Path) -> None:
        """Write the fast tokenizer that was built."""
        self._tokenizer.save_pretrained(str(directory))


def find_tokenizer(directory: Path) -> TokenizerSource | None:
    """The tokenizer of a Hugging Face directory, or None if it holds none.

    Raises:
        CheckpointError: there is one, and it cannot be read.
    """
    if (directory / FAST).is_file():
        return FastTokenizerFiles(directory)
    if _slow_file(directory):
        return SlowTokenizerFiles(directory)
    return None


def _slow_file(directory: Path) -> str | None:
    return next((name for name in SLOW if (directory / name).is_file()), None)


def _ids(data: dict[str, Any]) -> list[int]:
    vocab = data["model"].get("vocab", {})
    # Unigram models list their tokens in the order of their ids.
    ids = list(range(len(vocab))) if isinstance(vocab, list) else list(vocab.values())
    return ids + [token["id"] for token in data.get("added_tokens", [])]

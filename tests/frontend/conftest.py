"""A tiny checkpoint with random weights and a tokenizer of its own, in both formats."""

import pytest

from tests.support.tiny_models import VARIANTS, write_checkpoint
from tests.support.tiny_tokenizers import save_tokenizer


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "hf"
    # Rows beyond the tokenizer's 320 ids: padded tables are common.
    write_checkpoint(directory, VARIANTS["llama"] | {"vocab_size": 336})
    return save_tokenizer(directory)


@pytest.fixture(scope="session")
def tiny_native(tiny_hf):
    from convert import convert

    return convert(tiny_hf, tiny_hf.parent / "native").destination

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


@pytest.fixture(scope="session")
def tiny_llm(tiny_native):
    """One engine for all tests that need a real one: its steps take a while to compile."""
    from pagedjax import LLM

    return LLM(
        tiny_native,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_blocks=40,
        compilation_cache=False,
        progress=False,
    )

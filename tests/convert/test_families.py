"""Every family against transformers: the same logits and the same greedy tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import open_checkpoint, write_native
from pagedjax.loading import load_model
from pagedjax.models import decoder_from_params
from tests.support.tiny_models import VARIANTS, save_with_transformers

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # the models are tiny; a pool of threads only gets in the way

# float32 on both sides; the orders of summation differ. Logits are of size 1 to 10.
ATOL = 1e-4


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def converted(request, tmp_path_factory):
    """A model as transformers saved it, and the same one after conversion."""
    root = tmp_path_factory.mktemp(request.param)
    original = save_with_transformers(root / "hf", VARIANTS[request.param])
    write_native(open_checkpoint(root / "hf"), root / "native")
    loaded = load_model(root / "native")
    return original, loaded, root


def jitted(loaded):
    """`(params, tokens[batch, seq]) -> logits`, compiled: op by op it takes seconds."""
    return jax.jit(lambda params, tokens: decoder_from_params(loaded.arch, params)(tokens))


def logits_of(original, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return original(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()


def test_logits_match_transformers_at_every_position(converted):
    """CV28: a wrong row order of queries and keys shows from position 1 on, not at 0."""
    original, loaded, _ = converted
    lengths = (1, 15, 16, 17, 100)
    tokens = np.random.default_rng(0).integers(0, loaded.arch.vocab, (5, 100), dtype=np.int32)
    # One compilation for all: what follows a prompt does not reach back into it.
    ours = np.asarray(jitted(loaded)(loaded.params, jnp.asarray(tokens)))
    for row, length in enumerate(lengths):
        theirs = logits_of(original, tokens[row, :length])
        np.testing.assert_allclose(ours[row, :length], theirs, rtol=0, atol=ATOL)


def test_greedy_continuation_is_the_same_32_tokens(converted):
    original, loaded, _ = converted
    prompt_length = 8
    text = np.random.default_rng(5).integers(0, loaded.arch.vocab, prompt_length, dtype=np.int32)
    for _ in range(32):
        text = np.append(text, np.argmax(logits_of(original, text)[-1])).astype(np.int32)
    # One pass over the finished text chooses at every position as 32 single steps would.
    logits = np.asarray(jitted(loaded)(loaded.params, jnp.asarray(text)[None]))[0]
    chosen = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(chosen[prompt_length - 1 : -1], text[prompt_length:])


def test_unconverted_directory_loads_as_the_same_arrays(converted):
    _, loaded, root = converted
    direct = load_model(root / "hf")
    assert direct.arch == loaded.arch
    assert direct.generation == loaded.generation
    assert set(direct.params) == set(loaded.params)
    for name, array in direct.params.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(loaded.params[name]), name)


def test_both_spellings_of_the_configuration_give_one_architecture(converted):
    """CV15: transformers 5 writes rope_parameters; the same fields the old way mean the same."""
    original, loaded, root = converted
    saved = json.loads((root / "hf" / "config.json").read_text())
    assert "rope_parameters" in saved and "rope_theta" not in saved
    rope = saved.pop("rope_parameters")
    saved["rope_theta"] = rope.pop("rope_theta")
    saved["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    saved["torch_dtype"] = saved.pop("dtype")
    (root / "hf" / "config.json").write_text(json.dumps(saved))
    assert open_checkpoint(root / "hf").arch == loaded.arch

"""Opening a checkpoint: which tensors it must have, and what becomes of each."""

import json
import math
import os
import pickle

import numpy as np
import pytest

from convert import CheckpointError, open_checkpoint
from convert import checkpoint as checkpoint_module
from convert.rules import rules_for
from pagedjax.models import param_shapes
from tests.support.tiny_models import (
    BF16,
    VARIANTS,
    random_tensors,
    tensor_shapes,
    write_checkpoint,
)

LLAMA = VARIANTS["llama"]
TIED = VARIANTS["llama_tied"]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def tensors_of(config, dtype=np.float32):
    return random_tensors(tensor_shapes(config), dtype)


def native_of(directory, dtype=None):
    return {tensor.name: tensor.load() for tensor in open_checkpoint(directory).tensors(dtype)}


def hf_again(native, arch):
    """The Hugging Face tensors, taken out of the native ones by hand."""
    layers = range(arch.layers)
    tensors = {TABLE: native["embed.table"], "model.norm.weight": native["norm.scale"]}
    for i in layers:
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for kind in ("qkv", "qkv_bias"):
            if (fused := native.get(f"{ours}attention.{kind}")) is None:
                continue
            tail, what = fused.shape[3:], "bias" if kind.endswith("bias") else "weight"
            parts = {"q": fused[:, :-2], "k": fused[:, -2], "v": fused[:, -1]}
            for letter, part in parts.items():
                tensors[f"{theirs}self_attn.{letter}_proj.{what}"] = part.reshape(-1, *tail)
        out = native[f"{ours}attention.out"]
        tensors[f"{theirs}self_attn.o_proj.weight"] = out.reshape(out.shape[0], -1)
        tensors[f"{theirs}mlp.gate_proj.weight"] = native[f"{ours}mlp.gate_up"][0]
        tensors[f"{theirs}mlp.up_proj.weight"] = native[f"{ours}mlp.gate_up"][1]
        tensors[f"{theirs}mlp.down_proj.weight"] = native[f"{ours}mlp.down"]
        tensors[f"{theirs}input_layernorm.weight"] = native[f"{ours}attention_norm.scale"]
        tensors[f"{theirs}post_attention_layernorm.weight"] = native[f"{ours}mlp_norm.scale"]
        same = {
            "attention.q_norm.scale": "self_attn.q_norm.weight",
            "attention.k_norm.scale": "self_attn.k_norm.weight",
            "attention.out_bias": "self_attn.o_proj.bias",
        }
        for our_name, their_name in same.items():
            if ours + our_name in native:
                tensors[theirs + their_name] = native[ours + our_name]
    if "unembed.table" in native:
        tensors[HEAD] = native["unembed.table"]
    return tensors


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_bit_survives_to_the_native_layout_and_back(tmp_path, variant, dtype):
    """CV28, CV29: stored bytes equal the source's."""
    config = VARIANTS[variant]
    written = write_checkpoint(tmp_path, config, tensors_of(config, dtype), shards=2)
    arch = open_checkpoint(tmp_path).arch
    again = hf_again(native_of(tmp_path), arch)
    assert again.keys() == written.keys()
    for name, array in written.items():
        assert again[name].dtype == array.dtype, name
        assert again[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_native_names_and_shapes_are_the_models_own(tmp_path, variant):
    write_checkpoint(tmp_path, VARIANTS[variant])
    checkpoint = open_checkpoint(tmp_path)
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors()}
    assert shapes == param_shapes(checkpoint.arch)
    for tensor in checkpoint.tensors():
        loaded = tensor.load()
        assert (loaded.shape, loaded.dtype, loaded.nbytes) == (
            tensor.shape,
            tensor.dtype,
            tensor.nbytes,
        )


def test_reading_in_small_blocks_gives_the_same(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, VARIANTS["qwen2"])
    whole = native_of(tmp_path)
    monkeypatch.setattr(checkpoint_module, "BLOCK_BYTES", 1000)
    for name, array in native_of(tmp_path).items():
        np.testing.assert_array_equal(array, whole[name], name)


def test_tied_checkpoint_has_no_output_projection(tmp_path):
    """CV01."""
    write_checkpoint(tmp_path, TIED)
    assert "unembed.table" not in native_of(tmp_path)


def test_a_tied_checkpoint_may_store_its_table_twice(tmp_path):
    """CV02."""
    tensors = tensors_of(TIED)
    write_checkpoint(tmp_path, TIED, tensors | {HEAD: tensors[TABLE]})
    assert "unembed.table" not in native_of(tmp_path)


@pytest.mark.parametrize("other", ["values", "shape", "last row"])
def test_a_tied_checkpoint_with_another_output_projection_is_refused(tmp_path, other, monkeypatch):
    """CV02: neither reading of it can be taken for granted."""
    monkeypatch.setattr(checkpoint_module, "BLOCK_BYTES", 1000)
    tensors = tensors_of(TIED)
    head = tensors[TABLE].copy()
    if other == "values":
        head += 1
    elif other == "shape":
        head = head[:-1]
    else:
        head[-1, -1] += 1
    write_checkpoint(tmp_path, TIED, tensors | {HEAD: head})
    with pytest.raises(CheckpointError, match=r"ties the embeddings.*lm_head.weight differs"):
        open_checkpoint(tmp_path)


def test_an_untied_checkpoint_without_output_projection_is_refused(tmp_path):
    tensors = tensors_of(LLAMA)
    del tensors[HEAD]
    write_checkpoint(tmp_path, LLAMA, tensors)
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*tie_word_embeddings"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("variant", "taken_for", "left_over"),
    [
        ("llama_bias", "llama", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen2", "llama_tied", "model.layers.0.self_attn.k_proj.bias"),
        ("qwen3", "llama", "model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_tensors_without_a_place_are_named(tmp_path, variant, taken_for, left_over):
    """CV23: a bias or a norm that the configuration does not speak of is never dropped."""
    config = VARIANTS[taken_for] | {"num_key_value_heads": 2, "num_hidden_layers": 2}
    write_checkpoint(tmp_path, config, tensors_of(VARIANTS[variant]))
    with pytest.raises(CheckpointError, match=f"no place in the architecture.*{left_over}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama_bias"])
def test_biases_and_head_norms_are_consumed_where_the_family_has_them(tmp_path, variant):
    """CV23: the Qwen 2 configuration has no flag for its biases."""
    write_checkpoint(tmp_path, VARIANTS[variant])
    arch = open_checkpoint(tmp_path).arch
    assert arch.qkv_bias == (variant != "qwen3")
    assert arch.qk_norm == (variant == "qwen3")
    assert arch.out_bias == (variant == "llama_bias")


@pytest.mark.parametrize("absent", ["model.layers.1.self_attn.v_proj.weight", "model.norm.weight"])
def test_missing_tensors_are_named(tmp_path, absent):
    """CV24: nothing stays at its initial value."""
    tensors = tensors_of(LLAMA)
    del tensors[absent]
    write_checkpoint(tmp_path, LLAMA, tensors)
    with pytest.raises(CheckpointError, match=f"missing: {absent}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("stated", "stored", "says"),
    [(3, 2, r"missing: model.layers.2"), (2, 3, r"no place in the architecture: model.layers.2")],
)
def test_a_wrong_number_of_layers_is_noticed_both_ways(tmp_path, stated, stored, says):
    """CV24."""
    tensors = tensors_of(LLAMA | {"num_hidden_layers": stored})
    write_checkpoint(tmp_path, LLAMA | {"num_hidden_layers": stated}, tensors)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


def test_rotary_frequencies_of_old_checkpoints_are_let_go(tmp_path):
    tensors = tensors_of(LLAMA)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(12, np.float32)
    write_checkpoint(tmp_path, LLAMA, tensors)
    assert native_of(tmp_path).keys() == param_shapes(open_checkpoint(tmp_path).arch).keys()


def test_head_dim_that_is_not_embed_over_heads(tmp_path):
    """CV26."""
    config = LLAMA | {"hidden_size": 40, "num_key_value_heads": 2, "head_dim": 16}
    write_checkpoint(tmp_path, config)
    native = native_of(tmp_path)
    assert native["layers.0.attention.qkv"].shape == (2, 2 + 2, 16, 40)
    assert native["layers.0.attention.out"].shape == (40, 4, 16)


def test_mixed_dtypes_stay_as_they_are_stored(tmp_path):
    """CV29: norms in float32, the rest in bfloat16."""
    tensors = {
        name: array if name.endswith("norm.weight") else array.astype(BF16)
        for name, array in tensors_of(LLAMA).items()
    }
    write_checkpoint(tmp_path, LLAMA, tensors)
    for name, array in native_of(tmp_path).items():
        assert array.dtype == (np.float32 if name.endswith("norm.scale") else BF16), name


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("bfloat16", BF16), ("float16", np.float16), ("float32", np.float32)]
)
def test_a_dtype_that_is_asked_for_is_everywhere(tmp_path, dtype, wanted):
    """CV29."""
    tensors = write_checkpoint(tmp_path, LLAMA)
    native = native_of(tmp_path, dtype)
    assert {array.dtype for array in native.values()} == {np.dtype(wanted)}
    np.testing.assert_array_equal(native["embed.table"], tensors[TABLE].astype(wanted))


def test_pieces_of_different_dtypes_fuse_without_losing_a_bit(tmp_path):
    tensors = tensors_of(LLAMA, BF16)
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors_of(LLAMA)[name]
    write_checkpoint(tmp_path, LLAMA, tensors)
    native = native_of(tmp_path)
    arch = open_checkpoint(tmp_path).arch
    assert native["layers.0.attention.qkv"].dtype == np.float32
    again = hf_again(native, arch)
    np.testing.assert_array_equal(again[name], tensors[name])
    key = "model.layers.0.self_attn.k_proj.weight"
    np.testing.assert_array_equal(again[key], tensors[key].astype(np.float32))


def test_an_unknown_dtype_is_refused(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    with pytest.raises(ValueError, match="'int4'"):
        list(open_checkpoint(tmp_path).tensors("int4"))


def test_integers_are_not_taken_for_weights(tmp_path):
    """CV33: a quantized checkpoint whose configuration keeps quiet about it."""
    tensors = tensors_of(LLAMA)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.ones(tensors[name].shape, np.int8)
    write_checkpoint(tmp_path, LLAMA, tensors)
    with pytest.raises(CheckpointError, match=f"{name} is stored as int8"):
        open_checkpoint(tmp_path)


def test_quantize_config_alone_marks_a_quantized_checkpoint(tmp_path):
    """CV33."""
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / "quantize_config.json").write_text('{"bits": 4}')
    with pytest.raises(CheckpointError, match="quantize_config.json"):
        open_checkpoint(tmp_path)


def byte_level_tokenizer(directory, num_tokens):
    from tokenizers import Tokenizer, models

    vocab = {f"t{index}": index for index in range(num_tokens)}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(directory / "tokenizer.json"))


def test_a_padded_vocabulary_is_fine(tmp_path):
    """CV31: rows 160, vocab_size 160, tokenizer 150."""
    write_checkpoint(tmp_path, LLAMA)
    byte_level_tokenizer(tmp_path, 150)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.arch.vocab == 160
    assert checkpoint.tokenizer.num_ids == 150


def test_fewer_rows_than_the_stated_vocabulary_are_refused_with_both_numbers(tmp_path):
    """CV31: rows 150, vocab_size 160."""
    write_checkpoint(tmp_path, LLAMA, tensors_of(LLAMA | {"vocab_size": 150}))
    with pytest.raises(CheckpointError, match=r"\(150, 64\), wanted \(160, 64\)"):
        open_checkpoint(tmp_path)


def test_a_tokenizer_with_more_ids_than_rows_is_refused_with_both_numbers(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    byte_level_tokenizer(tmp_path, 161)
    with pytest.raises(CheckpointError, match=r"ids up to 160.*160 rows"):
        open_checkpoint(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_checkpoint(tmp_path)


class _Payload:
    """Unpickling it creates a directory."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_unopened(tmp_path, name):
    """CV13."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    marker = tmp_path / "marker"
    (tmp_path / name).write_bytes(pickle.dumps(_Payload(marker)))
    with pytest.raises(CheckpointError, match=f"{name} is a pickle"):
        open_checkpoint(tmp_path)
    assert not marker.exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path):
    """CV13: many repositories carry both."""
    write_checkpoint(tmp_path, LLAMA)
    marker = tmp_path / "marker"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload(marker)))
    native_of(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "config.json"),
        ({"model.gguf": ""}, "model.gguf"),
        ({"config.json": json.dumps(LLAMA)}, "neither model.safetensors nor"),
        ({"config.json": "{"}, "config.json is not JSON"),
        ({"config.json": "[]"}, "config.json must hold an object"),
    ],
)
def test_an_incomplete_directory_says_what_it_lacks(tmp_path, files, says):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(tmp_path)


def test_a_path_that_does_not_exist_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "weights.zip").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="weights.zip"):
        open_checkpoint(tmp_path / "weights.zip")


def test_rules_of_a_real_size_count_every_parameter():
    """Llama 3.1 8B has 8,030,261,248 parameters; no weights are needed to count them."""
    from convert.families import read_arch

    config = LLAMA | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    }
    arch = read_arch(config, "config.json")[0]
    pieces = [piece for rule in rules_for(arch) for piece in rule.pieces]
    assert sum(math.prod(piece.stored_shape(arch)) for piece in pieces) == 8_030_261_248

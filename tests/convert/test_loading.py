"""From a path to parameters on devices."""

import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from convert import open_checkpoint, write_native
from pagedjax.loading import load_model, read_arch
from pagedjax.models import param_axes, param_shapes
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import (
    BF16,
    VARIANTS,
    random_tensors,
    tensor_shapes,
    write_checkpoint,
)

CONFIG = VARIANTS["qwen2"] | {"vocab_size": 320}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """One model in the three formats, bfloat16."""
    root = tmp_path_factory.mktemp("formats")
    tensors = random_tensors(tensor_shapes(CONFIG), BF16)
    write_checkpoint(root / "hf", CONFIG, tensors)
    write_gguf(root / "m.gguf", CONFIG, tensors, arch="qwen2")
    write_native(open_checkpoint(root / "hf"), root / "native")
    return {"hf": root / "hf", "gguf": root / "m.gguf", "native": root / "native"}


FORMATS = ["hf", "gguf", "native"]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32", "float16"])
def test_all_formats_give_the_same_arrays_in_the_dtype_asked_for(places, kind, dtype):
    loaded = load_model(places[kind], dtype=dtype)
    wanted = {tensor.name: tensor.load() for tensor in open_checkpoint(places["hf"]).tensors(dtype)}
    assert {name: array.shape for name, array in loaded.params.items()} == param_shapes(loaded.arch)
    for name, array in wanted.items():
        assert loaded.params[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(loaded.params[name]), array, name)


@pytest.mark.parametrize("kind", FORMATS)
def test_arrays_go_to_the_default_device(places, kind):
    for array in load_model(places[kind]).params.values():
        assert array.devices() == {jax.devices()[0]}


@pytest.mark.parametrize("kind", FORMATS)
def test_arrays_go_where_their_sharding_says(places, kind):
    """Each device holds its own part, without the whole array passing through one of them."""
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    split = {"kv_heads": "tensor", "mlp": "tensor"}
    shardings = {
        name: NamedSharding(mesh, PartitionSpec(*(split.get(axis or "") for axis in axes)))
        for name, axes in param_axes(read_arch(places[kind])).items()
    }
    loaded = load_model(places[kind], sharding=shardings)
    whole = load_model(places["native"])
    for name, array in loaded.params.items():
        assert array.sharding.is_equivalent_to(shardings[name], array.ndim), name
        np.testing.assert_array_equal(np.asarray(array), np.asarray(whole.params[name]), name)
    qkv = loaded.params["layers.0.attention.qkv"]
    assert qkv.addressable_shards[0].data.shape[0] == qkv.shape[0] // 2
    everywhere = load_model(places[kind], sharding=NamedSharding(mesh, PartitionSpec()))
    assert everywhere.params["norm.scale"].devices() == set(jax.devices()[:2])


@pytest.mark.parametrize("kind", FORMATS)
def test_the_architecture_is_read_without_the_weights(places, kind):
    assert read_arch(places[kind]) == load_model(places[kind]).arch


def test_a_rebuilt_tokenizer_is_there_to_load(places):
    from transformers import AutoTokenizer

    directory = load_model(places["gguf"]).tokenizer_dir
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert tokenizer("ab").input_ids == [3 + ord("a"), 3 + ord("b")]
    assert load_model(places["hf"]).tokenizer_dir is None


def test_tokenizer_files_are_used_in_place_and_copied_on_conversion(places, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(places["hf"], source)
    shutil.copytree(load_model(places["gguf"]).tokenizer_dir, source, dirs_exist_ok=True)
    (source / "special_tokens_map.json").write_text("{}")
    (source / "training_args.txt").write_text("not the tokenizer's")
    assert load_model(source).tokenizer_dir == source
    write_native(open_checkpoint(source), tmp_path / "native")
    copied = load_model(tmp_path / "native").tokenizer_dir
    assert copied == tmp_path / "native" / "tokenizer"
    names = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    assert {path.name for path in copied.iterdir()} == names
    for name in names:
        assert (copied / name).read_bytes() == (source / name).read_bytes()


def test_a_tokenizer_without_a_fast_form_is_built_or_refused(places, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(places["hf"], source)
    (source / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (source / "merges.txt").write_text("#version: 0.2\na b\n")
    write_native(open_checkpoint(source), tmp_path / "native")
    directory = load_model(tmp_path / "native").tokenizer_dir
    assert (directory / "tokenizer.json").is_file()
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    assert tokenizer("abba").input_ids == [2, 1, 0]
    (source / "vocab.json").unlink()
    (source / "tokenizer.model").write_bytes(b"not a sentencepiece model")
    with pytest.raises(ValueError, match=r"tokenizer\.model"):
        open_checkpoint(source)


@pytest.mark.parametrize("made", ["empty", "file", "missing", "params only"])
def test_a_path_that_is_no_checkpoint_says_what_was_looked_for(tmp_path, made):
    path = tmp_path / "model"
    if made == "file":
        path.write_text("hello")
    elif made != "missing":
        path.mkdir()
    if made == "params only":
        (path / "params").mkdir()
    says = "manifest.json.*config.json" if path.is_dir() else "Hugging Face directory or a .gguf"
    with pytest.raises(ValueError, match=says):
        load_model(path)
    with pytest.raises(ValueError, match=says):
        read_arch(path)


@pytest.fixture
def damaged(places, tmp_path):
    shutil.copytree(places["native"], tmp_path / "native")
    return tmp_path / "native"


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("manifest.json", {"version": 2}, "version 1.*version 2"),
        ("manifest.json", {"format": "other"}, "'other'"),
        ("manifest.json", {"tensors": {}}, "do not fit arch.json"),
        ("manifest.json", {"tensors": [1]}, "damaged"),
        ("arch.json", {"layers": 3, "windows": [None] * 3}, "do not fit arch.json"),
        ("arch.json", {"soft_cap": 3.0}, "soft_cap"),
        ("generation_config.json", {"eos_ids": [1], "top_q": 1}, "top_q"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(damaged, file, changes, says):
    rewrite(damaged / file, **changes)
    with pytest.raises(ValueError, match=says):
        load_model(damaged)


@pytest.mark.parametrize("file", ["manifest.json", "arch.json", "generation_config.json"])
def test_a_damaged_description_is_named(damaged, file):
    (damaged / file).write_text("{")
    with pytest.raises(ValueError, match=file):
        load_model(damaged)


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_incomplete_arrays_are_refused_by_name(damaged, damage):
    """CV08: missing data must not come back as zeros."""
    file = max((damaged / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(ValueError, match=f"{file.name}.*wanted .* bytes, found"):
        load_model(damaged)


def test_an_unknown_dtype_is_refused_before_anything_is_read(places):
    with pytest.raises(ValueError, match="'int4'"):
        load_model(places["native"], dtype="int4")

"""Safetensors files and their indexes: what is read, and everything that is refused."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert import CheckpointError, open_checkpoint
from convert.safetensors_reader import INDEX_NAME, SafetensorsSource, read_header
from tests.support.tiny_models import VARIANTS, write_checkpoint

LLAMA = VARIANTS["llama"]


def header_file(path, header: object, data: bytes = b"", *, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def all_of(directory):
    source = SafetensorsSource(directory)
    return {name: source.read_rows(name, 0, s.shape[0]) for name, s in source.stored.items()}


def assert_bitwise_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_the_safetensors_library_wrote(tmp_path, dtype):
    rng = np.random.default_rng(0)
    written = {
        name: rng.standard_normal(shape).astype(dtype)
        for name, shape in {"a": (3, 5), "b": (7,), "c": (1, 2, 3)}.items()
    }
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_bitwise_equal(all_of(tmp_path), written)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (2, 5), (6, 7), (3, 3)])
def test_rows_are_read_by_themselves(tmp_path, start, end):
    array = np.arange(28, dtype=np.float32).reshape(7, 4)
    save_file({"pad": np.ones(3, np.float32), "a": array}, tmp_path / "model.safetensors")
    rows = SafetensorsSource(tmp_path).read_rows("a", start, end)
    np.testing.assert_array_equal(rows, array[start:end])


@pytest.mark.parametrize("kept", [-4, 0.5, -1])
def test_a_file_cut_short_is_refused_with_both_sizes(tmp_path, kept):
    """CV08."""
    write_checkpoint(tmp_path, LLAMA)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    cut = whole[:kept] if kept < 0 else whole[: int(len(whole) * kept)]
    path.write_bytes(cut)
    with pytest.raises(CheckpointError, match=f"model.safetensors.*{len(whole)}.*{len(cut)}"):
        open_checkpoint(tmp_path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="the file has"):
        open_checkpoint(tmp_path)


def test_a_file_cut_while_it_is_open_is_noticed(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    checkpoint = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="ends after"):
        [tensor.load() for tensor in checkpoint.tensors()]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header would have 1152921504606846976 bytes"),
        (struct.pack("<Q", 4) + b"none", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-LFS"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "no safetensors file"),
    ],
    ids=["empty", "7 bytes", "len=2^60", "not json", "list", "not utf8", "LFS pointer", "html"],
)
def test_what_is_no_safetensors_file_is_refused_in_one_line(tmp_path, content, says):
    """CV09."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says.replace("^", r"\^")) as caught:
        read_header(path)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_of_exactly_100000_bytes_loads(tmp_path):
    """CV09: legal, and some readers stop there."""
    header = json.dumps({"a": entry([2], 0, 8)}).encode().ljust(100_000)
    header_file(tmp_path / "model.safetensors", header, np.array([1, 2], np.float32).tobytes())
    np.testing.assert_array_equal(all_of(tmp_path)["a"], [1, 2])


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry([2], 0, 4)}, 4, "needs 8"),
        ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12, "hole"),
        ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, 8, "overlap"),
        ({"a": entry([1], 4, 8)}, 8, "hole"),
        ({"a": entry([-1], 0, 4)}, 4, "impossible"),
        ({"a": entry([1.5], 0, 6)}, 6, "impossible"),
        ({"a": entry([1], 0, 4, "F31")}, 4, "F31"),
        ({"a": {"shape": [1]}}, 4, "malformed"),
        ({"a": [1]}, 4, "malformed"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', 4, "twice"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, data, says):
    path = header_file(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=says):
        read_header(path)


def test_shards_are_read_like_one_file(tmp_path):
    tensors = write_checkpoint(tmp_path / "one", LLAMA)
    write_checkpoint(tmp_path / "three", LLAMA, tensors, shards=3)
    assert_bitwise_equal(all_of(tmp_path / "three"), tensors)
    assert len(SafetensorsSource(tmp_path / "three").files) == 3


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path):
    """CV05: a consolidated copy with other values, and a second split of the same tensors."""
    tensors = write_checkpoint(tmp_path, LLAMA, shards=2)
    others = {name: array + 1 for name, array in tensors.items()}
    for name in ("consolidated.safetensors", "model-00001-of-00008.safetensors"):
        save_file(others, tmp_path / name)
    open_checkpoint(tmp_path)
    assert_bitwise_equal(all_of(tmp_path), tensors)


def test_a_missing_shard_is_named(tmp_path):
    """CV04."""
    write_checkpoint(tmp_path, LLAMA, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors"):
        open_checkpoint(tmp_path)


def rewrite_index(directory, change):
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_an_index_of_more_shards_than_there_are_is_refused(tmp_path):
    """CV07: 30 named, 15 there."""
    write_checkpoint(tmp_path, LLAMA, shards=15)

    def stretch(weight_map):
        for number in range(15):
            weight_map[f"extra.{number}"] = f"model-{number + 16:05}-of-00030.safetensors"

    rewrite_index(tmp_path, stretch)
    with pytest.raises(CheckpointError, match="names 30 shards, 15 are missing"):
        open_checkpoint(tmp_path)


def test_an_indexed_tensor_that_its_shard_lacks_is_named(tmp_path):
    """CV07."""
    write_checkpoint(tmp_path, LLAMA, shards=2)
    shard = "model-00001-of-00002.safetensors"
    rewrite_index(tmp_path, lambda weight_map: weight_map.update({"ghost.weight": shard}))
    with pytest.raises(CheckpointError, match="00001-of-00002.*lacks.*ghost.weight"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_the_index_lacks_is_named(tmp_path):
    """CV07: it may belong to another, newer or older, version of the checkpoint."""
    write_checkpoint(tmp_path, LLAMA, shards=2)
    rewrite_index(tmp_path, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match="index lacks.*model.norm.weight"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        "../other/model.safetensors",
        "sub/../../x.safetensors",
        "sub/model.safetensors",
        "/etc/passwd",
        "..",
        "",
        "..\\other\\model.safetensors",
        7,
    ],
)
def test_an_index_cannot_point_outside_the_directory(tmp_path, shard):
    """CV11: refused although the file is there and would load."""
    tensors = write_checkpoint(tmp_path / "model", LLAMA, shards=2)
    (tmp_path / "other").mkdir()
    (tmp_path / "model" / "sub").mkdir()
    for place in ("other/model.safetensors", "x.safetensors", "model/sub/model.safetensors"):
        save_file(tensors, tmp_path / place)

    def redirect(weight_map):
        weight_map["model.embed_tokens.weight"] = shard

    rewrite_index(tmp_path / "model", redirect)
    with pytest.raises(CheckpointError, match="model.embed_tokens.weight.*not a file of this"):
        open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    write_checkpoint(tmp_path, LLAMA, shards=2)
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path):
    tensors = write_checkpoint(tmp_path, LLAMA, shards=2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="stale"):
        open_checkpoint(tmp_path)

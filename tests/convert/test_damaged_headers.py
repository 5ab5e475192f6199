"""Damage anywhere in a header either changes nothing that matters or is a clear refusal."""

import json
import struct

import numpy as np
import pytest

from convert import CheckpointError, open_checkpoint
from tests.support.gguf_files import tokenizer_fields, write_gguf
from tests.support.tiny_models import VARIANTS, random_tensors, tensor_shapes, write_checkpoint

CONFIG = VARIANTS["qwen2"] | {"vocab_size": 300, "num_hidden_layers": 1}


def damages(header: bytes, rng: np.random.Generator, count: int):
    """Copies of a header with one to four bytes changed, or a stretch left out or doubled."""
    for _ in range(count):
        data = bytearray(header)
        place = int(rng.integers(len(data)))
        match rng.integers(4):
            case 0 | 1:
                for offset in range(place, min(len(data), place + int(rng.integers(1, 5)))):
                    data[offset] = int(rng.integers(256))
            case 2:
                del data[place : place + int(rng.integers(1, 9))]
            case _:
                data[place:place] = data[place : place + int(rng.integers(1, 9))]
        yield bytes(data)


def opens_or_refuses(path) -> bool:
    """Whether it opened; any exception but a `CheckpointError` of one short line is a failure."""
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors():
            tensor.load()
        if checkpoint.tokenizer is not None:
            checkpoint.tokenizer.save(path.parent / "tokenizer")
    except CheckpointError as error:
        assert len(str(error)) < 700
        return False
    return True


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_damaged_safetensors_headers(tmp_path):
    """CV09."""
    write_checkpoint(tmp_path, CONFIG)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    outcomes = []
    for header in damages(whole[:end], np.random.default_rng(0), 400):
        path.write_bytes(header + whole[end:])
        outcomes.append(opens_or_refuses(tmp_path))
    assert outcomes.count(False) > 300


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_damaged_gguf_headers(tmp_path):
    """CV09."""
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG, random_tensors(tensor_shapes(CONFIG)), arch="qwen2")
    whole = path.read_bytes()
    end = len(whole) - sum(4 * int(np.prod(shape)) for shape in tensor_shapes(CONFIG).values())
    outcomes = []
    for header in damages(whole[:end], np.random.default_rng(1), 600):
        path.write_bytes(header + whole[end:])
        outcomes.append(opens_or_refuses(path))
    assert outcomes.count(False) > 200
    assert outcomes.count(True) > 20  # a filler token by another name is no harm


# Something of every JSON type.
VALUES = [None, True, -1, 0, 3, 2**70, 0.5, 1e400, "text", "", [], [1], [{}], {}, {"a": 1}]
EXTRA = {
    "config.json": {
        "rope_scaling": {"rope_type": "default"},
        "rope_parameters": {},
        "partial_rotary_factor": 1.0,
        "head_dim": 16,
        "layer_types": ["full_attention"],
        "quantization_config": None,
        "max_window_layers": 1,
    },
    "generation_config.json": {"pad_token_id": 0, "temperature": 1.0, "top_k": 5, "min_p": 0.1},
}


@pytest.mark.parametrize("name", sorted(EXTRA))
def test_every_field_with_a_value_of_every_type(tmp_path, name):
    write_checkpoint(tmp_path, CONFIG)
    base = (CONFIG if name == "config.json" else {"eos_token_id": [1]}) | EXTRA[name]
    for field in base:
        for value in VALUES:
            (tmp_path / name).write_text(json.dumps(base | {field: value}))
            opens_or_refuses(tmp_path)


def test_every_scaling_field_with_a_value_of_every_type(tmp_path):
    write_checkpoint(tmp_path, CONFIG)
    scaling = VARIANTS["llama3_scaling"]["rope_scaling"]
    for field in [*scaling, "rope_theta", "type"]:
        for value in VALUES:
            config = CONFIG | {"rope_scaling": scaling | {field: value}}
            (tmp_path / "config.json").write_text(json.dumps(config))
            opens_or_refuses(tmp_path)


@pytest.mark.parametrize("value", [True, 0, 2**32 - 1, 0.5, "text", ["a"], [1]], ids=repr)
def test_every_gguf_field_with_a_value_of_another_type(tmp_path, value):
    path = tmp_path / "m.gguf"
    tensors = random_tensors(tensor_shapes(CONFIG))
    own = ("block_count", "attention.head_count", "attention.key_length", "rope.freq_base",
           "embedding_length", "rope.scaling.type", "attention.sliding_window")  # fmt: skip
    for field in own:
        write_gguf(path, CONFIG, tensors, arch="qwen2", fields={field: value})
        opens_or_refuses(path)
    for field in tokenizer_fields(300):
        tokenizer = tokenizer_fields(300) | {field: value}
        write_gguf(path, CONFIG, tensors, arch="qwen2", tokenizer=tokenizer)
        opens_or_refuses(path)

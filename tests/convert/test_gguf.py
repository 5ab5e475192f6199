"""GGUF files: formats, row order, metadata, and what is refused."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGML

from convert import CheckpointError, open_checkpoint
from convert import checkpoint as checkpoint_module
from convert.gguf_reader import GGUFSource
from pagedjax.layers.rope import inverse_frequencies
from pagedjax.models import Llama3Scaling, param_shapes
from tests.support.gguf_files import tokenizer_fields, write_gguf
from tests.support.tiny_models import (
    BF16,
    VARIANTS,
    random_tensors,
    tensor_shapes,
    write_checkpoint,
)

# Block formats come in rows of 32 and 256 numbers; the vocabulary must hold 256 bytes and more.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 300, "head_dim": 64}
LLAMA = VARIANTS["llama"] | WIDE
NAME = "model.layers.0.mlp.down_proj.weight"


def tensors_of(config, dtype=np.float32):
    return random_tensors(tensor_shapes(config), dtype)


def native_of(path, dtype=None):
    return {tensor.name: tensor.load() for tensor in open_checkpoint(path).tensors(dtype)}


def llama_file(tmp_path, **options):
    path = tmp_path / "m.gguf"
    write_gguf(path, LLAMA, tensors_of(LLAMA), arch="llama", **options)
    return path


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        ("llama", "llama"),
        ("llama_tied", "llama"),
        ("llama_bias", "llama"),
        ("mistral_full", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("qwen3_bias", "qwen3"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_gguf_and_hugging_face_give_the_same_native_tensors(tmp_path, variant, arch, dtype):
    """Row order of queries and keys, biases and tying included; every bit as stored."""
    config = VARIANTS[variant] | {"vocab_size": 300}
    tensors = tensors_of(config, dtype)
    write_checkpoint(tmp_path / "hf", config, tensors)
    write_gguf(tmp_path / "m.gguf", config, tensors, arch=arch)
    wanted, got = native_of(tmp_path / "hf"), native_of(tmp_path / "m.gguf")
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype == np.dtype(dtype), name
        assert got[name].tobytes() == array.tobytes(), name
    ours = open_checkpoint(tmp_path / "m.gguf").arch
    theirs = open_checkpoint(tmp_path / "hf").arch
    for field in ("rope", "norm_eps", "head_dim", "windows", "tied", "qkv_bias", "out_bias"):
        assert getattr(ours, field) == getattr(theirs, field), field


# How far a number may be moved, as a share of its block's largest: half a step, or a whole one at
# the end of Q4_0's lopsided range -8 .. 7. Beside it, scale and offset are rounded to float16.
STEPS = {GGML.Q8_0: 0.5 / 127, GGML.Q4_0: 1 / 8, GGML.Q4_1: 1 / 15}


@pytest.mark.parametrize("kind", STEPS, ids=lambda kind: kind.name)
def test_block_formats_are_dequantized_within_their_step(tmp_path, kind):
    tensors = tensors_of(LLAMA)
    path = llama_file(tmp_path, kinds={NAME: kind})
    got = native_of(path, "float32")["layers.0.mlp.down"]
    wanted = tensors[NAME]
    largest = np.abs(wanted.reshape(-1, 32)).max(axis=1, keepdims=True)
    error = np.abs(got - wanted).reshape(-1, 32)
    assert np.all(error <= (STEPS[kind] + 2**-10) * largest)
    assert error.max() > 0


def four_bit_k(blocks: np.ndarray) -> np.ndarray:
    """Q4_K by the book, one number at a time (ggml's block_q4_K)."""
    out = []
    for block in blocks:
        d, dmin = (float(x) for x in block[:4].view(np.float16))
        packed, nibbles = [int(x) for x in block[4:16]], block[16:]
        for j in range(8):
            if j < 4:
                scale, offset = packed[j] & 63, packed[j + 4] & 63
            else:
                scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
                offset = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
            for i in range(32):
                byte = int(nibbles[j // 2 * 32 + i])
                out.append(d * scale * (byte >> 4 if j % 2 else byte & 15) - dmin * offset)
    return np.array(out)


def six_bit_k(blocks: np.ndarray) -> np.ndarray:
    """Q6_K by the book, one number at a time (ggml's block_q6_K)."""
    out = []
    for block in blocks:
        low, high = block[:128], block[128:192]
        scales, d = block[192:208].view(np.int8), float(block[208:].view(np.float16)[0])
        for i in range(256):
            half, quarter, j = i // 128, i % 128 // 32, i % 32
            byte = int(low[half * 64 + quarter % 2 * 32 + j])
            nibble = byte >> 4 if quarter > 1 else byte & 15
            top = int(high[half * 32 + j]) >> 2 * quarter & 3
            out.append(d * int(scales[i // 16]) * ((nibble | top << 4) - 32))
    return np.array(out)


@pytest.mark.parametrize(
    ("kind", "by_the_book", "halves"),
    [(GGML.Q4_K, four_bit_k, slice(0, 4)), (GGML.Q6_K, six_bit_k, slice(208, 210))],
    ids=["Q4_K", "Q6_K"],
)
def test_k_formats_are_dequantized_as_ggml_defines_them(tmp_path, kind, by_the_book, halves):
    """Random bytes under sensible scales: every bit of a block counts."""
    rng = np.random.default_rng(0)
    rows, columns = 256, 512
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (rows * columns // 256, block_bytes), dtype=np.uint8)
    scales = rng.uniform(0.5, 2.0, (len(blocks), (halves.stop - halves.start) // 2))
    blocks[:, halves] = scales.astype(np.float16).view(np.uint8)
    tensors = tensors_of(LLAMA)
    del tensors[NAME]
    raw = {"blk.0.ffn_down.weight": (blocks.reshape(rows, -1), kind)}
    write_gguf(tmp_path / "m.gguf", LLAMA, tensors, arch="llama", raw=raw)
    got = native_of(tmp_path / "m.gguf", "float32")["layers.0.mlp.down"]
    wanted = by_the_book(blocks[:40]).reshape(-1, columns)
    np.testing.assert_allclose(got[: len(wanted)], wanted, rtol=1e-6, atol=1e-6)


def test_quantized_files_become_bfloat16_throughout(tmp_path):
    path = llama_file(tmp_path, kinds=GGML.Q8_0)
    assert {array.dtype for array in native_of(path).values()} == {BF16}
    exact, rounded = native_of(path, "float32"), native_of(path)
    for name, array in rounded.items():
        np.testing.assert_array_equal(array, exact[name].astype(BF16), name)


def test_reading_in_small_blocks_gives_the_same(tmp_path, monkeypatch):
    path = llama_file(tmp_path, kinds=GGML.Q4_1)
    whole = native_of(path)
    monkeypatch.setattr(checkpoint_module, "BLOCK_BYTES", 5000)
    for name, array in native_of(path).items():
        np.testing.assert_array_equal(array, whole[name], name)


@pytest.mark.parametrize("kind", [GGML.Q5_0, GGML.TQ1_0], ids=lambda kind: kind.name)
def test_other_formats_are_refused_by_name(tmp_path, kind):
    path = llama_file(tmp_path, kinds={NAME: kind})
    with pytest.raises(CheckpointError, match=f"blk.0.ffn_down.weight is stored as {kind.name}"):
        open_checkpoint(path)


def llama3_divisors(theta, head_dim, factor):
    """As llama.cpp's converter writes them for low 1, high 4, original 8192."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_from_its_table(tmp_path, factor):
    """CV17: the frequencies are the plain ones divided by the file's own table."""
    config = LLAMA | {"rope_theta": 500000.0}
    divisors = llama3_divisors(500000.0, 64, factor)
    raw = {"rope_freqs.weight": (divisors, GGML.F32)}
    write_gguf(tmp_path / "m.gguf", config, tensors_of(config), arch="llama", raw=raw)
    arch = open_checkpoint(tmp_path / "m.gguf").arch
    assert arch.rope.scaling == Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(inverse_frequencies(arch.rope, 64), plain / divisors, rtol=1e-5)


@pytest.mark.parametrize("change", ["one value", "too short"])
def test_another_table_of_frequencies_is_refused(tmp_path, change):
    """CV20: it is not dropped, and not taken for something near it."""
    divisors = llama3_divisors(10000.0, 64, 8.0)
    divisors[20] *= 1.01
    raw = {"rope_freqs.weight": (divisors[:16] if change == "too short" else divisors, GGML.F32)}
    path = llama_file(tmp_path, raw=raw)
    with pytest.raises(CheckpointError, match="rope_freqs.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, "linear"),
        ({"rope.scaling.factor": 2.0}, "rope.scaling.factor"),
        ({"expert_count": 8}, "expert_count"),
        ({"rope.dimension_count": 32}, "rope.dimension_count"),
        ({"attention.value_length": 32}, "attention.value_length"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"attention.head_count": None}, "attention.head_count"),
        ({"block_count": 3}, "blk.2"),
        ({"vocab_size": 310}, r"\(300, 256\), wanted \(310, 256\)"),
    ],
)
def test_metadata_that_changes_the_maths_is_refused_by_name(tmp_path, fields, named):
    path = llama_file(tmp_path, fields=fields)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(path)


def test_other_architectures_are_refused_by_name(tmp_path):
    write_gguf(tmp_path / "m.gguf", LLAMA, tensors_of(LLAMA), arch="gemma3")
    with pytest.raises(CheckpointError, match="gemma3.*known: llama"):
        open_checkpoint(tmp_path / "m.gguf")


def test_absent_optional_fields_take_llama_cpps_defaults(tmp_path):
    config = LLAMA | {"head_dim": 64, "num_key_value_heads": 4}
    absent = ("rope.freq_base", "vocab_size", "attention.head_count_kv", "attention.key_length")
    fields = dict.fromkeys((*absent, "attention.value_length", "rope.dimension_count"))
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors_of(config), arch="llama", fields=fields)
    checkpoint = open_checkpoint(path)
    arch = checkpoint.arch
    assert (arch.vocab, arch.kv_heads, arch.head_dim, arch.rope.theta) == (300, 4, 64, 10000.0)
    assert any("rope.freq_base" in note for note in checkpoint.notes)
    assert native_of(path).keys() == param_shapes(arch).keys()


def test_a_sliding_window_is_kept(tmp_path):
    path = llama_file(tmp_path, fields={"attention.sliding_window": 100})
    assert open_checkpoint(path).arch.windows == (100, 100)


def test_every_end_of_turn_id_ends_a_generation(tmp_path):
    """CV38."""
    tokenizer = tokenizer_fields(300, eot_token_id=7, eom_token_id=0)
    generation = open_checkpoint(llama_file(tmp_path, tokenizer=tokenizer)).generation
    assert generation.eos_ids == (0, 7)
    assert (generation.bos_id, generation.pad_id) == (1, 0)


@pytest.mark.parametrize("kept", [3, 4, 20, 100, 2000, 0.5, -1])
def test_a_file_cut_short_is_refused(tmp_path, kept):
    """CV08: wherever the cut is, in the magic, the metadata, the tensor list or the data."""
    path = llama_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)] if isinstance(kept, float) else whole[:kept])
    with pytest.raises(CheckpointError, match="m.gguf"):
        open_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"GGUF" + b"\xff" * 60, b"<html></html>"])
def test_what_is_no_gguf_file_is_refused(tmp_path, content):
    """CV09."""
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="m.gguf"):
        open_checkpoint(tmp_path / "m.gguf")


def test_one_part_of_a_split_file_is_refused(tmp_path):
    path = llama_file(tmp_path)
    source = GGUFSource(path)
    assert source.metadata.get("split.count", 1) == 1
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="split"):
        open_checkpoint(tmp_path / "part.gguf")


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"blk.0.attn_q.bias": 256}, "blk.0.attn_k.bias"),
        ({"blk.0.made_up.weight": 3}, "no place in the architecture: blk.0.made_up.weight"),
    ],
)
def test_gguf_tensors_must_fit_as_strictly(tmp_path, tensors, says):
    """CV23, CV24."""
    raw = {name: (np.ones(size, np.float32), GGML.F32) for name, size in tensors.items()}
    with pytest.raises(CheckpointError, match=says):
        open_checkpoint(llama_file(tmp_path, raw=raw))

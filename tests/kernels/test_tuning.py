"""Choice of a kernel configuration by shape."""

import pytest

from pallas_kernels.tuning import (
    SMEM_BYTES,
    DecodeConfig,
    decode_table,
    default_decode_config,
    mosaic_fixed_bytes,
    nearest_case,
    table_name,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile": 48}, "tile must be a power of two"),
        ({"tile": 8}, "tile must be a power of two"),
        ({"stages": 0}, "stages and workers must be positive"),
        ({"workers": 0}, "stages and workers must be positive"),
        ({"num_warps": 3}, "num_warps must be a power of two"),
    ],
)
def test_an_impossible_configuration_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DecodeConfig(**({"tile": 64, "stages": 2, "workers": 132} | changes))


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 7, 16, 32])
@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("backend", ["mosaic", "triton"])
def test_default_stages_fit_into_shared_memory(backend, itemsize, group, head_dim):
    config = default_decode_config(backend, group, head_dim, itemsize, 132)
    fixed = mosaic_fixed_bytes(group, head_dim, config.tile) if backend == "mosaic" else 0
    assert config.stages * 2 * config.tile * head_dim * itemsize + fixed <= SMEM_BYTES
    assert config.stages >= 2


def test_the_measured_table_of_the_h200_is_well_formed():
    table = decode_table("NVIDIA H200")
    assert table
    shapes = {}
    for entry in table:
        config = DecodeConfig(**entry["config"])
        assert config.workers >= 132
        shape = tuple(entry[k] for k in ("q_heads", "kv_heads", "head_dim", "kv_dtype", "seqs"))
        shapes.setdefault(shape, []).append(entry["fastest"])
    assert all(sorted(fastest) == [False, True] for fastest in shapes.values())


def test_the_table_answers_with_the_nearest_batch_of_the_same_heads():
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_dtype": "bfloat16"}
    table = [
        heads | {"seqs": 1, "backend": "triton", "fastest": True},
        heads | {"seqs": 32, "backend": "mosaic", "fastest": True},
        heads | {"seqs": 32, "backend": "triton", "fastest": False},
        heads | {"kv_heads": 4, "seqs": 8, "backend": "triton", "fastest": True},
    ]
    assert nearest_case(table, heads, 2, None) is table[0]
    assert nearest_case(table, heads, 100, None) is table[1]
    assert nearest_case(table, heads, 100, "triton") is table[2]
    assert nearest_case(table, heads | {"head_dim": 64}, 8, None) is None


def test_a_device_name_becomes_a_file_name():
    assert table_name("NVIDIA H200") == "nvidia_h200"


def test_heads_of_a_part_share_the_workers():
    config = DecodeConfig(tile=64, stages=2, workers=264)
    assert config.parts(8) == 33
    assert config.parts(40) == 6
    assert config.parts(1000) == 1

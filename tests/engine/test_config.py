"""Options of the wrong kind are refused when the record is made, in one form for all of them."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from pagedjax.config import IMPLEMENTATIONS, EngineConfig
from pagedjax.field_types import check_field_types
from pallas_kernels.api import ATTENTION_IMPLEMENTATIONS

# By declared type: what a user can take for such a value by mistake.
WRONG = {
    "bool": ["no", "", 0, 1, 3, None],
    "int": ["x", "8", 8.0, True, None, b"8"],
    "float | None": ["a", "fast", True, 1j],
    "int | None": ["x", 8.0, True, [8]],
    "str": [5, None, b"auto", ["auto"]],
    "str | None": [5, False, {}],
    "str | Path | None": [5, True, b"cache"],
}
FIELDS = dataclasses.fields(EngineConfig)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_value_of_another_type_is_refused_by_name(field):
    """OF17: a ValueError that says got and wanted, not a TypeError and not silence."""
    for value in WRONG[str(field.type)]:
        with pytest.raises(ValueError, match=f"^{field.name} must be .*{re.escape(repr(value))}$"):
            EngineConfig(**{field.name: value})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("memory_fraction", "a", "memory_fraction must be a number or None, got 'a'"),
        ("disk_cache_path", 5, "disk_cache_path must be text or a path or None, got 5"),
        ("prefix_caching", "no", "prefix_caching must be True or False, got 'no'"),
        ("max_num_seqs", 2**31, "max_num_seqs must be at most 2147483647, got 2147483648"),
        ("max_num_batched_tokens", 10**12, "must be at most 2147483647, got 1000000000000"),
        ("seed", -1, "seed must be an integer, at least 0; got -1"),
        ("implementation", "foo", "implementation must be one of .*'xla', .* got 'foo'"),
    ],
)
def test_the_refusal_says_what_was_wanted(option, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{option: value})


def test_numbers_of_numpy_and_any_path_pass():
    """OF17: as plain integers, since bytes computed with int32 would overflow."""
    config = EngineConfig(
        num_blocks=np.int32(20),
        memory_fraction=np.float32(0.5),
        link_bytes_per_s=10,
        host_cache_bytes=1 << 20,
        disk_cache_path=Path("cache"),
        disk_cache_bytes=np.uint64(1 << 20),
    )
    assert config.memory_fraction == 0.5
    assert config.num_blocks == 20 and type(config.num_blocks) is int


def test_every_backend_of_the_kernels_may_be_named():
    assert IMPLEMENTATIONS == ATTENTION_IMPLEMENTATIONS
    for name in (None, *IMPLEMENTATIONS):
        assert EngineConfig(implementation=name).implementation == name


def test_another_record_is_checked_by_its_own_types():
    @dataclasses.dataclass
    class Record:
        share: float
        name: str | None

    check_field_types(Record(share=1, name=None))
    with pytest.raises(ValueError, match="name must be text or None, got 3"):
        check_field_types(Record(share=0.5, name=3))

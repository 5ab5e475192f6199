"""Copies between memories, with JAX's own call and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.engine import array_copies
from pagedjax.engine.array_copies import copy_arrays


def memories():
    device = jax.devices()[0]
    return [
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        for kind in ("device", "pinned_host")
    ]


@pytest.mark.parametrize("direct", [True, False])
def test_arrays_arrive_in_the_other_memory_and_come_back(direct, monkeypatch):
    if not direct:
        monkeypatch.setattr(array_copies, "_COPY", None)
    device, host = memories()
    arrays = [jax.device_put(jnp.arange(7, dtype=jnp.uint32) * k, device) for k in range(5)]
    there = copy_arrays(arrays, host)
    assert [x.sharding.memory_kind for x in there] == ["pinned_host"] * 5
    back = copy_arrays(there, device)
    assert [x.sharding.memory_kind for x in back] == ["device"] * 5
    for k, (x, y) in enumerate(zip(there, back, strict=True)):
        np.testing.assert_array_equal(x, np.arange(7) * k)
        np.testing.assert_array_equal(y, np.arange(7) * k)
    assert copy_arrays([], host) == []


def test_a_copy_outlives_what_it_was_copied_from():
    device, host = memories()
    array = jax.device_put(jnp.ones(1000, jnp.uint32), device)
    [copy] = copy_arrays([array], host)
    array.delete()
    assert int(np.asarray(copy).sum()) == 1000


def test_this_version_of_jax_has_the_direct_call():
    assert array_copies._COPY is not None

"""Running and lowering GPU kernels on a machine without a GPU; the one place for private APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh, AxisType


def lower_for_hopper(function: Callable[..., Any], *args: Any) -> str:
    """Lower a function for an H200 and return its StableHLO text; compiles and runs nothing.

    Args:
        function: what to lower; traced as if an H200 were the default device.
        args: arrays or `jax.ShapeDtypeStruct`.
    """
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def mosaic_interpreter() -> Any:
    """Parameters that make a Mosaic GPU kernel run in JAX's interpreter on a CPU.

    Raises:
        NotImplementedError: this JAX has no such interpreter (it came with 0.11).
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        raise NotImplementedError(f"JAX {jax.__version__} cannot interpret Mosaic GPU kernels")
    return params()

"""Parameters as a flat dictionary `{"layers.0.mlp.down": array}`, and the module around them.

The dictionary is what checkpoints store, what the compiled step takes as its argument and what a
training loop hands over: swapping weights is swapping a reference. Names, shapes and logical axes
all follow from the module's own declarations.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.models.arch import ArchConfig
from pagedjax.models.decoder import Decoder

Params = Mapping[str, jax.Array]


@functools.cache
def _abstract(arch: ArchConfig) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Decoder(arch, rngs=nnx.Rngs(params=0))))


def _named(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def param_shapes(arch: ArchConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of `arch`, in the order of the forward pass's modules."""
    return {name: leaf.shape for name, leaf in _named(_abstract(arch)[1]).items()}


def param_axes(arch: ArchConfig) -> dict[str, tuple[str | None, ...]]:
    """Logical axis names of every parameter's dimensions; None where it is never split."""
    return {name: leaf.get_metadata("axes") for name, leaf in _named(_abstract(arch)[1]).items()}


def decoder_from_params(arch: ArchConfig, params: Params) -> Decoder:
    """A `Decoder` holding these very arrays, without a copy. Works under a JAX transformation.

    Raises:
        ValueError: names or shapes differ from `param_shapes(arch)`.
    """
    graphdef, state = _abstract(arch)
    wanted = _named(state)
    if set(params) != set(wanted):
        absent, surplus = sorted(set(wanted) - set(params)), sorted(set(params) - set(wanted))
        raise ValueError(f"parameters do not fit the architecture: {absent=}, {surplus=}")
    for name, leaf in wanted.items():
        if tuple(params[name].shape) != leaf.shape:
            raise ValueError(f"{name}: got shape {params[name].shape}, wanted {leaf.shape}")
    flat = [
        (path, leaf.replace(params[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def params_of(model: Decoder) -> dict[str, jax.Array]:
    """The flat dictionary of a module's parameters: the inverse of `decoder_from_params`."""
    return {name: jnp.asarray(leaf[...]) for name, leaf in _named(nnx.state(model)).items()}

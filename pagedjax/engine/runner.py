"""Owns what is on the device: parameters, KV pool and compiled steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.engine.block_copies import BlockCopier
from pagedjax.engine.block_tables import edit_tables, padded_edits
from pagedjax.engine.buckets import Bucket, Buckets
from pagedjax.engine.compilation_cache import program_store
from pagedjax.engine.compiler_options import compiler_options, left_to_library
from pagedjax.engine.kv_pool import KVPool, KVSpec
from pagedjax.engine.kv_scales import KVScales
from pagedjax.engine.penalties import SeenTokens
from pagedjax.engine.program_store import Program
from pagedjax.engine.programs import BuildTimes, build, report
from pagedjax.engine.sampler import SampleOutputs
from pagedjax.engine.step import redraw, run_step
from pagedjax.engine.step_inputs import SamplingLayout, StepLayout
from pagedjax.models.arch import ArchConfig
from pagedjax.models.params import Params

# Changes of the block tables in one call of their own: 48 KiB. The driver takes up to 64 KiB from
# ordinary memory at once; for more it makes the host wait until the device has come to the copy.
_EDITS = 4096

# On a GPU a step of a few tokens takes as long as its weights take to be read, so that smaller
# steps would take no less. One sequence alone has products of another kind: it keeps its own.
_GPU_LEAST_SEQS, _GPU_LEAST_TOKENS = 8, 128
# From here on they take as long as their rows do, and finer steps waste less on padding.
_GPU_MANY_SEQS = 128

# The first launch of a program loads its kernels, the second captures them as a CUDA graph.
_FIRST_LAUNCHES = 2


@dataclass(frozen=True, slots=True)
class Draw:
    """What a compiled redraw depends on: its rows, and what they may want (`sample`).

    Attributes:
        rows: how many.
        full: filters and log-probabilities.
        penalties: penalties, besides these.
    """

    rows: int
    full: bool
    penalties: bool = False


class ModelRunner:
    """Compiles steps ahead of time and launches them; never waits for the device.

    Args:
        arch: the model.
        params: its parameters; the device they are on runs everything. Abstract ones will do for
            compiling alone.
        spec: shape of the KV pool, which is created here.
        config: resolved options.
        max_blocks_per_seq: columns of a block table.
        kv_scales: of each layer, for a compressed pool.

    Attributes:
        seen: the tokens of sequences with penalties.
        abstract_pool: shapes, dtypes and shardings of the pool's arrays.
        compiles_after_warmup: steps that had to be compiled after `warm_up`; any is a defect.
        warm_up_times: where the time of `warm_up` went.
    """

    def __init__(
        self,
        arch: ArchConfig,
        params: Params,
        spec: KVSpec,
        config: EngineConfig,
        *,
        max_blocks_per_seq: int,
        kv_scales: Sequence[KVScales] | None = None,
    ):
        assert config.max_num_seqs and config.max_num_batched_tokens and config.bucket_growth
        self._names = tuple(params)
        self._params = tuple(params.values())  # quicker to hand over than by name, each step
        self.compiles_after_warmup = 0
        self.warm_up_times = BuildTimes()
        self._arch = arch
        self._spec = spec
        self._config = config
        device = next(iter(params["embed.table"].sharding.device_set))
        self._platform: str = device.platform
        sizes = (config.max_num_seqs, config.max_num_batched_tokens, config.bucket_growth)
        if self._platform != "cpu":
            sizes = (*sizes, _GPU_LEAST_SEQS, _GPU_LEAST_TOKENS, _GPU_MANY_SEQS)
        self.buckets = Buckets(*sizes)
        self.store = program_store(device) if config.compilation_cache else None
        self._pool: KVPool = spec.create(device)
        self.abstract_pool: Any = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._pool
        )
        self._copier = BlockCopier(self.abstract_pool, config.max_num_seqs)
        self._device = device
        self._kv_scales: list[KVScales] | None = None
        if kv_scales is not None:
            self.set_kv_scales(kv_scales)
        self._drawn = jnp.zeros((config.max_num_seqs,), jnp.int32, device=device)
        self._tables = jnp.zeros(
            (config.max_num_seqs, max_blocks_per_seq), jnp.int32, device=device
        )
        self._edit_tables: Any = None
        self.seen = SeenTokens(config.max_num_seqs, arch.vocab, self._drawn.sharding)
        self._compiled: dict[Bucket | Draw, Any] = {}
        self._warm = False

    @property
    def params(self) -> Params:
        """What the next step computes with."""
        return dict(zip(self._names, self._params, strict=True))

    @property
    def kv_scales(self) -> list[KVScales] | None:
        """How each layer of a compressed pool is written and read; None for other pools."""
        return self._kv_scales

    def layout(self, bucket: Bucket) -> StepLayout:
        """How a bucket's inputs are packed."""
        return StepLayout(bucket, self._spec.block_size)

    def swap_params(self, params: Params) -> None:
        """Launch the following steps with other arrays.

        Raises:
            ValueError: a name, shape, dtype, device or memory differs from the present ones, or an
                array has been deleted, as by a donation.
        """
        if not isinstance(params, Mapping):
            raise ValueError(f"parameters are arrays by name, got {type(params).__name__}")
        present = self.params
        for name in present.keys() | params.keys():
            old, new = (_described(p.get(name)) for p in (present, params))
            if old != new:
                raise ValueError(f"{name}: got {new}, wanted {old}")
        self._params = tuple(params[name] for name in self._names)

    def set_kv_scales(self, kv_scales: Sequence[KVScales]) -> None:
        """Write and read a compressed pool with other scales; what it holds loses its meaning."""
        assert self._spec.is_compressed
        self._kv_scales = jax.device_put(list(kv_scales), self._device)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile every step there is, several at a time; on a GPU launch each with padding.

        Args:
            progress: called with (steps compiled, steps in all) after each.
        """
        rows = sorted({bucket.seqs for bucket in self.buckets})
        kinds = ((True, True), (True, False), (False, False))
        draws = [Draw(n, full, penalties) for n in rows for full, penalties in kinds]
        keys = [*sorted(self.buckets, key=self._effort, reverse=True), *draws]
        missing = {key: self.program(key) for key in keys if key not in self._compiled}
        small = [partial(self._copier.compile, size) for size in self._copier.sizes]
        small += [self._compile_edits, self.seen.compile]
        built, self.warm_up_times = build(
            missing, store=self.store, others=small, progress=progress
        )
        report("warm-up", self.warm_up_times)
        self._compiled.update(built)
        if self._platform != "cpu":
            self.launch_all()
        self._warm = True

    def _effort(self, bucket: Bucket) -> tuple[bool, bool, bool, int]:
        """Orders steps by how long they take to compile: trying products out takes longest.

        A mixed step comes after the decode steps that do: it takes twice as long to lower, and
        finds most of its products tried out for the decode step of as many tokens. Other decode
        steps take less than mixed ones, which have two kernels of attention.
        """
        tries = self._platform != "cpu" and not left_to_library(bucket.tokens)
        return tries and bucket.decode, not bucket.decode, tries, bucket.tokens

    def compile(self, key: Bucket | Draw) -> Any:
        """One step or redraw, compiled or from an earlier start."""
        return build({key: self.program(key)}, store=self.store)[0][key]

    def program(self, key: Bucket | Draw) -> Program:
        """One step or redraw for the shapes at hand and their device.

        The pool is donated, and so are the drawn tokens and the block tables: what keeps its
        address from launch to launch does not make the driver update the captured CUDA graph.
        """
        return self._draw_program(key) if isinstance(key, Draw) else self._step_program(key)

    def _step_program(self, bucket: Bucket) -> Program:
        layout = self.layout(bucket)

        def step(
            params: tuple[jax.Array, ...],
            pool: KVPool,
            drawn: jax.Array,
            tables: jax.Array,
            packed: jax.Array,
            kv_scales: list[KVScales] | None,
        ):
            inputs, tables = layout.unpack(packed, tables)
            pool, drawn, logits, outputs = run_step(
                self._arch,
                dict(zip(self._names, params, strict=True)),
                pool,
                drawn,
                inputs,
                decode=bucket.decode,
                kv_scales=kv_scales,
                implementation=self._config.implementation,  # type: ignore[arg-type]
            )
            return pool, drawn, tables, logits, outputs

        abstract = self._abstract
        arguments = (
            tuple(abstract(x.shape, x.dtype) for x in self._params),
            self.abstract_pool,
            abstract(self._drawn.shape, np.int32),
            abstract(self._tables.shape, np.int32),
            abstract((layout.size,), np.int32),
            jax.tree.map(lambda x: abstract(x.shape, x.dtype), self._kv_scales),
        )
        static = (self._arch, self._names, self._spec.block_size, self._config.implementation)
        return Program(
            name=f"{bucket} {static}",
            function=self._jitted(step, (1, 2, 3)),
            arguments=arguments,
            options=self._compiler_options(bucket.tokens),
        )

    def _draw_program(self, key: Draw) -> Program:
        layout = SamplingLayout(key.rows, key.penalties)
        num_top = min(self._config.max_logprobs, self._arch.vocab)

        def draw(logits: jax.Array, drawn: jax.Array, packed: jax.Array, seen: jax.Array | None):
            sampling = layout.unpack(packed)
            return redraw(logits, drawn, sampling, seen, full=key.full, num_top=num_top)

        arguments = (
            self._abstract((key.rows, self._arch.vocab), np.float32),
            self._abstract(self._drawn.shape, np.int32),
            self._abstract((layout.size,), np.int32),
            self.seen.abstract if key.penalties else None,
        )
        return Program(
            name=f"{key} {num_top}",
            function=self._jitted(draw, (1, 3)),
            arguments=arguments,
            options=self._compiler_options(0),
        )

    def _compiler_options(self, products: int) -> dict[str, Any]:
        graphs = self._config.cuda_graphs
        return compiler_options(self._platform, products=products, cuda_graphs=graphs)

    def _jitted(self, function: Callable[..., Any], donated: tuple[int, ...]) -> Any:
        named = function if self.store is None else self.store.renamed(function)
        return jax.jit(named, donate_argnums=donated)

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._drawn.sharding)

    def update_pool(self, change: Callable[[KVPool], KVPool]) -> None:
        """Replace the pool before the next step by what `change` makes of it.

        Args:
            change: gets the arrays, may consume them, and returns arrays of the same shapes.
        """
        self._pool = change(self._pool)

    def prefill_tokens_per_s(self) -> float:
        """Rate of the largest step there is, measured with padding: without its attention."""
        bucket = self.buckets.mixed[-1]
        times: list[float] = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(self._launch_padding(bucket, None))
            times.append(time.perf_counter() - start)
        return bucket.tokens / min(times)

    def launch_all(self) -> None:
        """Launch each step and draw with padding, so that no request waits for what comes first.

        What a request with penalties needs takes memory of its own, and is left to the first one.
        """
        for bucket in self.buckets:
            # Mixed steps draw as many rows as the largest decode step.
            draws = (False, True) if bucket.decode else (None,)
            for draw_full in draws * _FIRST_LAUNCHES:
                jax.block_until_ready(self._launch_padding(bucket, draw_full))

    def _launch_padding(self, bucket: Bucket, draw_full: bool | None) -> SampleOutputs:
        """Launch a step of no tokens, and a redraw after it; None for none."""
        layout, sampling = self.layout(bucket), None
        packed = layout.sealed(np.zeros(layout.size, np.int32))
        if draw_full is not None:
            rows = SamplingLayout(bucket.seqs)
            sampling = rows.sealed(np.zeros(rows.size, np.int32))
        return self.launch(bucket, packed, sampling, full=bool(draw_full))

    def copy_blocks(self, copies: np.ndarray) -> None:
        """Copy blocks of the pool on the device, before the step that is launched next.

        Args:
            copies: int32[num_copies, 2], source and destination, as `StepPlan.copies`.
        """
        if not len(copies):
            return
        if not self._copier.is_compiled(len(copies)):
            self.compiles_after_warmup += self._warm
        self._pool = self._copier(self._pool, copies)

    def edit_tables(self, edits: np.ndarray, *, leave: int) -> np.ndarray:
        """Change the block tables on the device, as far as the next step has no room for it.

        Args:
            edits: int32[edits, 3], as `TableChanges.edits`.
            leave: how many of them the next step takes.

        Returns:
            Those that are left to it.
        """
        while len(edits) > leave:
            if self._edit_tables is None:
                self.compiles_after_warmup += self._warm
                self._edit_tables = self._compile_edits()
            now, edits = edits[:_EDITS], edits[_EDITS:]
            self._tables = self._edit_tables(self._tables, padded_edits(now, _EDITS))
        return edits

    def _compile_edits(self) -> Any:
        tables = self._abstract(self._tables.shape, np.int32)
        edits = self._abstract((_EDITS, 3), np.int32)
        lowered = jax.jit(edit_tables, donate_argnums=(0,)).lower(tables, edits)
        self._edit_tables = lowered.compile()
        return self._edit_tables

    def launch(
        self,
        bucket: Bucket,
        packed: np.ndarray,
        sampling: np.ndarray | None,
        *,
        full: bool = False,
        penalties: bool = False,
    ) -> SampleOutputs:
        """Start a step on the device and return at once.

        The drawn tokens also stay on the device, where the next step finds them.

        Args:
            bucket: the step's sizes.
            packed: its inputs, of `layout(bucket)`. Neither vector must be written to again, since
                the device may read from it.
            sampling: how to draw its rows, of `SamplingLayout(bucket.seqs)`; None if the argmax is
                all that is wanted.
            full: whether any row has a filter or penalties, or wants log-probabilities.
            penalties: whether any row has penalties; `sampling` has them then, and `seen` knows the
                tokens of their sequences.

        Returns:
            Arrays on their way to the host.
        """
        self._pool, self._drawn, self._tables, logits, outputs = self._code(bucket)(
            self._params, self._pool, self._drawn, self._tables, packed, self._kv_scales
        )
        if sampling is not None:
            draw = self._code(Draw(bucket.seqs, full, penalties))
            seen = self.seen.array if penalties else None
            self._drawn, outputs, seen = draw(logits, self._drawn, sampling, seen)
            if penalties:
                self.seen.array = seen
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()
        return outputs

    def _code(self, key: Bucket | Draw) -> Any:
        if key not in self._compiled:
            self.compiles_after_warmup += self._warm
            self._compiled[key] = self.compile(key)
        return self._compiled[key]


def _described(array: Any) -> tuple[Any, ...] | None:
    """What a compiled step demands of a parameter; None for one that is not there."""
    if array is None:
        return None
    if not (hasattr(array, "dtype") and hasattr(array, "shape")):
        return type(array).__name__, "no array"
    place: Any = "not on a device"
    if isinstance(array, jax.Array):
        place = "deleted"
        if not array.is_deleted():
            place = sorted(map(str, array.devices())), array.sharding.memory_kind
    return array.shape, str(array.dtype), place

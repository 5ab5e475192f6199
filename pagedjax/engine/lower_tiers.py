"""Host memory and disk below one engine's pool: what the scheduler decides is carried out here."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.engine.disk_tier import DiskTier, Written
from pagedjax.engine.fingerprint import weights_digest
from pagedjax.engine.kv_pool import KVPool, KVSpec
from pagedjax.engine.offload import BlockMover, LinkRates
from pagedjax.engine.runner import ModelRunner
from pagedjax.models.arch import ArchConfig
from pagedjax.models.params import param_shapes
from scheduler.prefix_index import key_digest
from scheduler.scheduler import Scheduler, StepPlan
from scheduler.tiers import Tiers
from scheduler.transfers import FileDelete, FileRead, FileWrite, SwapCost, Transfers

_IDLE_WAIT_S = 0.005
"""How long an engine that has nothing else to do waits for the disk at a time."""


class LowerTiers:
    """Moves blocks between the pool, host memory and the disk, as a scheduler's `Tiers` say.

    Args:
        tiers: the books.
        mover: host memory.
        disk: the disk, if there is one.
        namespace: what the content of files depends on besides their keys, as of now.
    """

    def __init__(
        self,
        tiers: Tiers,
        mover: BlockMover,
        disk: DiskTier | None,
        namespace: Callable[[], str],
    ) -> None:
        self.mover = mover
        self._tiers = tiers
        self._disk = disk
        self._namespace = namespace
        if disk is not None:
            tiers.adopt(disk.names())
            # When the engine is dropped, or when the process ends with it.
            self._close_disk = weakref.finalize(self, disk.close)

    def plan(
        self,
        scheduler: Scheduler,
        update_pool: Callable[[Callable[[KVPool], KVPool]], None],
    ) -> StepPlan | None:
        """Plan the next step, and launch what has to be moved before it.

        Args:
            scheduler: whose tiers these are.
            update_pool: replaces the arrays of the pool by what a function makes of them.

        Returns:
            As `Scheduler.schedule`; when it is None because requests wait for the disk, so does
            this, for a moment.
        """
        self._report()
        plan = scheduler.schedule()
        transfers = self._tiers.take()
        if transfers:
            update_pool(lambda pool: self._carry_out(transfers, pool))
        if plan is None and self._disk is not None and self._disk.is_reading:
            self._disk.wait(_IDLE_WAIT_S)
        return plan

    def close(self) -> None:
        """Finish the writes that have begun, unless they take many seconds."""
        if self._disk is not None:
            self._close_disk()

    def _report(self) -> None:
        """Let the books know what has become of files."""
        for event in self._disk.poll() if self._disk is not None else ():
            if isinstance(event, Written):
                self._tiers.tell_written(key_digest(event.key), ok=event.ok)
            else:
                if event.content is not None:
                    self.mover.fill(event.slot, event.content)
                ok = event.content is not None
                self._tiers.tell_read(event.slot, ok=ok, keep=not event.is_bad)

    def _carry_out(self, transfers: Transfers, pool: KVPool) -> KVPool:
        disk, mover = self._disk, self.mover
        if disk is not None:
            if transfers.forget_disk:
                disk.forget(self._namespace())
            for operation in transfers.files:
                match operation:
                    case FileWrite(key, slot):
                        content = mover.content(slot)
                        disk.write(key, lambda content=content: np.asarray(content).view(np.uint8))
                    case FileRead(key, slot):
                        disk.read(key, slot)
                    case FileDelete(name):
                        disk.delete(name)
        mover.store(pool, transfers.stores)
        pool = mover.load(pool, transfers.loads)
        mover.prefetch(transfers.prefetches)
        return pool


def open_lower_tiers(
    config: EngineConfig,
    arch: ArchConfig,
    spec: KVSpec,
    scheduler: Scheduler,
    runner: ModelRunner,
) -> LowerTiers | None:
    """What `config` wants below the pool; None if that is nothing.

    Compiles the copies and measures what the choice of a preemption goes by, unless `config`
    says so; to be called after the warm-up of the steps.

    Args:
        config: resolved options.
        arch: the model.
        spec: of the pool.
        scheduler: of the engine; it is told what a swap costs.
        runner: of the engine.

    Raises:
        ValueError: the memory of the host can not be pinned, or the disk not be written.
    """
    tiers = scheduler.blocks.tiers
    if tiers is None:
        return None
    mover = BlockMover(runner.abstract_pool, tiers.num_host_blocks)
    if config.warm_up:
        mover.warm_up()
    if config.preemption == "auto":
        scheduler.swap_cost = _swap_cost(config, arch, mover, runner)

    def namespace() -> str:
        return kv_namespace(arch, spec, runner)

    disk = None
    if config.disk_cache_path is not None:
        disk = DiskTier(
            Path(config.disk_cache_path),
            namespace(),
            block_bytes=spec.block_bytes,
            max_pending=tiers.max_pending_writes,
        )
    return LowerTiers(tiers, mover, disk, namespace)


def kv_namespace(arch: ArchConfig, spec: KVSpec, runner: ModelRunner) -> str:
    """Name of what keys and values depend on besides their tokens: 32 hexadecimal digits.

    That is the weights, how the model uses them, and how a block is stored.
    """
    block = dataclasses.replace(spec, num_blocks=0)
    digest = hashlib.blake2b(f"{arch}; {block}; ".encode(), digest_size=16)
    digest.update(weights_digest(runner.params))
    for array in jax.tree.leaves(runner.kv_scales):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()


def _swap_cost(
    config: EngineConfig, arch: ArchConfig, mover: BlockMover, runner: ModelRunner
) -> SwapCost:
    """The rates that are given, the others measured."""
    store_rate = load_rate = config.link_bytes_per_s
    if store_rate is None or load_rate is None:
        rates: list[LinkRates] = []

        def measure(pool: KVPool) -> KVPool:
            pool, measured = mover.measure(pool)
            rates.append(measured)
            return pool

        runner.update_pool(measure)
        store_rate, load_rate = rates[0].store_bytes_per_s, rates[0].load_bytes_per_s
    return SwapCost(
        block_bytes=mover.block_bytes,
        store_bytes_per_s=store_rate,
        load_bytes_per_s=load_rate,
        prefill_tokens_per_s=config.prefill_tokens_per_s or runner.prefill_tokens_per_s(),
        attention_tokens=attention_tokens(arch),
    )


def attention_tokens(arch: ArchConfig) -> float:
    """Length of a prompt whose attention is as much arithmetic as its matrix products.

    Products take two operations per weight and token. Attention takes four per head dimension and
    pair of a query and a key it sees, and a sequence of `n` tokens has `n**2 / 2` of these in each
    layer without a window; layers with one are left out, since theirs stay few.
    """
    per_token = 2 * sum(
        math.prod(shape) for name, shape in param_shapes(arch).items() if name.startswith("layers.")
    )
    full_layers = sum(window is None for window in arch.windows)
    per_pair = 4 * full_layers * arch.q_heads * arch.head_dim
    return 2 * per_token / per_pair if per_pair else math.inf

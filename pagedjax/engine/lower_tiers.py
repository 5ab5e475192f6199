"""Host memory and disk below one engine's pool: what the scheduler decides is carried out here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pagedjax.engine.disk_tier import DiskTier, FileIO, Written
from pagedjax.engine.kv_pool import KVPool
from pagedjax.engine.offload import BlockMover
from scheduler.prefix_index import key_digest
from scheduler.scheduler import Scheduler, StepPlan
from scheduler.tiers import Tiers
from scheduler.transfers import FileDelete, FileRead, FileWrite, Transfers

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
        """Finish the writes that have begun."""
        if self._disk is not None:
            self._disk.close()

    def _report(self) -> None:
        """Let the books know what has become of files."""
        for event in self._disk.poll() if self._disk is not None else ():
            if isinstance(event, Written):
                self._tiers.tell_written(key_digest(event.key), ok=event.ok)
            else:
                if event.content is not None:
                    self.mover.fill(event.slot, event.content)
                self._tiers.tell_read(event.slot, ok=event.content is not None)

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


def open_disk(
    path: str | Path,
    namespace: str,
    *,
    block_bytes: int,
    num_host_blocks: int,
    io: FileIO | None = None,
) -> DiskTier:
    """The disk of an engine; an eighth of the host's blocks may wait to be written.

    Raises:
        ValueError: the directory can not be made.
    """
    return DiskTier(
        Path(path),
        namespace,
        block_bytes=block_bytes,
        max_pending=max(8, num_host_blocks // 8),
        io=io,
    )


def content_namespace(*parts: bytes | str) -> str:
    """Name of a directory for blocks that depend on all of `parts`: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()

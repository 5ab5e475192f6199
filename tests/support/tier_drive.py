"""Runs the scheduler with host memory and a disk that fails at random, both of them checked.

`TierModel` keeps the tokens and positions of every slot of host memory and of every file, next to
those of the pool, and moves them as `Transfers` say, in their order. A wrong copy, or one at the
wrong time, shows as content under a key that it does not belong to, or as another next token.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from scheduler import NULL_BLOCK, Scheduler, SchedulerConfig, StepPlan
from scheduler.prefix_index import key_digest
from scheduler.queue import urgency
from scheduler.sequence import Status
from scheduler.transfers import FileDelete, FileRead, FileWrite, Transfers
from tests.support.drive import Driver, HashModel, check_plan

Content = tuple[np.ndarray, np.ndarray]
DIGEST_BYTES = 32


@dataclass
class FlakyDisk:
    """Files that are written, read and lost at random, one operation after another.

    Attributes:
        rng: where chance comes from.
        failures: how often an operation fails.
        delays: how often the disk does nothing for the rest of a step.
        files: content by name.
        queue: operations that wait, with the content to write.
    """

    rng: np.random.Generator
    failures: float
    delays: float
    files: dict[bytes, Content] = field(default_factory=dict)
    queue: deque[tuple[FileWrite | FileRead | FileDelete, Content | None]] = field(
        default_factory=deque
    )

    def run(self, scheduler: Scheduler, model: TierModel, *, at_least: int = 0) -> None:
        """Carry out what it gets to in a step, and report."""
        tiers = scheduler.blocks.tiers
        assert tiers is not None
        while self.queue and (at_least > 0 or self.rng.random() >= self.delays):
            at_least -= 1
            operation, content = self.queue.popleft()
            ok = self.rng.random() >= self.failures
            match operation:
                case FileWrite(key, _):
                    if ok and content is not None:
                        self.files[key_digest(key)] = content
                    tiers.tell_written(key_digest(key), ok=ok)
                case FileDelete(name):
                    self.files.pop(name, None)
                case FileRead(key, slot):
                    found = self.files.get(key_digest(key)) if ok else None
                    if found is not None:
                        model.fill(slot, found)
                    tiers.tell_read(slot, ok=found is not None, keep=not ok)


class TierModel(HashModel):
    """The device with host memory below it."""

    def __init__(self, config: SchedulerConfig, disk: FlakyDisk) -> None:
        super().__init__(config)
        shape = (config.num_host_blocks, config.block_size)
        self._host_tokens = np.full(shape, -1, np.int64)
        self._host_positions = np.full(shape, -1, np.int64)
        self._ahead: dict[int, Content] = {}  # prefetched to the device, by slot
        self._disk = disk

    def fill(self, slot: int, content: Content) -> None:
        """A file has been read into a slot."""
        self._host_tokens[slot], self._host_positions[slot] = content
        self._ahead.pop(slot, None)

    def move(self, transfers: Transfers) -> None:
        """Carry out the transfers of a step before it."""
        if transfers.forget_disk:
            self._disk.files.clear()
        for operation in transfers.files:
            content = None
            if isinstance(operation, FileWrite):
                content = self._in_slot(operation.slot)
            self._disk.queue.append((operation, content))
        pool_tokens = self._tokens.reshape(-1, self._block_size)
        pool_positions = self._positions.reshape(-1, self._block_size)
        blocks, slots = transfers.stores.T
        assert (blocks != NULL_BLOCK).all() and len(set(slots.tolist())) == len(slots)
        self._host_tokens[slots] = pool_tokens[blocks]
        self._host_positions[slots] = pool_positions[blocks]
        for slot in slots.tolist():
            self._ahead.pop(slot, None)
        slots, blocks = transfers.loads.T
        assert (blocks != NULL_BLOCK).all() and len(set(blocks.tolist())) == len(blocks)
        for slot, block in transfers.loads.tolist():
            content = self._ahead[slot] if slot in self._ahead else self._in_slot(slot)
            pool_tokens[block], pool_positions[block] = content
        if len(slots):
            self._ahead.clear()
        self._ahead.update((slot, self._in_slot(slot)) for slot in transfers.prefetches)

    def _in_slot(self, slot: int) -> Content:
        return self._host_tokens[slot].copy(), self._host_positions[slot].copy()

    def check_host(self, scheduler: Scheduler) -> None:
        """What can be found in host memory is what it is found as; so are the files."""
        tiers = scheduler.blocks.tiers
        assert tiers is not None
        size = self._block_size
        for key, slot in tiers.host_contents().items():
            tokens = key[DIGEST_BYTES : DIGEST_BYTES + 4 * size]
            assert self._host_tokens[slot].astype(np.int32).tobytes() == tokens
            first = self._host_positions[slot][0]
            assert first % size == 0
            assert np.array_equal(self._host_positions[slot], np.arange(first, first + size))


@dataclass
class TierDriver(Driver):
    """A driver whose scheduler has tiers below the pool.

    Attributes:
        seed: of the disk's moods.
        disk_failures: how often a file operation fails.
        disk_delays: how often the disk does nothing more in a step.
    """

    seed: int = 0
    disk_failures: float = 0.0
    disk_delays: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng(self.seed)
        self.disk = FlakyDisk(rng, self.disk_failures, self.disk_delays)
        self.tier_model = TierModel(self.config, self.disk)
        self.model = self.tier_model

    @property
    def tiers(self):
        """The books of the tiers."""
        tiers = self.scheduler.blocks.tiers
        assert tiers is not None
        return tiers

    def step(self) -> StepPlan | None:
        """One turn of the engine's loop; a plan that has to wait for the disk does so."""
        self.disk.run(self.scheduler, self.tier_model)
        wanting = [s for s in self.scheduler.sequences() if s.status is not Status.DRAINING]
        waits_for_beams = bool(self._unread) and any(s.held and s.blocks for s in wanting)
        wanting = [s for s in wanting if not s.held]
        before = self.scheduler.num_preemptions
        plan = self._schedule()
        while plan is None and wanting and not waits_for_beams:
            gave_way = self.scheduler.num_preemptions > before
            before = self.scheduler.num_preemptions
            assert self.disk.queue or gave_way, "nothing is planned and nothing is waited for"
            self.disk.run(self.scheduler, self.tier_model, at_least=1)
            plan = self._schedule()
        if plan is not None:
            check_plan(plan, self.config)
            running = [s for s in wanting if s.blocks or s.status is Status.DRAINING]
            planned = {s.seq_id for s in plan.seqs}
            served = [s for s in wanting if s.seq_id in planned]
            first = min(running, key=urgency, default=None)  # one that waited may be it by now
            may_wait = first is None or self.config.ttft_target_s is not None
            assert may_wait or any(
                s is first or s.request.priority < first.request.priority for s in served
            ), "no progress"
            self.plans.append(plan)
            self._unread.append((plan, self.model.run(plan)))
        self._check()
        self._read_back(1 if self.pipelined and plan is not None else 0)
        return plan

    def _schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.tier_model.move(self.tiers.take())
        return plan

    def _check(self) -> None:
        super()._check()
        if self.check:
            self.tier_model.check_host(self.scheduler)

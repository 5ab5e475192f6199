"""Where cached blocks lie below the GPU: in host memory, then in files on a disk.

The pool keeps what it holds until it needs the room. A full block that is then overwritten goes to
a slot of host memory first; what the host has no room for, least recently used first, goes to the
disk; what the disk has no room for is forgotten. A later prompt finds its longest prefix on the
GPU and in host memory together. What it would find on the disk is read into host memory while the
request waits. A sequence that is preempted can keep everything it has computed in slots of its own.

Nothing is copied here. `Tiers` decides and keeps the books, the engine carries out the `Transfers`
before the step that they were decided for, and reports what became of reads and writes of files.
Copies between GPU and host can not fail, and the device does them in the order of their launch, so
a slot counts as filled and a block as loaded once the order is given. Files can fail in every way:
a block that can not be read is one that was never there. No more writes than
`max_pending_writes` wait for the disk; what host memory drops meanwhile is forgotten, and costs no
file its place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.prefix_index import PrefixIndex, key_digest
from scheduler.transfers import FileDelete, FileRead, FileWrite, TierCounts, Transfers

# What waits to be written keeps its memory in use, and reads wait behind it.
LEAST_PENDING_WRITES, MOST_PENDING_WRITES = 8, 64


@dataclass(slots=True, eq=False)
class HostBlock:
    """A slot of host memory that is in use.

    Attributes:
        slot: which one.
        key: what the content is indexed under; None if only its pinners know it.
        pins: sequences, reads and pending transfers that need it to stay; it can be evicted when
            there are none, and belongs to nobody then if it has no key.
        reading: whether its content is still to come from the disk.
        from_disk: whether its content came from there.
    """

    slot: int
    key: bytes | None
    pins: int = 0
    reading: bool = False
    from_disk: bool = False


class Tiers:
    """The books of the tiers below the GPU.

    A slot is free, holds content that anybody may find (`key`), or holds content of a preempted
    sequence only. What is loaded again stays in its slot too, so that the GPU can drop it later
    without another copy.

    Args:
        index: content of the pool; with durable numbers.
        num_host_blocks: slots of host memory.
        num_disk_blocks: most files; 0 for no disk.

    Attributes:
        counts: what has happened so far.
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        num_host_blocks: int,
        num_disk_blocks: int = 0,
    ) -> None:
        self._index = index
        index.on_discard = self._keep
        self._free = list(range(num_host_blocks - 1, -1, -1))
        self._by_key: dict[bytes, HostBlock] = {}
        self._idle: OrderedDict[HostBlock, None] = OrderedDict()  # least recently used first
        self._reading: dict[int, HostBlock] = {}  # by slot
        self._num_disk_blocks = num_disk_blocks
        # Whether the file is written yet, by name; least recently used first.
        self._on_disk: OrderedDict[bytes, bool] = OrderedDict()
        self._num_pending_writes = 0
        self._outdated: Counter[bytes] = Counter()  # pending writes of what was forgotten, by name
        self.counts = TierCounts()
        self._num_host_blocks = num_host_blocks
        self._begin()

    @property
    def num_host_blocks(self) -> int:
        """Slots of host memory."""
        return self._num_host_blocks

    @property
    def num_host_used(self) -> int:
        """Slots that hold content or wait for it."""
        return self._num_host_blocks - len(self._free)

    @property
    def num_host_available(self) -> int:
        """Slots that can be filled at once."""
        return len(self._free) + len(self._idle)

    @property
    def num_disk_blocks(self) -> int:
        """Most files."""
        return self._num_disk_blocks

    @property
    def num_disk_used(self) -> int:
        """Files, those being written among them."""
        return len(self._on_disk)

    @property
    def max_pending_writes(self) -> int:
        """Most writes that have not been reported."""
        return min(max(LEAST_PENDING_WRITES, self._num_host_blocks // 8), MOST_PENDING_WRITES)

    @property
    def num_pending_writes(self) -> int:
        """Writes that have not been reported; files and counts are settled when there are none."""
        return self._num_pending_writes

    def adopt(self, names: Iterable[bytes]) -> None:
        """Count files of an earlier run among those on the disk.

        Args:
            names: of the files, least recently used first.
        """
        self._on_disk.update((name, True) for name in names)
        while len(self._on_disk) > self._num_disk_blocks:
            name, _ = self._on_disk.popitem(last=False)
            self._files.append(FileDelete(name))

    def host_contents(self) -> dict[bytes, int]:
        """The slot of everything that `find` finds in host memory, by key."""
        return {key: held.slot for key, held in self._by_key.items() if not held.reading}

    def find(self, keys: Iterable[bytes]) -> list[int | HostBlock]:
        """The longest prefix on the GPU (as a block of the pool) and in host memory together.

        Args:
            keys: what the full blocks of a sequence are indexed under, in order.
        """
        found: list[int | HostBlock] = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                held = self._by_key.get(key)
                if held is None or held.reading:
                    break
                found.append(held)
            else:
                found.append(block)
        return found

    def prefetch(self, keys: Iterable[bytes]) -> list[HostBlock]:
        """Begin to read what only the disk has of a prefix.

        Args:
            keys: as for `find`.

        Returns:
            Blocks of the prefix that are being read, for this call or for another.
        """
        coming: list[HostBlock] = []
        if not self._on_disk and not self._reading:
            return coming
        for key in keys:
            if self._index.get(key) is not None:
                continue
            held = self._by_key.get(key) or self._read(key)
            if held is None:
                break
            if held.reading:
                coming.append(held)
        return coming

    def expect(self, held: Iterable[HostBlock]) -> None:
        """Tell the engine that these blocks will probably be loaded soon."""
        self._prefetches += [block.slot for block in held]

    def hold(self, held: Iterable[HostBlock]) -> None:
        """Keep blocks from being evicted until the next `take`."""
        for block in held:
            self._pin(block)
            self._held.append(block)

    def load(self, held: HostBlock, block: int) -> None:
        """Copy a held slot to a block of the pool, which has no content before."""
        self._loads[block] = held
        self.counts.loaded += 1
        if held.key is not None and self._index.get(held.key) is None:
            self._index.restore(block, held.key)

    def count_hits(self, hits: Iterable[int | HostBlock], of_prompt: range) -> None:
        """Note that a sequence was admitted with these blocks.

        Args:
            hits: those of the pool among them.
            of_prompt: which of them are looked up as a prompt's.
        """
        for index, held in enumerate(hits):
            if not isinstance(held, HostBlock):
                continue
            if held.from_disk:
                self.counts.disk_hits += 1
                self.counts.disk_prompt_hits += index in of_prompt
            else:
                self.counts.host_hits += 1
                self.counts.host_prompt_hits += index in of_prompt
            held.from_disk = False  # from now on it is host memory that has it

    def save(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[HostBlock | None] | None:
        """Keep the content of a sequence that loses its blocks.

        Stores come before loads: what is still to be loaded into a block is kept where it lies.

        Args:
            blocks: blocks of the pool with computed tokens, in order; the null block stands for
                one that the sequence needs no more.
            keys: what the first `len(keys)` blocks are indexed under.

        Returns:
            Where each block is kept, pinned; None in the place of a null block. None if host
            memory has no room; nothing has changed then.
        """
        present = [self._by_key.get(key) for key in keys] + [None] * (len(blocks) - len(keys))
        for at, (held, block) in enumerate(zip(present, blocks, strict=True)):
            if held is None or held.reading:
                present[at] = self._loads.get(block)
            elif block == 0:
                present[at] = None
        needed = sum(
            held is None and block != 0 for held, block in zip(present, blocks, strict=True)
        )
        idle = sum(held is not None and not held.pins for held in present)
        if needed + idle > self.num_host_available:
            return None
        for held in present:
            if held is not None:
                self._pin(held)  # before any slot is taken, which might evict it
        saved: list[HostBlock | None] = []
        for at, (held, block) in enumerate(zip(present, blocks, strict=True)):
            if held is None and block != 0:
                key = keys[at] if at < len(keys) else None
                held = self._put(block, key if key not in self._by_key else None)
                assert held is not None
                self._pin(held)
            saved.append(held)
            self.counts.swapped_out += held is not None
        return saved

    def release(self, saved: Iterable[HostBlock | None]) -> None:
        """Undo the pins of `save`; the end of a prefix is to be evicted before its beginning."""
        for held in reversed(list(saved)):
            if held is not None:
                self._unpin(held)

    def forget(self) -> None:
        """Nothing that is known anywhere is to be found again; saved sequences keep theirs."""
        for held in list(self._by_key.values()):
            held.key = None
            if not held.pins:
                self._free.append(held.slot)
        self._by_key.clear()
        self._idle.clear()
        # Files are forgotten as a whole; but a slot waits for the answer to its read, and the
        # report on a write that has begun may come when its name already stands for a new file.
        dropped = {key_digest(one.key) for one in self._files if isinstance(one, FileWrite)}
        self._num_pending_writes -= len(dropped)
        self._outdated.update(
            name for name, written in self._on_disk.items() if not written and name not in dropped
        )
        self._files = [one for one in self._files if isinstance(one, FileRead)]
        self._on_disk.clear()
        self._forget_disk = self._num_disk_blocks > 0

    def take(self) -> Transfers:
        """What has been decided since the last call, to be carried out before the next step."""
        transfers = Transfers(
            forget_disk=self._forget_disk,
            files=self._files,
            stores=np.array(self._stores, np.int32).reshape(-1, 2),
            loads=np.array(
                [(held.slot, block) for block, held in self._loads.items()], np.int32
            ).reshape(-1, 2),
            prefetches=self._prefetches,
        )
        held = self._held
        self._begin()
        for block in reversed(held):
            self._unpin(block)
        return transfers

    def tell_written(self, name: bytes, *, ok: bool) -> None:
        """A write has ended, well or not; writes of one name are reported in their order."""
        self._num_pending_writes -= 1
        self.counts.spilled += ok
        self.counts.failed_spills += not ok
        if name in self._outdated:
            self._outdated -= Counter((name,))
        elif ok:
            self._on_disk[name] = True
        else:
            del self._on_disk[name]

    def tell_read(self, slot: int, *, ok: bool, keep: bool = False) -> None:
        """A read has ended.

        Args:
            slot: what it was for.
            ok: whether the slot holds the content now; if not, whoever waits does without.
            keep: whether the file of a read that failed may be good all the same, and a later
                prompt is to find it; else it is deleted.
        """
        held = self._reading.pop(slot)
        held.reading = False
        held.from_disk = True
        self.counts.read += ok
        self.counts.failed_reads += not ok
        if not ok and held.key is not None:
            name = key_digest(held.key)
            if not keep and self._on_disk.pop(name, None) is not None:
                self._files.append(FileDelete(name))
            del self._by_key[held.key]
            held.key = None
        self._unpin(held)

    def check(self, saved: Iterable[HostBlock]) -> None:
        """Every slot is free once or holds one thing, and every pin has an owner.

        Args:
            saved: what the sequences that are swapped out have listed.

        Raises:
            AssertionError: the books disagree.
        """
        pins = Counter(saved) + Counter(self._held) + Counter(self._reading.values())
        blocks = set(self._by_key.values()) | pins.keys()
        slots = [*self._free, *(held.slot for held in blocks)]
        assert sorted(slots) == list(range(self._num_host_blocks)), "a slot is lost or used twice"
        for key, held in self._by_key.items():
            assert held.key == key, "content is found under another key"
            assert held.reading == (self._reading.get(held.slot) is held)
        for held in blocks:
            assert held.pins == pins[held], "pins are miscounted"
            assert (held in self._idle) == (not held.pins), "a block can be evicted while needed"
            assert held.key is None or self._by_key[held.key] is held, "content can not be found"
        assert len(self._on_disk) <= self._num_disk_blocks, "more files than allowed"
        pending = sum(not written for written in self._on_disk.values()) + self._outdated.total()
        assert self._num_pending_writes == pending, "pending writes are miscounted"
        assert pending <= self.max_pending_writes, "more writes than allowed"

    def _begin(self) -> None:
        """Start to collect transfers anew."""
        self._forget_disk = False
        self._files: list[FileWrite | FileRead | FileDelete] = []
        self._stores: list[tuple[int, int]] = []
        self._loads: dict[int, HostBlock] = {}  # by block
        self._prefetches: list[int] = []
        self._held: list[HostBlock] = []

    def _keep(self, block: int, key: bytes) -> None:
        """The pool is about to overwrite a block that is indexed under `key`."""
        held = self._by_key.get(key)
        if held is None:
            if self._put(block, key) is None:
                self.counts.not_stored += 1
        elif held in self._idle:
            self._idle.move_to_end(held)

    def _put(self, block: int, key: bytes | None) -> HostBlock | None:
        """Copy a block of the pool to a slot, which stays at least until the next `take`."""
        slot = self._take_slot()
        if slot is None:
            return None
        held = HostBlock(slot, key)
        if key is not None:
            self._by_key[key] = held
        self._pin(held)
        self._held.append(held)
        self._stores.append((block, slot))
        self.counts.stored += 1
        return held

    def _take_slot(self) -> int | None:
        """A slot to be filled; the least recently used content makes room if none is free."""
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        victim, _ = self._idle.popitem(last=False)
        assert victim.key is not None
        del self._by_key[victim.key]
        self.counts.host_evictions += 1
        self._spill(victim.slot, victim.key)
        return victim.slot

    def _spill(self, slot: int, key: bytes) -> None:
        if not self._num_disk_blocks:
            return
        name = key_digest(key)
        if name in self._on_disk:
            self._on_disk.move_to_end(name)
            return
        room = self._num_disk_blocks - len(self._on_disk)
        oldest = next((name for name, written in self._on_disk.items() if written), None)
        if self._num_pending_writes >= self.max_pending_writes or not (room or oldest):
            self.counts.failed_spills += 1  # the disk is as slow as that: this block is forgotten
            return
        if not room and oldest:
            del self._on_disk[oldest]
            self._files.append(FileDelete(oldest))
            self.counts.disk_evictions += 1
        self._on_disk[name] = False
        self._num_pending_writes += 1
        self._files.append(FileWrite(key, slot))

    def _read(self, key: bytes) -> HostBlock | None:
        """Begin to read a file, if there is one and a slot for it."""
        name = key_digest(key)
        if not self._on_disk.get(name, False):
            return None
        if 2 * len(self._reading) >= self._num_host_blocks:
            return None  # leave room for what the GPU drops meanwhile
        self._on_disk.move_to_end(name)
        slot = self._take_slot()
        if slot is None:
            return None
        held = HostBlock(slot, key, pins=1, reading=True)
        self._by_key[key] = self._reading[slot] = held
        self._files.append(FileRead(key, slot))
        return held

    def _pin(self, held: HostBlock) -> None:
        if not held.pins and held.key is not None:
            self._idle.pop(held, None)
        held.pins += 1

    def _unpin(self, held: HostBlock) -> None:
        held.pins -= 1
        if held.pins:
            return
        if held.key is None:
            self._free.append(held.slot)
        else:
            self._idle[held] = None

"""Cached blocks as files: written and read by a thread of their own, checked when read.

A file is written under another name, forced to the disk and then renamed, so that a crash leaves
the whole file or none. It begins with the key of its content and a digest of everything, so that
a file that is damaged, cut short or another's is told from a good one, and counts as missing.

Nothing here is waited for. Writes that the disk is too slow for are dropped, and reads are given
up while the disk stands still; both are reported as failed. A file is called bad only if it has
been seen to be: not because the disk was slow, or failed this time. No fault of a disk reaches a
request.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scheduler.prefix_index import key_digest

_HEADER = struct.Struct("<8sIQ")  # magic, bytes of the key, bytes of the content
_MAGIC = b"PJKVB001"
_DIGEST_BYTES = 16
_SUFFIX, _PARTIAL = ".kv", ".partial"
_NAMESPACE, _FILE = re.compile("[0-9a-f]{32}"), re.compile(rf"([0-9a-f]{{64}})\{_SUFFIX}")
_FILE_SYSTEM_BLOCK = 4096
# What an operation can fail with: the disk, too little memory, or the device that has the content.
# Anything else is a fault of this program, which ends the thread with a traceback.
_FAULTS = (OSError, MemoryError, RuntimeError)


def file_bytes(block_bytes: int, block_size: int) -> int:
    """Room that the file of a block takes on a disk.

    Args:
        block_bytes: of its content.
        block_size: tokens of a block.
    """
    key = 32 + 4 * block_size
    size = _HEADER.size + _DIGEST_BYTES + key + block_bytes
    return -(-size // _FILE_SYSTEM_BLOCK) * _FILE_SYSTEM_BLOCK


class FileIO:
    """The calls to the file system; tests put faulty ones in their place."""

    def write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Write a new file and force it to the disk."""
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its name, at once and in place of an older one."""
        source.replace(target)

    def read(self, path: Path) -> bytes:
        """All of a file, which becomes the most recently used one."""
        content = path.read_bytes()
        os.utime(path)
        return content

    def delete(self, path: Path) -> None:
        """Delete a file that may be gone already."""
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Written:
    """The write of a block has ended, well or not."""

    key: bytes
    ok: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """The read of a block has ended.

    Attributes:
        slot: where the block is wanted.
        content: uint8[block_bytes]; None if the read has failed.
        is_bad: whether that is because the file is not there or not what was written. Another read
            may succeed if not: this one took too long, or the disk reported an error.
    """

    slot: int
    content: np.ndarray | None
    is_bad: bool = False


@dataclass(slots=True, eq=False)
class _Read:
    """A read that has not been reported."""

    key: bytes
    slot: int
    given_up: bool = False


class DiskTier:
    """A directory of cached blocks. One thread calls it; its own thread does the work.

    The blocks of one model, weights and block format are in a directory below it, named by
    `namespace`; other namespaces are of no use any more, and are deleted. How many files there
    are is up to the caller. A directory is for one engine: another one deletes what it does not
    know, which costs hits and nothing else.

    Args:
        path: the directory; it is made if need be.
        namespace: what the blocks depend on besides their keys, as 32 hexadecimal digits.
        block_bytes: size of a block's content.
        max_pending: most writes that wait; a write beyond them fails at once.
        patience_s: how long reads wait for the next of them to end. Then the disk stands still:
            all of them are given up, and others fail at once until it has come past these.
        io: the calls to the file system.

    Raises:
        ValueError: the directory can not be made, or nothing can be written there.
    """

    def __init__(
        self,
        path: Path,
        namespace: str,
        *,
        block_bytes: int,
        max_pending: int = 64,
        patience_s: float = 2.0,
        io: FileIO | None = None,
    ) -> None:
        self._root = path
        self._block_bytes = block_bytes
        self._max_pending = max_pending
        self._patience_s = patience_s
        self._io = io or FileIO()
        self._directory = path / namespace
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe = self._directory / f"{os.getpid()}.0{_PARTIAL}"
            probe.touch()  # no content: the disk may be full
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"disk_cache_path is to be a directory that can be written, got {str(path)!r}: "
                f"{error}"
            ) from error
        self._reads: dict[int, _Read] = {}  # by slot
        self._patient_until = 0.0
        self._num_late = 0  # reads that were given up and have not come back
        self._serial = 0
        self._undeleted: set[Path] = set()  # of the other thread; they take room promised to others
        self._lock = threading.Condition()  # guards what follows
        self._jobs: deque[Callable[[], object]] = deque()
        self._num_writes = 0
        self._events: deque[Written | tuple[_Read, Fetched]] = deque()
        self._closing = False
        self._submit(self._delete_others)
        # A daemon, since a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="disk-tier", daemon=True)
        self._thread.start()

    def names(self) -> list[bytes]:
        """Names (`key_digest`) of the files that are there, least recently used first."""
        found: list[tuple[float, bytes]] = []
        with suppress(OSError):  # what can not be listed is not there
            for entry in os.scandir(self._directory):
                if match := _FILE.fullmatch(entry.name):
                    found.append((entry.stat().st_mtime, bytes.fromhex(match[1])))
        return [name for _, name in sorted(found)]

    def write(self, key: bytes, content: Callable[[], np.ndarray]) -> None:
        """Begin to write a block; `poll` reports it.

        Args:
            key: what its content is indexed under.
            content: gives its bytes, uint8[block_bytes]; called in the other thread.
        """
        directory = self._directory
        self._serial += 1
        partial = directory / f"{os.getpid()}.{self._serial}{_PARTIAL}"
        with self._lock:
            if self._num_writes >= self._max_pending:
                self._events.append(Written(key, False))
                return
            self._num_writes += 1
        self._submit(lambda: self._write(key, content, partial, _path(directory, key)))

    def read(self, key: bytes, slot: int) -> None:
        """Begin to read a block for a slot that no other read is for; `poll` reports it."""
        path = _path(self._directory, key)
        read = _Read(key, slot)
        if not self._reads:
            self._patient_until = time.monotonic() + self._patience_s
        self._reads[slot] = read
        if self._num_late:
            self._tell((read, Fetched(slot, None)))
        else:
            self._submit(lambda: self._read(read, path))

    @property
    def is_reading(self) -> bool:
        """Whether `poll` is still to report a read."""
        return bool(self._reads)

    def delete(self, name: bytes) -> None:
        """Begin to delete a file, after all writes and reads that have begun before."""
        path = self._directory / f"{name.hex()}{_SUFFIX}"
        self._submit(lambda: self._delete(path))

    def forget(self, namespace: str) -> None:
        """Go on with an empty directory, as when the weights have changed."""
        for name in self.names() if namespace == self._directory.name else ():
            self.delete(name)
        self._directory = self._root / namespace
        with suppress(OSError):  # then all that follows fails
            self._directory.mkdir(parents=True, exist_ok=True)
        self._submit(self._delete_others)

    def poll(self) -> list[Written | Fetched]:
        """What has ended since the last call, all reads among it if the disk stands still."""
        with self._lock:
            events, self._events = self._events, deque()
        now = time.monotonic()
        ended: list[Written | Fetched] = []
        for event in events:
            if isinstance(event, Written):
                ended.append(event)
            elif event[0].given_up:
                self._num_late -= 1
            else:
                read, fetched = event
                del self._reads[read.slot]
                ended.append(fetched)
                self._patient_until = now + self._patience_s
        if now > self._patient_until:
            for slot, read in self._reads.items():
                read.given_up = True
                ended.append(Fetched(slot, None))
            self._num_late += len(self._reads)
            self._reads.clear()
        return ended

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has something to report, or until the time is over."""
        with self._lock:
            self._lock.wait_for(lambda: bool(self._events), timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what has begun, as far as that takes no longer than `timeout_s`."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout_s)

    def _submit(self, job: Callable[[], object]) -> None:
        with self._lock:
            self._jobs.append(job)
            self._lock.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._jobs) or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()

    def _tell(self, event: Written | tuple[_Read, Fetched]) -> None:
        with self._lock:
            self._events.append(event)
            self._lock.notify_all()

    def _write(
        self, key: bytes, content: Callable[[], np.ndarray], partial: Path, path: Path
    ) -> None:
        # What could not be deleted has its room still, so that nothing new may take any.
        ok = all(self._delete(left) for left in list(self._undeleted))
        if ok:
            try:
                payload = content()
                assert payload.nbytes == self._block_bytes
                header = _HEADER.pack(_MAGIC, len(key), payload.nbytes)
                self._io.write(partial, [header, key, payload.data, _digest(header, key, payload)])
                self._io.rename(partial, path)
            except _FAULTS:
                ok = False
                self._delete(partial)
        with self._lock:
            self._num_writes -= 1
        self._tell(Written(key, ok))

    def _read(self, read: _Read, path: Path) -> None:
        content, is_bad = None, False
        try:
            if not read.given_up:
                content = self._checked(self._io.read(path), read.key)
                is_bad = content is None
        except FileNotFoundError:
            is_bad = True
        except _FAULTS:
            pass
        self._tell((read, Fetched(read.slot, content, is_bad)))

    def _checked(self, data: bytes, key: bytes) -> np.ndarray | None:
        """The content in a file, if it is exactly what was written for `key`."""
        header = _HEADER.pack(_MAGIC, len(key), self._block_bytes)
        start = len(header) + len(key)
        end = start + self._block_bytes
        if len(data) != end + _DIGEST_BYTES or data[:start] != header + key:
            return None
        content = np.frombuffer(data, np.uint8, self._block_bytes, start)
        return content if _digest(header, key, content) == data[end:] else None

    def _delete(self, path: Path) -> bool:
        """Delete a file; whether it is gone. If not, that is tried again before the next write."""
        try:
            self._io.delete(path)
        except _FAULTS:
            self._undeleted.add(path)
            return False
        self._undeleted.discard(path)
        return True

    def _delete_others(self) -> None:
        """Delete files of other namespaces, and those that a crash has left half done."""
        own = f"{os.getpid()}."
        with suppress(*_FAULTS):
            for partial in self._directory.glob(f"*{_PARTIAL}"):
                if not partial.name.startswith(own):
                    self._delete(partial)
        with suppress(*_FAULTS):
            for entry in os.scandir(self._root):
                is_own = entry.name == self._directory.name
                if _NAMESPACE.fullmatch(entry.name) and not is_own:
                    self._delete_namespace(Path(entry.path))

    def _delete_namespace(self, directory: Path) -> None:
        """Delete what this class has written in a directory, and the directory if that was all."""
        with suppress(*_FAULTS):
            for entry in os.scandir(directory):
                is_ours = entry.name.endswith((_SUFFIX, _PARTIAL))
                if is_ours and entry.is_file(follow_symlinks=False):
                    self._delete(Path(entry.path))
            directory.rmdir()


def _path(directory: Path, key: bytes) -> Path:
    return directory / f"{key_digest(key).hex()}{_SUFFIX}"


def _digest(header: bytes, key: bytes, content: np.ndarray) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    digest.update(key)
    digest.update(content.data)
    return digest.digest()

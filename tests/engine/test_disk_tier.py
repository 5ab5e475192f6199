"""The disk may fail, fill up, tear files or stand still: blocks are whole and right, or missing."""

import errno
import threading
import time

import numpy as np
import pytest

from pagedjax.engine.disk_tier import DiskTier, Fetched, FileIO, Written, file_bytes
from scheduler.prefix_index import key_digest

BLOCK_BYTES = 5000
NAMESPACE, OTHER = "0" * 32, "f" * 32


def key_of(number):
    return number.to_bytes(32, "little") + bytes(64)


def content_of(number):
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


@pytest.fixture
def open_tier(tmp_path):
    """Makes tiers in one directory, and closes them."""
    tiers = []

    def make(namespace=NAMESPACE, **options):
        settings = dict(block_bytes=BLOCK_BYTES, patience_s=30.0)
        tiers.append(DiskTier(tmp_path / "cache", namespace, **{**settings, **options}))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def collect(tier, count, timeout_s=30.0):
    """The next `count` events."""
    events = []
    end = time.monotonic() + timeout_s
    while len(events) < count:
        assert time.monotonic() < end, f"only {events}"
        tier.wait(0.05)
        events += tier.poll()
    assert len(events) == count
    return events


def write(tier, *numbers):
    for number in numbers:
        tier.write(key_of(number), lambda number=number: content_of(number))
    return [event.ok for event in collect(tier, len(numbers))]


def read(tier, *numbers):
    """Contents by number."""
    for number in numbers:
        tier.read(key_of(number), slot=number)
    return {event.slot: event.content for event in collect(tier, len(numbers))}


def path_of(tmp_path, number):
    return tmp_path / "cache" / NAMESPACE / f"{key_digest(key_of(number)).hex()}.kv"


def test_what_was_written_is_read_by_the_next_process_too(open_tier):
    tier = open_tier()
    assert write(tier, 1, 2, 3) == [True] * 3
    tier.close()
    again = open_tier()
    assert again.names() == [key_digest(key_of(n)) for n in (1, 2, 3)]
    found = read(again, 3, 1, 4)
    assert found.pop(4) is None
    assert all(np.array_equal(found[n], content_of(n)) for n in (1, 3))
    again.close()
    assert open_tier().names() == [key_digest(key_of(n)) for n in (2, 3, 1)]  # by last use


def test_operations_take_effect_in_their_order(open_tier):
    tier = open_tier()
    tier.write(key_of(1), lambda: content_of(1))
    tier.read(key_of(1), 1)
    tier.delete(key_digest(key_of(1)))
    tier.read(key_of(1), 2)
    tier.write(key_of(1), lambda: content_of(1))
    tier.read(key_of(1), 3)
    written, first, second, _, third = collect(tier, 5)
    assert written == Written(key_of(1), True)
    assert first.content is not None and second.content is None and third.content is not None


@pytest.mark.parametrize("damage", ["cut short", "empty", "one bit", "longer", "another's", "gone"])
def test_a_damaged_file_is_a_missing_one(open_tier, tmp_path, damage):
    tier = open_tier()
    write(tier, 1, 2)
    path = path_of(tmp_path, 1)
    data = bytearray(path.read_bytes())
    assert len(data) <= file_bytes(BLOCK_BYTES, 16)
    match damage:
        case "cut short":
            path.write_bytes(data[:-100])
        case "empty":
            path.write_bytes(b"")
        case "one bit":
            data[len(data) // 2] ^= 4
            path.write_bytes(data)
        case "longer":
            path.write_bytes(data + b"x")
        case "another's":
            path.write_bytes(path_of(tmp_path, 2).read_bytes())
        case "gone":
            path.unlink()
    tier.read(key_of(1), slot=1)
    assert collect(tier, 1) == [Fetched(1, None, is_bad=True)]
    assert np.array_equal(read(tier, 2)[2], content_of(2))
    assert write(tier, 1) == [True] and np.array_equal(read(tier, 1)[1], content_of(1))


def test_any_flipped_byte_is_seen(open_tier, tmp_path):
    tier = open_tier()
    write(tier, 1)
    path = path_of(tmp_path, 1)
    good = path.read_bytes()
    for at in [*range(0, 120), *range(120, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        assert read(tier, 1)[1] is None, f"byte {at}"


class Faulty(FileIO):
    """Fails where told to: at `write`, midway through it, at `rename`, `read` or `delete`."""

    def __init__(self, where, code=errno.EIO, error=None):
        self.where = where
        self.error = error or OSError(code, "injected")

    def _fail(self, where):
        if where == self.where:
            raise self.error

    def write(self, path, parts):
        self._fail("write")
        if self.where == "midway":
            super().write(path, [bytes(part)[:50] for part in parts])
            self._fail("midway")
        super().write(path, parts)

    def rename(self, source, target):
        self._fail("rename")
        super().rename(source, target)

    def read(self, path):
        self._fail("read")
        return super().read(path)

    def delete(self, path):
        self._fail("delete")
        super().delete(path)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("where", ["write", "midway", "rename"])
def test_a_failed_write_leaves_nothing_behind(open_tier, tmp_path, where, code):
    faulty = Faulty(where, code)
    tier = open_tier(io=faulty)
    assert write(tier, 1) == [False]
    assert read(tier, 1) == {1: None}
    assert not list((tmp_path / "cache" / NAMESPACE).iterdir())
    faulty.where = None  # the disk recovers
    assert write(tier, 1) == [True] and np.array_equal(read(tier, 1)[1], content_of(1))


@pytest.mark.parametrize("where", ["read", "delete"])
def test_other_failures_are_misses_or_nothing(open_tier, where):
    faulty = Faulty(None, errno.EIO)
    tier = open_tier(io=faulty)
    write(tier, 1)
    faulty.where = where
    tier.delete(key_digest(key_of(2)))
    tier.read(key_of(1), slot=1)
    (fetched,) = collect(tier, 1)
    assert (fetched.content is None) == (where == "read")
    assert not fetched.is_bad, "the file is good, the disk has failed"
    faulty.where = None
    assert np.array_equal(read(tier, 1)[1], content_of(1))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("the device is gone")])
@pytest.mark.parametrize("where", ["content", "write", "rename", "read", "delete"])
def test_whatever_an_operation_fails_with_the_next_one_is_done(open_tier, where, error):
    faulty = Faulty(None, error=error)
    tier = open_tier(io=faulty)
    assert write(tier, 1) == [True]

    def content():
        faulty._fail("content")
        return content_of(2)

    faulty.where = where
    tier.delete(key_digest(key_of(3)))
    tier.write(key_of(2), content)
    tier.read(key_of(1), slot=1)
    written, fetched = collect(tier, 2)
    assert written == Written(key_of(2), where == "read")
    assert (fetched.content is None) == (where == "read") and not fetched.is_bad
    faulty.where = None
    assert write(tier, 2) == [True] and np.array_equal(read(tier, 2)[2], content_of(2))


def test_what_can_not_be_deleted_keeps_its_room_until_it_can(open_tier, tmp_path):
    """Files of other weights too: the disk never holds more than was allowed."""
    stale = tmp_path / "cache" / OTHER / f"{'0' * 64}.kv"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of other weights")
    faulty = Faulty("delete")
    tier = open_tier(io=faulty)
    assert write(tier, 1, 2) == [False, False]
    assert [path for path in (tmp_path / "cache").rglob("*.*")] == [stale]
    faulty.where = None
    assert write(tier, 1) == [True] and not stale.exists()
    faulty.where = "delete"
    tier.delete(key_digest(key_of(1)))
    assert write(tier, 2, 3) == [False, False]
    assert tier.names() == [key_digest(key_of(1))]
    faulty.where = None
    assert write(tier, 2) == [True] and tier.names() == [key_digest(key_of(2))]


def test_what_a_crash_left_half_written_is_cleared_and_never_read(open_tier, tmp_path):
    directory = tmp_path / "cache" / NAMESPACE
    directory.mkdir(parents=True)
    (directory / "1.7.partial").write_bytes(b"half")
    foreign = [directory / name for name in ("notes.txt", f"{'z' * 64}.kv", f"{'0' * 64}.txt")]
    for path in foreign:
        path.write_text("not ours")
    tier = open_tier()
    assert tier.names() == []
    read(tier, 1)
    assert sorted(directory.iterdir()) == sorted(foreign)


def test_only_blocks_are_deleted_from_directories_of_others(open_tier, tmp_path):
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    stays = [
        cache / "thirty-two-characters-long-name!" / "a.kv",
        cache / ("A" * 32) / "a.kv",  # digits are written in lower case
        cache / ("a" * 32) / "precious.txt",
        cache / ("a" * 32) / "directory.kv" / "a.kv",
        cache / ("0" * 31) / "a.kv",
        elsewhere / "a.txt",
    ]
    goes = [
        cache / ("a" * 32) / f"{'1' * 64}.kv",
        cache / ("b" * 32) / f"{'2' * 64}.kv",
        cache / ("b" * 32) / "7.1.partial",
    ]
    for path in stays + goes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content")
    (cache / ("b" * 32) / "link.kv").symlink_to(elsewhere / "a.txt")
    (cache / ("c" * 32)).write_text("a file")
    tier = open_tier()
    read(tier, 1)
    assert all(path.exists() for path in stays) and not any(path.exists() for path in goes)
    assert (cache / ("b" * 32) / "link.kv").is_symlink() and (cache / ("c" * 32)).exists()
    (cache / ("b" * 32) / "link.kv").unlink()
    tier.forget(NAMESPACE)
    read(tier, 1)
    assert not (cache / ("b" * 32)).exists(), "it was empty"


class Stuck(FileIO):
    """A disk that stands still until told to go on."""

    def __init__(self):
        self.go_on = threading.Event()

    def write(self, path, parts):
        assert self.go_on.wait(30)
        super().write(path, parts)

    def read(self, path):
        assert self.go_on.wait(30)
        return super().read(path)


def test_a_disk_that_stands_still_is_not_waited_for(open_tier):
    """Writes beyond the queue fail at once, reads when patience ends; late answers are dropped."""
    disk = Stuck()
    tier = open_tier(io=disk, max_pending=3, patience_s=0.2)
    start = time.monotonic()
    for number in range(10):
        tier.write(key_of(number), lambda number=number: content_of(number))
    tier.read(key_of(0), slot=5)
    assert time.monotonic() - start < 5
    events = collect(tier, 8)
    assert [event.ok for event in events[:7]] == [False] * 7
    assert events[7] == Fetched(5, None, is_bad=False)
    tier.read(key_of(0), slot=5)  # the same slot again, for something else
    disk.go_on.set()
    late = collect(tier, 4)
    assert sum(isinstance(event, Fetched) for event in late) == 1
    assert [event.ok for event in late if isinstance(event, Written)] == [True] * 3


def test_a_disk_that_stands_still_is_waited_for_once(open_tier):
    """Others who ask meanwhile are told at once, and are served again when it goes on."""
    disk = Stuck()
    disk.go_on.set()
    tier = open_tier(io=disk)
    write(tier, 1, 2)
    disk.go_on.clear()
    tier._patience_s = 0.1
    assert read(tier, 1, 2) == {1: None, 2: None}
    tier._patience_s = 1000.0
    for _ in range(3):
        tier.read(key_of(1), slot=1)
        assert collect(tier, 1) == [Fetched(1, None, is_bad=False)]
    disk.go_on.set()
    write(tier, 3)  # after the reads that were given up
    tier.poll()
    found = read(tier, 1, 2)
    assert all(np.array_equal(found[number], content_of(number)) for number in (1, 2))


class Unhurried(FileIO):
    """A disk that takes a while for each read."""

    def read(self, path):
        time.sleep(0.1)
        return super().read(path)


def test_a_read_does_not_pay_for_the_ones_before_it(open_tier):
    numbers = range(12)
    tier = open_tier(io=Unhurried(), patience_s=0.6)
    assert all(write(tier, *numbers))
    found = read(tier, *numbers)
    assert all(np.array_equal(found[number], content_of(number)) for number in numbers)


def test_other_weights_find_nothing_and_clear_the_directory(open_tier, tmp_path):
    """BM26 for files."""
    tier = open_tier()
    write(tier, 1, 2)
    tier.forget(OTHER)
    assert tier.names() == [] and read(tier, 1) == {1: None}
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [OTHER]
    assert write(tier, 1) == [True]
    tier.close()
    third = open_tier("1" * 32)
    read(third, 1)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["1" * 32]


def test_forgetting_without_other_weights_empties_the_directory(open_tier):
    tier = open_tier()
    write(tier, 1, 2)
    tier.forget(NAMESPACE)
    assert read(tier, 1) == {1: None} and tier.names() == []
    assert write(tier, 1) == [True]


def test_a_directory_that_can_not_be_made_or_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match="disk_cache_path .* can be written, got .*file'"):
        DiskTier(tmp_path / "file", NAMESPACE, block_bytes=BLOCK_BYTES)
    (tmp_path / NAMESPACE).symlink_to("/proc/self")  # where nobody can write, root neither
    with pytest.raises(ValueError, match="disk_cache_path .* can be written, got "):
        DiskTier(tmp_path, NAMESPACE, block_bytes=BLOCK_BYTES)


def test_closing_finishes_the_writes_that_have_begun(open_tier):
    tier = open_tier()
    for number in range(20):
        tier.write(key_of(number), lambda number=number: content_of(number))
    tier.close()
    assert len(open_tier().names()) == 20

"""The books of the disk: what is written and read, what makes room, and what comes too late."""

import pytest

from scheduler.prefix_index import key_digest
from scheduler.transfers import FileDelete, FileRead, FileWrite
from tests.scheduler.test_tiers import Books


def write(books, *names, ok=True):
    """Content passes through host memory to the disk."""
    for name in names:
        operations = books.drop(name).files
        for operation in operations:
            if isinstance(operation, FileWrite):
                books.tiers.tell_written(key_digest(operation.key), ok=ok)


def test_what_host_memory_drops_is_written_once_and_read_again():
    books = Books(host=1, disk=4)
    write(books, 1, 2, 3)
    assert books.held() == [3] and books.tiers.num_disk_used == 2
    (coming,) = books.tiers.prefetch([books.key(1)])
    assert coming.reading and books.tiers.find([books.key(1)]) == []
    operations = books.tiers.take().files
    assert operations == [FileWrite(books.key(3), 0), FileRead(books.key(1), 0)]
    assert books.tiers.prefetch([books.key(1)]) == [coming], "it is read for both"
    books.tiers.tell_read(coming.slot, ok=True)
    assert books.held() == [1] and not coming.reading
    assert not any(isinstance(op, FileWrite) and op.key == books.key(1) for op in
                   books.drop(2).files), "its file is still there"  # fmt: skip
    books.tiers.check([])


def read_under_way():
    """The first of two blocks is on its way back from its file."""
    books = Books(host=1, disk=4)
    write(books, 1, 2)
    (coming,) = books.tiers.prefetch([books.key(1)])
    books.tiers.take()
    return books, coming


def test_a_file_that_can_not_be_read_is_as_if_it_had_never_been():
    books, coming = read_under_way()
    books.tiers.tell_read(coming.slot, ok=False)
    assert not coming.reading and books.held() == []
    assert books.tiers.take().files == [FileDelete(key_digest(books.key(1)))]
    assert books.tiers.prefetch([books.key(1)]) == []
    assert books.tiers.num_host_available == 1
    books.tiers.check([])


def test_a_file_that_was_read_too_late_is_there_for_the_next_one():
    """A miss for whoever has waited for it; the file stays, and is not written a second time."""
    books, coming = read_under_way()
    books.tiers.tell_read(coming.slot, ok=False, keep=True)
    assert books.held() == [] and books.tiers.num_host_available == 1
    assert not books.tiers.take().files and books.tiers.counts.failed_reads == 1
    assert not any(isinstance(op, FileWrite) and op.key == books.key(1) for op in
                   [*books.drop(1).files, *books.drop(2).files])  # fmt: skip
    books.tiers.check([])
    (again,) = books.tiers.prefetch([books.key(1)])
    assert books.tiers.take().files[-1:] == [FileRead(books.key(1), again.slot)]
    books.tiers.tell_read(again.slot, ok=True)
    assert books.held() == [1]
    books.tiers.check([])


def test_forgotten_while_a_read_was_late_means_forgotten():
    books, coming = read_under_way()
    books.tiers.forget()
    books.tiers.tell_read(coming.slot, ok=False, keep=True)
    assert books.tiers.num_disk_used == 0 and books.tiers.num_host_available == 1
    assert books.tiers.prefetch([books.key(1)]) == []
    books.tiers.check([])


def test_a_file_counts_only_once_it_is_written():
    books = Books(host=1, disk=4)
    books.drop(1)
    books.drop(2)
    assert books.tiers.prefetch([books.key(1)]) == []
    books.tiers.tell_written(key_digest(books.key(1)), ok=False)
    assert books.tiers.num_disk_used == 0
    assert books.tiers.prefetch([books.key(1)]) == []


def test_the_disk_holds_no_more_than_it_may():
    books = Books(host=1, disk=2)
    write(books, 1, 2, 3)
    books.tiers.prefetch([books.key(1)])  # a use: 2 is the oldest now
    (read,) = [op for op in books.tiers.take().files if isinstance(op, FileRead)]
    books.tiers.tell_read(read.slot, ok=True)
    books.tiers.tell_written(key_digest(books.key(3)), ok=True)
    assert books.tiers.num_disk_used == 2
    books.tiers.check([])


def test_what_the_disk_is_too_slow_for_costs_no_file_its_place():
    """However late it reports: the books know how many writes wait, and evict for no other."""
    books = Books(host=1, disk=20)
    write(books, *range(21))
    files = [op for name in range(21, 50) for op in books.drop(name).files]
    most = books.tiers.max_pending_writes
    written = [op.key for op in files if isinstance(op, FileWrite)]
    assert written == [books.key(name) for name in range(20, 20 + most)]
    assert sum(isinstance(op, FileDelete) for op in files) == most == books.tiers.num_pending_writes
    assert books.tiers.num_disk_used == 20
    assert books.tiers.counts.failed_spills == 50 - 21 - most
    books.tiers.check([])
    for key in written:
        books.tiers.tell_written(key_digest(key), ok=True)
    assert books.tiers.num_pending_writes == 0
    assert [type(op) for op in books.drop(50).files] == [FileDelete, FileWrite]


def test_a_disk_full_of_files_that_are_being_written_takes_no_more():
    books = Books(host=1, disk=2)
    for name in range(5):
        books.drop(name)
    assert books.tiers.num_pending_writes == books.tiers.num_disk_used == 2
    assert books.tiers.counts.failed_spills == 2 and books.tiers.counts.disk_evictions == 0


@pytest.mark.parametrize("ok", [True, False])
def test_the_report_on_a_file_of_other_weights_is_none_on_the_new_one(ok):
    """BM26: the same tokens have the same name, and the old write ends after the new one began."""
    books = Books(host=1, disk=4)
    name = key_digest(books.key(1))
    books.drop(1)
    books.drop(2)  # 1 is being written
    books.drop(1)  # 2 is about to be, when
    books.tiers.forget()
    assert books.tiers.num_pending_writes == 2
    books.tiers.take()
    books.drop(1)
    books.drop(2)
    assert books.tiers.num_disk_used == 1 and books.tiers.num_pending_writes == 3
    books.tiers.tell_written(name, ok=ok)
    assert books.tiers.num_disk_used == 1 and books.tiers.prefetch([books.key(1)]) == []
    books.tiers.check([])
    books.tiers.tell_written(key_digest(books.key(2)), ok=True)
    books.tiers.tell_written(name, ok=True)
    assert len(books.tiers.prefetch([books.key(1)])) == 1
    books.tiers.check([])


def test_writes_that_were_forgotten_before_they_began_are_not_waited_for():
    books = Books(host=1, disk=4)
    books.drop(1)
    (block,) = books.fill(2)
    books.pool.index.discard(block)  # 1 is to be written, but the engine has not been told
    assert books.tiers.num_pending_writes == 1
    books.tiers.forget()
    assert not any(isinstance(op, FileWrite) for op in books.tiers.take().files)
    assert books.tiers.num_pending_writes == 0
    books.tiers.check([])


def test_files_of_an_earlier_run_are_found_and_surplus_ones_deleted():
    books = Books(host=2, disk=2)
    names = [key_digest(books.key(name)) for name in (1, 2, 3)]
    books.tiers.adopt(names)
    assert books.tiers.take().files == [FileDelete(names[0])]
    assert books.tiers.prefetch([books.key(1)]) == []
    assert len(books.tiers.prefetch([books.key(3)])) == 1

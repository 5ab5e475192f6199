"""What was there before tokens are generated is not collected meanwhile, and is afterwards."""

import gc
import weakref

import pytest

from pagedjax.heap import settled_heap


class Knot:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def test_only_what_is_made_inside_is_collected_inside():
    gc.collect()
    old = weakref.ref(Knot())
    with settled_heap():
        new = weakref.ref(Knot())
        gc.collect()
        assert old() is not None and new() is None
    gc.collect()
    assert old() is None


def test_overlapping_blocks_end_with_the_last():
    thresholds = gc.get_threshold()
    first, second = settled_heap(), settled_heap()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_freeze_count() > 0 and gc.get_threshold() != thresholds
    second.__exit__(None, None, None)
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == thresholds


def test_an_error_does_not_leave_the_heap_settled():
    thresholds = gc.get_threshold()
    with pytest.raises(KeyError), settled_heap():
        raise KeyError
    assert gc.get_freeze_count() == 0 and gc.get_threshold() == thresholds

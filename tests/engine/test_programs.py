"""How programs are brought into being: one thread lowers, others compile."""

import contextlib
import gc
import threading

import jax
import jax.numpy as jnp
import pytest

from pagedjax.engine.program_store import Program
from pagedjax.engine.programs import build, report


class Recorded:
    """A jitted function's stand-in that says which thread lowers and which compiles."""

    def __init__(self, events, key, wait_for=None, fails=False):
        self.events, self.key, self.wait_for, self.fails = events, key, wait_for, fails
        self.compiling = threading.Event()

    def lower(self):
        if self.wait_for is not None:
            assert self.wait_for.compiling.wait(10), "nothing is compiled until all is lowered"
        if self.fails:
            raise ValueError("cannot be lowered")
        self.events.append(("lower", self.key, threading.get_ident()))
        return self

    def compile(self, options):
        self.compiling.set()
        self.events.append(("compile", self.key, threading.get_ident()))
        return f"code {self.key} {options}"


def recorded(*functions):
    return {
        f.key: Program(name=f.key, function=f, arguments=(), options={"for": f.key})
        for f in functions
    }


def test_the_first_program_is_compiled_while_the_second_is_lowered():
    events, told = [], []
    first = Recorded(events, "a")
    second = Recorded(events, "b", wait_for=first)
    built, times = build(recorded(first, second), progress=lambda *p: told.append(p))
    assert built == {"a": "code a {'for': 'a'}", "b": "code b {'for': 'b'}"}
    here = threading.get_ident()
    assert {who == here for what, _, who in events if what == "lower"} == {True}
    assert here not in {who for what, _, who in events if what == "compile"}
    assert [key for what, key, _ in events if what == "lower"] == ["a", "b"]
    assert told == [(1, 2), (2, 2)]
    assert (times.programs, times.kept) == (2, 0)
    assert times.wall_s >= times.lower_s > 0


class MeetsOthers(Recorded):
    """Is compiled only while as many others as it takes are."""

    def __init__(self, events, key, together):
        super().__init__(events, key)
        self.together = together

    def compile(self, options):
        self.together.wait(10)
        return super().compile(options)


def test_as_many_programs_are_compiled_at_a_time_as_there_are_cores(monkeypatch):
    monkeypatch.setattr("pagedjax.engine.programs.num_cores", lambda: 3)
    events, together = [], threading.Barrier(3)
    built, _ = build(recorded(*(MeetsOthers(events, key, together) for key in "abcdef")))
    assert set(built) == set("abcdef")
    assert len({who for what, _, who in events if what == "compile"}) == 3


class NotingStore:
    """Has nothing, and notes what it is to keep."""

    def __init__(self, events, *, brought=()):
        self.events, self.brought = events, brought

    def load(self, program):
        return None

    def compile(self, program, lowered):
        return lowered.compile(program.options), program.name not in self.brought

    def keep(self, program, code):
        self.events.append(("keep", program.name, code))

    def trim(self):
        self.events.append(("trim", None, None))


def test_programs_are_kept_when_all_are_lowered_but_for_those_that_came_from_a_cache():
    events = []
    first = Recorded(events, "a")
    others = [Recorded(events, key, wait_for=first) for key in "bc"]
    built, _ = build(recorded(first, *others), store=NotingStore(events, brought="b"))
    kinds = [what for what, _, _ in events]
    last_lowering = len(kinds) - kinds[::-1].index("lower") - 1
    assert last_lowering < kinds.index("keep")
    assert sorted(e[1:] for e in events if e[0] == "keep") == [(k, built[k]) for k in "ac"]
    assert kinds[-1] == "trim"


def test_an_error_of_one_program_reaches_the_caller():
    events = []
    with pytest.raises(ValueError, match="cannot be lowered"):
        build(recorded(Recorded(events, "a"), Recorded(events, "b", fails=True)))


class WatchesGarbage(Recorded):
    """Notes whether the garbage collector is on while it is lowered."""

    def lower(self):
        self.events.append(gc.isenabled())
        return super().lower()


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_rests_while_programs_are_lowered_and_only_then(fails):
    assert gc.isenabled()
    events = []
    with pytest.raises(ValueError) if fails else contextlib.nullcontext():
        build(recorded(WatchesGarbage(events, "a", fails=fails)))
    assert events[0] is False
    assert gc.isenabled()
    gc.disable()  # a caller who has turned it off finds it off
    try:
        build(recorded(Recorded([], "a")))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_other_things_are_done_beside_and_their_errors_told():
    done = []
    built, _ = build(recorded(Recorded([], "a")), others=[lambda: done.append(1)])
    assert done == [1]
    assert len(built) == 1
    with pytest.raises(ZeroDivisionError):
        build({}, others=[lambda: 1 // 0])


def test_the_log_says_where_the_time_went(caplog):
    argument = jax.ShapeDtypeStruct((3,), jnp.float32)
    program = Program(
        name="p", function=jax.jit(lambda x: x + 1), arguments=(argument,), options=None
    )
    _, times = build({0: program})
    with caplog.at_level("INFO", "pagedjax.engine.programs"):
        report("warm-up", times)
    assert f"warm-up: 1 programs in {times.wall_s:.1f} s" in caplog.text
    assert f"lowered in {times.lower_s:.1f} s" in caplog.text

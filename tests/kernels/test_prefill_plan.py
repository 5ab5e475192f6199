"""The work list of the prefill kernels: every row once, longest first, the same on both sides."""

import jax
import numpy as np
import pytest

from pallas_kernels import prefill_plan as plan


def random_batch(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 300, rng.integers(1, 9))
    rows[rng.random(rows.size) < 0.3] = 0
    rows[0] = rng.integers(0, 4)
    lens = np.where(rng.random(rows.size) < 0.2, 0, rows + rng.integers(0, 500, rows.size))
    start = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    return lens.astype(np.int32), start, int(start[-1] + rng.integers(0, 200))


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_is_in_exactly_one_tile_of_its_own_sequence(seed, alignment):
    lens, start, tokens = random_batch(seed)
    work = plan.plan_prefill(lens, start, tokens=tokens, tile_rows=128, alignment=alignment)
    owner = np.full(tokens, -1)
    for tile in work[: work[0, plan.COUNT]]:
        rows = slice(tile[plan.LOW], tile[plan.HIGH])
        assert tile[plan.ROW] <= tile[plan.LOW] < tile[plan.HIGH] <= tile[plan.ROW] + 128
        assert tile[plan.ROW] % alignment == 0
        assert (owner[rows] == -1).all()
        padding = tile[plan.LOW] >= start[-1]
        seq = len(lens) if padding else tile[plan.SEQ]
        owner[rows] = seq
        assert tile[plan.SEQ_LEN] == (0 if padding else lens[seq])
        if not padding and lens[seq]:
            last = tile[plan.HIGH] - 1 + tile[plan.OFFSET]
            assert last == lens[seq] - 1 - (start[seq + 1] - tile[plan.HIGH])
    want = np.searchsorted(start[1:], np.arange(tokens), side="right")
    np.testing.assert_array_equal(owner, want)


def test_tiles_are_ordered_by_falling_work():
    lens, start, tokens = np.array([900, 300, 2000], np.int32), np.array([0, 600, 900, 1000]), 1040
    work = plan.plan_prefill(lens, start.astype(np.int32), tokens=tokens, tile_rows=128)
    used = work[: work[0, plan.COUNT]]
    visible = np.maximum(used[:, plan.HIGH] + used[:, plan.OFFSET], 0)
    assert (np.diff(visible) <= 0).all()
    assert visible[0] == 2000
    assert visible[-1] == 0  # the padding rows come last


@pytest.mark.parametrize("seed", range(4))
def test_the_traced_list_equals_the_one_made_on_the_host(seed):
    lens, start, tokens = random_batch(seed)
    host = plan.plan_prefill(lens, start, tokens=tokens, tile_rows=128)
    traced = jax.jit(
        lambda lens, start: plan.plan_prefill_traced(lens, start, tokens=tokens, tile_rows=128)
    )(lens, start)
    np.testing.assert_array_equal(host, np.asarray(traced))
    assert host.shape == (plan.num_tiles(tokens, len(lens), 128, plan.ROW_ALIGNMENT), plan.COLUMNS)


def test_the_list_is_long_enough_for_the_worst_split():
    # One row each, none aligned: every sequence needs a tile of its own.
    seqs = 37
    start = np.arange(seqs + 1, dtype=np.int32)
    work = plan.plan_prefill(np.ones(seqs, np.int32), start, tokens=seqs + 3, tile_rows=128)
    assert work[0, plan.COUNT] == seqs + 1 <= len(work)


def test_without_causality_every_row_sees_all_positions_of_its_sequence():
    lens, start = np.array([256, 0, 128, 384], np.int32), np.array([0, 40, 80, 120, 160], np.int32)
    work = plan.plan_prefill(lens, start, tokens=170, tile_rows=32, causal=False)
    for tile in work[: work[0, plan.COUNT]]:
        first, last = tile[plan.LOW] + tile[plan.OFFSET], tile[plan.HIGH] - 1 + tile[plan.OFFSET]
        assert first >= tile[plan.SEQ_LEN] - 1
        assert last < tile[plan.SEQ_LEN] + 40  # no further than its rows reach


def test_tiles_without_a_context_come_last_even_if_every_row_sees_all():
    """The kernels write their zeros where the queries of a later tile might be already."""
    lens, start = np.asarray([128, 0, 256], np.int32), np.asarray([0, 8, 408, 500], np.int32)
    work = plan.plan_prefill(lens, start, tokens=600, tile_rows=128, causal=False)
    with_context = work[: work[0, plan.COUNT], plan.SEQ_LEN] > 0
    assert with_context.tolist() == [True, True] + [False] * 5

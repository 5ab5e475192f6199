"""The division of decode work among thread blocks."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_plan
from pallas_kernels.decode_plan import Column, plan_decode, visible_tiles


def test_the_example_of_a_plan_is_right():
    tested = doctest.testmod(decode_plan)
    assert tested.attempted > 0 and tested.failed == 0


def walk(lens, plan, tile, window):
    """Tiles of every part, in order, and the parts of every sequence: a slow second computation."""
    tiles = visible_tiles(lens, tile, window)
    line = [(seq, i) for seq in range(len(lens)) for i in range(tiles[seq])]
    parts_of, start = {}, 0
    for part, row in enumerate(plan.parts):
        mine = line[start : start + row[Column.TILES]]
        start += len(mine)
        if mine:
            assert mine[0] == (row[Column.SEQ], row[Column.TILE])
            assert tuple(plan.line[row[Column.PLACE]]) == (row[Column.SEQ], row[Column.SEQ_LEN])
        touched = sorted({seq for seq, _ in mine})
        places = row[Column.PLACE] + np.arange(row[Column.SEGMENTS])
        assert plan.line[places].tolist() == [[seq, lens[seq]] for seq in touched]
        for seq in touched:
            parts_of.setdefault(seq, []).append(part)
    assert start == len(line)
    return parts_of


def random_lens(rng, most, count):
    """Lengths of sequences, a quarter of them padding."""
    return np.where(rng.random(count) < 0.25, 0, rng.integers(1, most, count)).astype(np.int32)


@pytest.mark.parametrize("seed", range(40))
def test_every_tile_belongs_to_one_part_and_every_shared_context_is_merged_once(seed):
    rng = np.random.default_rng(seed)
    lens = random_lens(rng, 700, rng.integers(1, 20))
    tile, parts = int(rng.choice([16, 64])), int(rng.integers(1, 60))
    window = [None, 1, 100][seed % 3]
    plan = plan_decode(lens, tile=tile, parts=parts, window=window)
    assert plan.parts.shape == (parts, len(Column)) and plan.parts.dtype == np.int32
    parts_of = walk(lens, plan, tile, window)
    merges = {row[Column.MERGE_SEQ]: row for row in plan.parts if row[Column.MERGE_LATER]}
    for seq, mine in parts_of.items():
        assert mine == list(range(mine[0], mine[-1] + 1))
        if len(mine) > 1:
            row = merges.pop(seq)
            assert row[Column.MERGE_PART] == mine[0]
            assert row[Column.MERGE_LATER] == len(mine) - 1
            assert plan.parts[mine[0], Column.LATER_PARTS] == len(mine) - 1
            assert (plan.parts[mine[1:], Column.FIRST_PART] == mine[0]).all()
    assert not merges
    rows = min(parts, len(lens))
    assert not plan.parts[rows:, Column.MERGE_LATER].any()


@pytest.mark.parametrize(("seqs", "parts"), [(1, 3), (7, 33), (40, 16), (256, 16)])
def test_padding_takes_no_tile_and_every_part_zeroes_its_share(seqs, parts):
    some = random_lens(np.random.default_rng(seqs), 300, seqs)
    for lens in (some, np.zeros_like(some), np.maximum(some, 1)):
        plan = plan_decode(lens, tile=64, parts=parts)
        assert plan.parts[:, Column.TILES].sum() == visible_tiles(lens, 64, None).sum()
        assert plan.parts[:, Column.TILES].sum() == np.ceil(lens / 64).sum()
        counts = plan.parts[:, Column.EMPTIES]
        assert counts.max() - counts.min() <= 1
        zeroed = [
            plan.line[row[Column.EMPTY_PLACE] + i, 0]
            for row in plan.parts
            for i in range(row[Column.EMPTIES])
        ]
        assert sorted(zeroed) == np.flatnonzero(lens == 0).tolist()


def test_parts_differ_by_one_tile_at_most():
    lens = np.random.default_rng(0).lognormal(7.0, 1.0, 64).astype(np.int32)
    lengths = plan_decode(lens, tile=64, parts=33).parts[:, Column.TILES]
    assert lengths.max() - lengths.min() <= 1


def test_a_plan_in_the_program_equals_the_plan_on_the_host():
    for lens in ([0, 1, 64, 65, 0, 4000, 17, 0], [0, 0], [300]):
        for parts in (1, 3, 40, 200):
            host = plan_decode(np.array(lens, np.int32), tile=64, parts=parts, window=500)
            traced = plan_decode(jnp.array(lens, jnp.int32), tile=64, parts=parts, window=500)
            np.testing.assert_array_equal(traced.parts, host.parts)
            np.testing.assert_array_equal(traced.line, host.line)


def test_a_million_tokens_in_many_sequences_do_not_overflow():
    lens = np.full((256,), 1_000_000, np.int32)
    plan = plan_decode(lens, tile=16, parts=264)
    assert plan.parts[:, Column.TILES].sum() == 256 * 62_500
    assert (plan.parts >= 0).all()


def test_layers_that_plan_alike_plan_once():
    """XLA merges equal plans of one program, so no layer needs to be handed a plan."""

    def layers(lens, count):
        return sum(
            jnp.sum(plan_decode(lens, tile=64, parts=33).parts) * (layer + 1)
            for layer in range(count)
        )

    lens = jax.ShapeDtypeStruct((32,), jnp.int32)
    sizes = [
        jax.jit(layers, static_argnums=1).lower(lens, count).compile().as_text().count("fusion(")
        for count in (1, 8)
    ]
    assert sizes[1] <= sizes[0] + 2

"""The tables on the device after the changes of each step, against the plans' own tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax import SamplingParams
from pagedjax.engine.batch import pack_inputs
from pagedjax.engine.block_tables import TableMirror, edit_tables, padded_edits
from pagedjax.engine.buckets import Bucket
from pagedjax.engine.step_inputs import StepLayout
from scheduler import Request, Scheduler, SchedulerConfig, StopRules
from tests.support.tiny_engines import random_prompts, serve, tiny_engine, tokens_of

apply = jax.jit(edit_tables)


def follow(scheduler, mirror, tables, steps):
    """Run some steps one ahead; yields what each plan wants and what the device has."""
    config = scheduler.config
    size = config.max_num_seqs * config.max_blocks_per_seq
    previous = None
    for _ in range(steps):
        plan = scheduler.schedule()
        if plan is not None:
            changes = mirror.changes(plan)
            tables = apply(tables, jnp.asarray(padded_edits(changes.edits, size)))
            yield plan, np.asarray(tables)[changes.rows], changes
        if previous is not None:
            scheduler.update(previous, np.zeros(previous.num_samples, np.int32))
        previous = plan


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    num_blocks=st.integers(8, 30),
    caching=st.booleans(),
)
def test_a_step_finds_its_tables_whatever_came_and_went(lengths, num_blocks, caching):
    """Sequences that grow, end, are preempted and come back, in rows that are used again."""
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=16, max_num_seqs=4, max_num_batched_tokens=48,
        max_model_len=112, prefix_caching=caching,
    )  # fmt: skip
    scheduler = Scheduler(config)
    for index, (prompt, output) in enumerate(lengths):
        stop = StopRules(max_tokens=output)
        prompt = np.full(min(prompt, scheduler.max_seq_len - 1), index % 3, np.int32)
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, stop=stop))
    width = config.max_blocks_per_seq
    mirror = TableMirror(config.max_num_seqs, width, 16)
    tables = jnp.zeros((config.max_num_seqs, width), jnp.int32)
    for plan, found, changes in follow(scheduler, mirror, tables, 200):
        assert len(set(changes.rows.tolist())) == len(plan.seqs)
        for row, length in enumerate(plan.seq_lens()):
            used = -(-length // 16)
            assert (found[row, :used] == plan.block_tables[row, :used]).all()


@pytest.mark.parametrize("budget", [4, 48])
def test_the_device_works_out_the_inputs_that_the_plan_names(budget):
    """Positions, slots, lengths and fed tokens; with a budget of 4 also decode buckets."""
    config = SchedulerConfig(
        num_blocks=30, block_size=16, max_num_seqs=4, max_num_batched_tokens=budget,
        max_model_len=112,
    )  # fmt: skip
    scheduler = Scheduler(config)
    for index, length in enumerate((5, 40, 16, 33, 1)):
        prompt = np.arange(100 * index, 100 * index + length, dtype=np.int32)
        stop = StopRules(max_tokens=9)
        scheduler.add(Request(request_id=str(index), prompt_token_ids=prompt, stop=stop))
    mirror = TableMirror(4, config.max_blocks_per_seq, 16)
    tables = jnp.zeros((4, config.max_blocks_per_seq), jnp.int32)
    seen = set()
    for plan, wanted, changes in follow(scheduler, mirror, tables, 60):
        num, seqs = plan.num_tokens, len(plan.seqs)
        decode = num == seqs
        layout = StepLayout(Bucket(4 if decode else 64, 4, decode), 16)
        seen.add(decode)
        nothing_new = changes._replace(edits=changes.edits[:0])
        at_rows = np.zeros((4, config.max_blocks_per_seq), np.int32)
        at_rows[changes.rows] = wanted
        inputs, after = layout.unpack(
            jnp.asarray(pack_inputs(plan, layout, nothing_new)), jnp.asarray(at_rows)
        )
        assert (np.asarray(after) == at_rows).all()
        assert inputs.token_ids[:num].tolist() == plan.token_ids.tolist()
        assert inputs.positions.tolist() == [*plan.positions(), *[0] * (layout.bucket.tokens - num)]
        slots = [*plan.slot_mapping(16), *[0] * (layout.bucket.tokens - num)]
        assert inputs.slot_mapping.tolist() == slots
        assert inputs.seq_lens.tolist() == [*plan.seq_lens(), *[0] * (4 - seqs)]
        assert (np.asarray(inputs.block_tables)[:seqs] == wanted).all()
        fed = np.full(layout.bucket.tokens, -1)
        fed[plan.query_start()[1:] - 1] = plan.feed_rows
        assert inputs.feed_rows.tolist() == fed.tolist()
        assert inputs.sample_rows[: plan.num_samples].tolist() == plan.sample_rows().tolist()
    assert seen == {True, False}


def test_a_decode_step_sends_only_new_blocks():
    config = SchedulerConfig(
        num_blocks=40, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
    )
    scheduler = Scheduler(config)
    for index in range(3):
        prompt = np.arange(20, dtype=np.int32)
        scheduler.add(
            Request(request_id=str(index), prompt_token_ids=prompt, stop=StopRules(max_tokens=99))
        )
    mirror = TableMirror(4, config.max_blocks_per_seq, 16)
    tables = jnp.zeros((4, config.max_blocks_per_seq), jnp.int32)
    steps = list(follow(scheduler, mirror, tables, 60))
    decodes = [c for plan, _, c in steps if plan.num_decodes == len(plan.seqs) == 3]
    assert len(decodes) > 40
    assert sum(len(c.edits) for c in decodes) <= 3 * (-(-len(decodes) // 16) + 1)


def test_more_changes_than_a_step_takes_are_made_before_it():
    """Prompts of 200 tokens bring 13 blocks each into tables of which a step edits two entries."""
    prompts = random_prompts([200, 200], seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    sizes = dict(max_model_len=256, num_blocks=64, max_num_batched_tokens=256)
    together = serve(tiny_engine(max_num_seqs=2, **sizes), prompts, params)
    alone = [serve(tiny_engine(max_num_seqs=1, **sizes), [prompt], params)[0] for prompt in prompts]
    assert tokens_of(together) == tokens_of(alone)

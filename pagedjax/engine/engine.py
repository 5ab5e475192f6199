"""The loop: the scheduler decides, the runner computes, requests get their tokens."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.engine.batch import pack_inputs
from pagedjax.engine.beam_search import BeamSearch, num_candidates
from pagedjax.engine.block_tables import TableMirror
from pagedjax.engine.compilation_cache import enable_compilation_cache
from pagedjax.engine.draws import plan_draws
from pagedjax.engine.in_flight import NOBODY, Done, InFlight, Members
from pagedjax.engine.kv_pool import blocks_that_fit, keeps_keys, kv_spec, value_dtype
from pagedjax.engine.kv_scales import KVScales, calibrate, default_sequences, scales_for
from pagedjax.engine.logprobs import HostSamples
from pagedjax.engine.lower_tiers import LowerTiers, open_lower_tiers
from pagedjax.engine.pace import Pace
from pagedjax.engine.penalties import SeenOwners
from pagedjax.engine.persistence import recalibrate, resize_pool
from pagedjax.engine.request_checks import check_request_id, checked_request
from pagedjax.engine.requests import Completion, LiveRequest
from pagedjax.engine.runner import ModelRunner
from pagedjax.engine.sampling_records import SamplingRecords
from pagedjax.engine.scheduler_options import scheduler_config
from pagedjax.engine.snapshot import restore_snapshot, save_snapshot
from pagedjax.engine.stats import EngineStats
from pagedjax.engine.step_memory import planned_step_bytes
from pagedjax.engine.telling import tell
from pagedjax.models.params import Params
from pagedjax.outputs import RequestOutput, Timings
from pagedjax.sampling_params import BeamSearchParams, SamplingParams
from pagedjax.tokenizer import TextStream, Tokenizer
from scheduler import MAX_PLANS_IN_FLIGHT, Request, Scheduler, StepPlan, StopRules
from scheduler.block_map import BlockMap, block_map

if TYPE_CHECKING:
    from pagedjax.loading import LoadedModel


class Engine:
    """Serves many requests at once on one device. Not thread-safe: one thread calls it.

    `step` launches a step while earlier ones run, so that the host plans while the device computes.
    The outputs it returns are deltas.

    Args:
        model: architecture, parameters and generation defaults.
        tokenizer: turns tokens into text; None leaves every text empty and refuses stop strings.
        config: options; what is left open in them is settled for the device.
        progress: called with (steps compiled, steps in all) during warm-up.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
    ):
        if config.compilation_cache:
            enable_compilation_cache()
        arch = model.arch
        table = model.params["embed.table"]
        device = next(iter(table.devices()))
        config = config.resolved(platform=device.platform, max_positions=arch.max_positions)
        num_blocks = blocks_that_fit(
            arch,
            config,
            dtype=table.dtype,
            device=device,
            step_bytes=lambda: planned_step_bytes(arch, config, dtype=table.dtype, device=device),
        )
        self.config = dataclasses.replace(config, num_blocks=num_blocks)
        self.arch = arch
        self.tokenizer = tokenizer
        self.generation = model.generation
        kv_scales, compressed = None, value_dtype(config.kv_cache_dtype)
        if compressed is not None:
            measured = model.kv_calibration or calibrate(
                arch,
                model.params,
                default_sequences(arch.vocab, tokenizer),
                max_len=config.max_model_len or arch.max_positions,
            )
            with_keys = not keeps_keys(config.kv_cache_dtype)
            kv_scales = scales_for(measured, compressed, with_keys=with_keys)
        self._records = SamplingRecords()
        self._live: dict[str, LiveRequest] = {}
        self._by_key: dict[str, tuple[LiveRequest, Completion]] = {}
        self._in_flight: deque[InFlight] = deque()
        self._members = NOBODY  # in the newest step
        self._pace = Pace() if config.ttft_target_s else None
        self._news: dict[str, LiveRequest] = {}  # an ordered set: requests with a delta to take
        self._seeds = random.Random(config.seed)
        self._serial = self._steps = self._prompt_tokens = self._generated_tokens = 0
        self._in_step = False
        self._lower: LowerTiers | None = None
        self._open(self.config, model.params, kv_scales, progress)

    def _open(
        self,
        config: EngineConfig,
        params: Params,
        kv_scales: Sequence[KVScales] | None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make scheduler, pool and steps for `config`, in place of those there may be."""
        if self._lower is not None:
            self._lower.close()
            self._lower = None  # its host memory goes before the new one's is pinned
        assert config.num_blocks
        arch, dtype = self.arch, params["embed.table"].dtype
        self.config = config
        self.kv_spec = kv_spec(arch, config, num_blocks=config.num_blocks, dtype=dtype)
        self._scheduler = Scheduler(scheduler_config(config, arch, self.kv_spec))
        sizes = self._scheduler.config
        self._runner = ModelRunner(
            arch,
            params,
            self.kv_spec,
            config,
            max_blocks_per_seq=sizes.max_blocks_per_seq,
            kv_scales=kv_scales,
        )
        self._tables = TableMirror(sizes.max_num_seqs, sizes.max_blocks_per_seq, sizes.block_size)
        self._seen = SeenOwners(sizes.max_num_seqs)
        self._in_flight.clear()
        self._blocks_peak = 0
        if config.warm_up:
            self._runner.warm_up(progress)
        self._lower = open_lower_tiers(config, arch, self.kv_spec, self._scheduler, self._runner)

    @property
    def max_model_len(self) -> int:
        """Longest sequence served, in tokens, prompt and output together."""
        return self._scheduler.max_seq_len

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to bring."""
        return bool(self._live or self._news)

    def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        stream: bool = True,
    ) -> None:
        """Queue a request; `step` brings its outputs.

        Args:
            request_id: the caller's name for it, free again once its last output has come.
            prompt: its text, only to be repeated in the outputs.
            prompt_token_ids: what the model reads.
            params: how to sample or search, and when to stop.
            priority: requests with a lower value are served earlier, and strictly lower ones take
                the places of running ones; of equal ones, the first to come is served first.
            stream: whether each step brings what is new, or the last one all there is.

        Raises:
            ValueError: the request can not be served; nothing has been queued.
        """
        check_request_id(request_id)
        search = params if isinstance(params, BeamSearchParams) else None
        eos_ids = () if params.ignore_eos else self.generation.eos_ids
        if isinstance(params, BeamSearchParams):
            params = params.sampling(num_candidates(params, len(eos_ids)))
        if request_id in self._live or request_id in self._news:
            raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        token_ids = checked_request(
            prompt_token_ids,
            params,
            priority=priority,
            vocab=self.arch.vocab,
            max_logprobs=self.config.max_logprobs,
            has_tokenizer=self.tokenizer is not None,
        )
        live = LiveRequest(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            params=params,
            priority=int(priority),
            timings=Timings(arrived=time.monotonic()),
            is_streamed=stream,
        )
        stop = StopRules(
            max_tokens=params.max_tokens or max(self.max_model_len, params.min_tokens),
            min_tokens=params.min_tokens,
            stop_token_ids=frozenset((*params.stop_token_ids, *eos_ids)),
        )
        seed = self._seeds.getrandbits(32) if params.seed is None else params.seed
        for index in range(params.n):
            self._add_sequence(live, index, seed=seed, stop=stop, is_beam=search is not None)
        if search is not None:
            live.beams = BeamSearch(
                [completion.key for completion in live.completions],
                search,
                eos_ids=eos_ids,
                max_tokens=min(search.max_tokens, self.max_model_len - len(token_ids)),
            )
        self._live[request_id] = live
        self._serial += 1
        self._prompt_tokens += len(token_ids)

    def _add_sequence(
        self, live: LiveRequest, index: int, *, seed: int, stop: StopRules, is_beam: bool
    ) -> None:
        """Queue one of a request's samples or beams."""
        params, prompt = live.params, live.prompt_token_ids
        record = self._records.add(
            params,
            seed=seed,
            sample_index=index,
            prompt_len=len(prompt),
            stop_ids=stop.stop_token_ids,
        )
        key = f"{self._serial}.{index}"
        try:
            self._scheduler.add(
                Request(
                    request_id=key,
                    prompt_token_ids=prompt,
                    stop=stop,
                    priority=live.priority,
                    prompt_logprobs=params.prompt_logprobs is not None and index == 0,
                    cache_salt=params.salt_pairs(),
                    sibling_of=f"{self._serial}.0" if index else None,
                    beam=is_beam,
                )
            )
        except ValueError:
            # Samples differ in nothing that is checked, so only the first can be refused.
            self._records.remove(record)
            raise
        text = None if self.tokenizer is None else TextStream.for_params(self.tokenizer, params)
        completion = Completion(key=key, index=index, record=record, text=text)
        live.completions.append(completion)
        self._by_key[key] = live, completion

    def abort(self, request_id: str) -> None:
        """End a request; the next `step` brings its last output. Unknown ids are ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        for completion in live.completions:
            if completion.finish_reason is None:
                self._scheduler.finish(completion.key)
                self._end(live, completion)
                completion.end("abort")
        self._note(live)

    def wait(self) -> None:
        """Sleep until `step` has nothing to wait for: what is added until then is in its plan."""
        if len(self._in_flight) == MAX_PLANS_IN_FLIGHT:
            self._in_flight[0].wait()
        elif self._in_flight and self._pace is not None:
            self._pace.sleep(self._in_flight[0])

    def step(self) -> list[RequestOutput]:
        """Launch a step, and take in the oldest of the steps that are on the device.

        Two steps are in flight, so that the device has the next one when it is done with the
        first. The tokens of the first are read, the step after the next is planned and launched,
        and only then are the requests told: what the device waits for comes first. With a target
        for first tokens it is left to the next call, if the device has enough to do (`Pace`).

        Returns:
            Deltas of the requests with news; of one that is not streamed, all of it at its end.

        Raises:
            RuntimeError: an earlier step failed or was interrupted; this engine cannot go on.
        """
        if self._in_step:
            raise RuntimeError("an earlier step was broken off and its tokens are lost")
        self._in_step = True
        done = self._read_oldest() if len(self._in_flight) == MAX_PLANS_IN_FLIGHT else None
        plan = None if done and self._pace and self._pace.has_time() else self._plan()
        if plan is not None:
            self._in_flight.append(self._launch(plan))
        elif done is None and self._in_flight:
            done = self._read_oldest()
        if done is not None:
            tell(self, done)
        self._blocks_peak = max(self._blocks_peak, self._scheduler.num_used_blocks)
        deltas = [live.take_delta() for live in self._news.values()]
        self._news.clear()
        self._in_step = False
        return [delta for delta in deltas if delta is not None]

    def swap_params(self, params: Params) -> None:
        """Serve with other parameters from the next step on; no copy, no compile.

        Prompts that come later share no keys and values with earlier ones. Requests that are
        running go on with the keys and values they have.

        Args:
            params: as `LoadedModel.params`: the same names, shapes and dtypes, on the same device.

        Raises:
            ValueError: a name, shape, dtype, device or memory differs, or an array was deleted;
                nothing has changed.
        """
        self._runner.swap_params(params)
        self._scheduler.reset_prefix_cache()

    def calibrate_kv(self, sequences: Sequence[Sequence[int]]) -> None:
        """Choose the scales of a compressed KV cache: `pagedjax.engine.persistence.recalibrate`."""
        recalibrate(self, sequences)

    def stats(self) -> EngineStats:
        """Figures as of now."""
        lower = 0 if self._lower is None else self._lower.mover.compiles_after_warmup
        return EngineStats.of(
            self._scheduler,
            self.kv_spec.block_bytes,
            blocks_peak=self._blocks_peak,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            compiles_after_warmup=self._runner.compiles_after_warmup + lower,
        )

    def resize_pool(self, num_blocks: int) -> None:
        """Give the KV pool another size: `pagedjax.engine.persistence.resize_pool`."""
        resize_pool(self, num_blocks)

    def snapshot(self, path: str | Path) -> None:
        """Write cache and running requests to a directory: see `save_snapshot`."""
        save_snapshot(self, path)

    def restore(self, path: str | Path) -> list[RequestOutput]:
        """Go on with the requests of a snapshot: see `restore_snapshot`."""
        return restore_snapshot(self, path)

    def block_map(self) -> BlockMap:
        """What every block of the pool is used for; takes milliseconds for a large pool."""
        return block_map(self._scheduler)

    def _plan(self) -> StepPlan | None:
        if self._lower is None:
            return self._scheduler.schedule()
        return self._lower.plan(self._scheduler, self._runner.update_pool)

    def _launch(self, plan: StepPlan) -> InFlight:
        now = time.monotonic()
        members = self._members = self._members_of(plan, now)
        bucket = self._runner.buckets.fit(tokens=plan.num_tokens, seqs=plan.num_seqs)
        layout = self._runner.layout(bucket)
        tables = self._tables.changes(plan)
        rest = self._runner.edit_tables(tables.edits, leave=layout.max_edits)
        tables = tables._replace(edits=rest)
        packed = pack_inputs(plan, layout, tables)
        draws = plan_draws(
            plan,
            members,
            self._records,
            num_rows=bucket.seqs,
            seen=self._seen,
            seen_rows=tables.rows,
            known_tokens=self._scheduler.known_tokens,
        )
        if draws.reset is not None:
            self._runner.seen.reset(*draws.reset)
        self._runner.copy_blocks(plan.copies)
        samples = self._runner.launch(
            bucket, packed, draws.sampling, full=draws.full, penalties=draws.penalties
        )
        self._steps += 1
        return InFlight(plan, members, bucket, samples, draws.targets, now, time.monotonic())

    def _members_of(self, plan: StepPlan, now: float) -> Members:
        """The requests in a plan; the very same object for the same sequences as in the last."""
        if plan.request_ids is self._members.request_ids:
            return self._members
        pairs = [self._by_key[request_id] for request_id in plan.request_ids]
        for live, _ in pairs:
            if live.timings.scheduled is None:
                live.stamp(scheduled=now)
        records = np.array([completion.record for _, completion in pairs], np.int64)
        return Members(plan.request_ids, pairs, records, self._records.plain_from(records))

    def _read_oldest(self) -> Done:
        """Wait for the oldest step, and let the scheduler know its tokens."""
        step = self._in_flight.popleft()
        samples = HostSamples.read(step.samples)
        now = time.monotonic()
        update = self._scheduler.update(step.plan, samples.token_ids[: step.plan.num_samples])
        if self._pace is not None and self._in_flight:
            self._pace.read(step, self._in_flight[0], now)
        return Done(step, samples, update, now)

    def _note(self, live: LiveRequest) -> None:
        self._news[live.request_id] = live

    def _end(self, live: LiveRequest, completion: Completion) -> None:
        """Forget a completion that has ended, and its request once all have."""
        del self._by_key[completion.key]
        self._records.remove(completion.record)
        others = (c for c in live.completions if c is not completion)
        if all(c.finish_reason is not None for c in others):
            live.stamp(finished=time.monotonic())
            del self._live[live.request_id]
        if not self._live:  # what is in flight is for nobody, and may stay there for long
            self._members = NOBODY
            self._in_flight = deque(step.for_nobody() for step in self._in_flight)

"""Idle time and kernels out of a trace: one written by hand, and a real one of this CPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from benchmarks import profile_steps
from benchmarks.device_profile import Kernel, device_events, profile_device, summary
from benchmarks.random_engine import random_engine
from benchmarks.workloads import RequestShape


def gpu_trace(lines: dict[str, list[tuple[str, int, int]]], plane: str = "/device:GPU:0"):
    """A trace from the events of its lines: (name, start, end) in microseconds."""
    names = sorted({name for events in lines.values() for name, _, _ in events})
    ids = {name: index + 1 for index, name in enumerate(names)}
    text = [f'planes {{ name: "{plane}"']
    for index, (line, events) in enumerate(lines.items()):
        # a line starts when it likes; its events count from there
        text.append(f'lines {{ id: {index} name: "{line}" timestamp_ns: {index * 1000}')
        for name, start, end in events:
            offset, duration = (start - index) * 10**6, (end - start) * 10**6
            text.append(
                f"events {{ metadata_id: {ids[name]} offset_ps: {offset} duration_ps: {duration} }}"
            )
        text.append("}")
    for name, index in ids.items():
        text.append(f'event_metadata {{ key: {index} value {{ id: {index} name: "{name}" }} }}')
    return ProfileData.from_text_proto("\n".join([*text, "}"]))


def test_idle_is_the_time_without_a_kernel_on_any_stream():
    """By hand: kernels cover 10-30 (two streams overlap) and 45-55 of the window 10-55."""
    trace = gpu_trace({
        "Stream #14(Compute)": [("gemm_fusion_dot_3", 10, 20), ("gemm_fusion_dot_12", 45, 55)],
        "Stream #15(Compute,MemcpyD2H)": [
            ("attend", 15, 30), ("MemcpyD2H", 30, 38), ("MemcpyH2D", 0, 2),
        ],
        "XLA Modules": [("jit_step", 0, 100)],
    })  # fmt: skip
    profile = summary(device_events(trace, "gpu"))
    assert profile.window_us == pytest.approx(45)
    assert profile.busy_us == pytest.approx(30)
    assert profile.idle_share == pytest.approx(15 / 45)
    assert profile.gap_share == pytest.approx(0)
    assert profile.host_copies_us == pytest.approx(10)
    assert profile.num_kernels == 3
    assert profile.kernels == [
        Kernel("gemm_fusion_dot", 2, pytest.approx(20)), Kernel("attend", 1, pytest.approx(15))
    ]  # fmt: skip


def test_a_kernel_inside_another_adds_no_busy_time():
    profile = summary([("long", 0, 100e3), ("short", 20e3, 30e3), ("late", 50e3, 120e3)])
    assert (profile.busy_us, profile.window_us, profile.idle_share) == (120, 120, 0)


def test_short_gaps_between_kernels_are_not_idle():
    profile = summary([("a", 0, 20e3), ("a", 22e3, 40e3), ("a", 60e3, 70e3)])
    assert profile.idle_share == pytest.approx(20 / 70)
    assert profile.gap_share == pytest.approx(2 / 70)


def test_figures_are_per_step():
    profile = summary([("a_1", 0, 10e3), ("a_2", 10e3, 20e3), ("b", 31e3, 41e3), ("c", 41e3, 42e3)])
    figures = profile.figures(steps=2, top=2)
    assert figures["kernels_per_step"] == 2
    assert figures["profiled_step_us"] == 21.0
    assert figures["idle_share"] == pytest.approx(11 / 42, abs=1e-4)
    assert figures["top_kernels"] == [
        {"name": "a", "per_step": 1.0, "us_per_step": 10.0},
        {"name": "b", "per_step": 0.5, "us_per_step": 5.0},
    ]


@pytest.mark.parametrize("lines", [{"XLA Modules": [("jit_step", 0, 1)]}, {}])
def test_a_gpu_without_streams_in_its_trace_is_an_error(lines):
    with pytest.raises(ValueError, match="want lines named Stream"):
        summary(device_events(gpu_trace(lines), "gpu"))


def test_a_trace_without_kernels_is_an_error():
    only_copies = gpu_trace({"Stream #2(MemcpyH2D)": [("MemcpyH2D", 0, 1)]})
    with pytest.raises(ValueError, match="without kernels"):
        summary(device_events(only_copies, "gpu"))
    with pytest.raises(ValueError, match="without kernels"):
        trace = gpu_trace({"python": [("f", 0, 1)]}, plane="/host:CPU")
        summary(device_events(trace, "cpu"))


def test_a_trace_that_misses_the_gpu_is_an_error():
    """As when the profiler could not reach it: what the host did is no stand-in."""
    trace = gpu_trace({"python": [("f", 0, 1)]}, plane="/host:CPU")
    with pytest.raises(ValueError, match=r"want /device:GPU:0 in the trace, got \['/host:CPU'\]"):
        summary(device_events(trace, "gpu"))


def test_a_function_is_profiled_on_this_device(tmp_path):
    double = jax.jit(lambda x: jnp.sin(x @ x).sum())
    x = jnp.ones((300, 300))
    double(x).block_until_ready()
    profile = profile_device(lambda: [double(x) for _ in range(4)][-1], keep=tmp_path)
    assert profile.kernels
    assert {kernel.count % 4 for kernel in profile.kernels} == {0}
    assert 0 <= profile.idle_share < 1
    assert sum(kernel.total_us for kernel in profile.kernels) >= profile.busy_us * (1 - 1e-9)
    assert list(tmp_path.rglob("*.xplane.pb"))
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_run_of_the_engine_is_profiled_in_its_middle():
    args = profile_steps.options().parse_args(
        ["--shape", "tiny", "--dtype", "float32", "--num-blocks", "40", "--max-num-seqs", "4",
         "--max-num-batched-tokens", "32", "--bucket-growth", "32"]
    )  # fmt: skip
    engine, started = random_engine(args, 64)
    shapes = [RequestShape(10, 30, 0.0)] * 4
    profile_steps.start(engine, shapes)
    profile_steps.run_steps(engine, 4)
    figures = profile_steps.figures(engine, steps=3)
    assert started["engine_start_s"] > 0
    assert figures["running_at_start"] == figures["running_at_end"] == 4
    assert figures["compiles_after_warmup"] == figures["preemptions"] == 0
    assert figures["kernels_per_step"] > 10  # two layers of a dozen operations, and the draw
    assert 0 <= figures["idle_share"] < 1
    token_bytes = 2 * 2 * engine.arch.kv_heads * engine.arch.head_dim * 4  # two layers, float32
    assert figures["kv_bytes_at_end"] - figures["kv_bytes_at_start"] == 3 * 4 * token_bytes
    with pytest.raises(RuntimeError, match="want 50 steps, the requests ended after"):
        profile_steps.run_steps(engine, 50)
    profile_steps.end(engine, 4)
    assert engine.stats().num_running == 0


def test_sequences_of_one_length_live_through_all_stretches():
    """Also through those that overlap, which are measured one after another."""
    for at, last in ((["5"], 5 + 20), (["5", "8"], 5 + 40), (["50", "5"], 50 + 20)):
        args = profile_steps.options().parse_args(
            ["--shape", "tiny", "--sequences", "3", "--steps", "10", "--at", *at]
        )
        [shapes] = profile_steps.loads(args).values()
        assert [shape.output_len for shape in shapes] == [last + 2] * 3

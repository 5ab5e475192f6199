"""The README's tables: which lines count, what stands beside what, and that they are up to date."""

import json
import re

import pytest

from benchmarks import compare, memory_tables
from benchmarks.compare import README, RESULTS, renewed, section
from benchmarks.lines import device, of_bench, read_lines
from benchmarks.tables import number

H200 = {"device": "NVIDIA H200", "cpu": "Xeon", "jax": "0.11.2", "commit": "abc"}
TORCH = {"device": "Xeon", "torch_device": "NVIDIA H200", "torch": "2.11", "commit": "abd"}
OFFLINE = {
    "bench": "offline", "case": "llama2-13b bfloat16 short", "requests": 512,
    "prompt_tokens": 65536, "output_tokens": 65536, "requests_per_s": 60.0,
    "output_tokens_per_s": 7680.0, "mean_kv_utilisation": 0.5, "peak_kv_utilisation": 0.9,
    "mean_kv_waste": 0.031, "preemptions": 2, "kv_saving": 0.936, "peak_running": 256,
    "max_num_seqs": 256,
    "matmul_share": 0.42, "peak_device_bytes": 123_400_000_000, "weights_s": 3.5,
    "engine_start_s": 21.0, "max_num_batched_tokens": 2048, "block_size": 16,
    "weights": "random", **H200,
}  # fmt: skip
STATIC = {
    "bench": "torch_generate", "case": "llama2-13b bfloat16 short", "requests_per_s": 6.1,
    "output_tokens_per_s": 786.0, "complete": False, **TORCH,
}  # fmt: skip
PAGED = STATIC | {"bench": "torch_continuous", "requests_per_s": 75.0, "complete": True}
STEP = {
    "bench": "step", "case": "llama3.1-8b bfloat16 32x1024", "step_us": 5000.0,
    "caller_us": 5100.0, "floor_us": 4500.0, "ratio_to_floor": 1.111, **H200,
}  # fmt: skip
TORCH_STEP = {"bench": "torch_step", "case": STEP["case"], "step_us": 6000.0, **TORCH}
SERVING = {
    "bench": "serving", "case": "llama3.1-8b bfloat16 conv", "arrivals": "trace", "load": 0.8,
    "rate_per_s": 21.37, "goodput_per_s": 20.1, "good_share": 0.97, "max_num_seqs": 256,
    "max_num_batched_tokens": 1024, "ttft_bound_ms": 200.0, "itl_bound_ms": 40.0,
    **{f"{n}_p{p}_ms": p + 0.123 for n in ("ttft", "itl", "e2e") for p in (50, 90, 99)}, **H200,
}  # fmt: skip
SHARED_PROMPT = {
    "bench": "shared_prompt", "case": "llama3.1-8b bfloat16 256 x (2048+64)+32 without",
    "hit_share": 0.0, "ttft_p50_ms": 7012.0, "ttft_p99_ms": 14000.0, "ttft_mean_ms": 7100.0, **H200,
}  # fmt: skip
PROFILE = {
    "bench": "profile", "case": "llama3.1-8b bfloat16 256x512", "running_at_start": 256,
    "step_us": 14321.0, "idle_share": 0.0312, "kernels_per_step": 321.4,
    "compiles_after_warmup": 0, **H200,
}  # fmt: skip
GENERATE = {
    "bench": "generate", "case": "32_prompts_64_tokens", "model": "SmolLM2", "dtype": "float32",
    "engine_tokens_per_s": 221.4, "one_by_one_tokens_per_s": 12.5,
    "padded_batch_tokens_per_s": 161.0, "device": "cpu", "cpu": "AMD EPYC",
}  # fmt: skip
LENGTH = {
    "bench": "preemption", "case": "llama3.1-8b bfloat16 length 512", "tokens": 512, "swap_ms": 6.1,
    "recompute_ms": 26.2, "modelled_swap_ms": 4.4, "modelled_recompute_ms": 10.0,
    "chosen": "swap", **H200,
}  # fmt: skip
BURST = {
    "bench": "preemption", "case": "llama3.1-8b bfloat16 burst auto", "output_tokens_per_s": 2134.0,
    "preemptions": 19, "swaps": 17, **H200,
}  # fmt: skip
STORE = {
    "bench": "offload", "case": "llama3.1-8b bfloat16 block 16 store", "blocks_gb_per_s": 31.5,
    "plain_gb_per_s": 54.2, "link_share": 0.5812, **H200,
}  # fmt: skip
OVERLAP = STORE | {"case": "llama3.1-8b bfloat16 block 16 overlap"}
del OVERLAP["link_share"]
GOLDEN = {
    "bench": "golden", "case": "SmolLM2, float32", "prompts": 20, "alone": 20, "batched": 19,
    "chunked": 20, "preempted": 20, "agreement": 0.9984, **H200,
}  # fmt: skip
ALL = [OFFLINE, STATIC, PAGED, STEP, TORCH_STEP, SERVING, PROFILE, GENERATE]


def lines_of(tmp_path, *lines):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_lines([path])


def row(text, start):
    """Cells of the one table row that starts with this."""
    [found] = re.findall(rf"^\| ({re.escape(start)}.*) \|$", text, re.MULTILINE)
    return found.split(" | ")


def test_the_readme_says_what_the_committed_lines_give():
    lines = read_lines(RESULTS.glob("*.jsonl"))
    readme = README.read_text(encoding="utf-8")
    assert readme == renewed(readme, section(lines)), "python -m benchmarks.compare writes it anew"
    assert compare.main(["--check"]) == 0


def test_every_plot_that_the_readme_shows_is_there():
    shown = re.findall(r"^!\[\w+\]\((.*)\)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(shown) == [str(p.relative_to(compare.ROOT)) for p in compare.plots()]


def test_both_contenders_stand_beside_the_engine_won_or_lost(tmp_path):
    """By hand: 60 / 6.1 and 60 / 75; the broken-off run is marked."""
    cells = row(compare.offline_table(lines_of(tmp_path, *ALL)), "llama2-13b bfloat16 short")
    assert cells == [
        "llama2-13b bfloat16 short, 256 at once, 2,048 a step (512 × 128 + 128)", "60.0 · 7,680",
        "6.10 · 786 †", "75.0 · 786", "9.84", "0.80",
    ]  # fmt: skip


def test_a_contender_on_another_device_is_not_compared(tmp_path):
    elsewhere = STATIC | {"torch_device": "NVIDIA B200"}
    lines = lines_of(tmp_path, OFFLINE, elsewhere)
    assert row(compare.offline_table(lines), "llama2")[2:] == ["–", "–", "–", "–"]


def test_a_compressed_cache_is_set_beside_the_contenders_plain_one(tmp_path):
    fp8 = OFFLINE | {"case": "llama2-13b bfloat16/fp8 short", "requests_per_s": 61.0}
    cells = row(compare.offline_table(lines_of(tmp_path, fp8, STATIC)), "llama2-13b bfloat16/fp8")
    assert cells[2] == "6.10 · 786 †" and cells[4] == "10.00"


def test_a_step_stands_beside_pytorch_and_the_floor(tmp_path):
    cells = row(compare.step_table(lines_of(tmp_path, STEP, TORCH_STEP)), "llama3.1-8b")
    assert cells[1:] == ["5.00", "5.10", "4.50", "1.11", "6.00", "1.20"]
    assert row(compare.step_table(lines_of(tmp_path, STEP)), "llama3.1-8b")[5:] == ["–", "–"]


def test_the_bounds_of_goodput_are_those_of_the_lines(tmp_path):
    other = SERVING | {"case": "llama3.1-8b bfloat16 code", "ttft_bound_ms": 500.0}
    text = " ".join(compare.serving_table(lines_of(tmp_path, SERVING)).split())
    assert "within 200 and 40 ms, and" in text
    text = " ".join(compare.serving_table(lines_of(tmp_path, SERVING, other)).split())
    assert "within 200 and 40 ms or 500 and 40 ms, and" in text


def test_a_step_without_cuda_graphs_stands_beside_the_one_with_them(tmp_path):
    kernel_by_kernel = STEP | {"step_us": 9000.0, "without_cuda_graphs": True}
    text = compare.step_table(lines_of(tmp_path, STEP, kernel_by_kernel))
    cases = [STEP["case"], f"{STEP['case']}, without CUDA graphs"]
    rows = [line.strip("| ").split(" | ")[:2] for line in text.splitlines() if "llama" in line]
    assert rows == [[case, ms] for case, ms in zip(cases, [rows[0][1], "9.00"], strict=True)]
    assert rows[0][1] != "9.00"


def test_first_tokens_with_the_cache_stand_below_those_without(tmp_path):
    warm = SHARED_PROMPT | {
        "case": SHARED_PROMPT["case"].replace("without", "warm"), "hit_share": 0.9697,
        "ttft_mean_ms": 355.0, "ttft_mean_speedup": 20.0,
    }  # fmt: skip
    text = compare.shared_prompt_table(lines_of(tmp_path, SHARED_PROMPT, warm))
    load = "llama3.1-8b bfloat16 256 x (2048+64)+32"
    assert row(text, f"{load} without")[1:] == ["0", "7,012", "14,000", "7,100", "–"]
    assert row(text, f"{load} warm")[1:] == ["97", "7,012", "14,000", "355", "20.0"]


def test_the_other_tables_repeat_their_lines(tmp_path):
    lines = lines_of(tmp_path, *ALL)
    serving = row(compare.serving_table(lines), "llama3.1-8b")
    assert serving[0].endswith("conv, trace, 256 at once, 1,024 a step")
    assert serving[1:] == ["21.4 (80 %)", *["50.1 / 90.1 / 99.1"] * 3, "20.1 (97 %)"]
    assert row(compare.memory_table(lines), "llama2")[1:] == [
        "50 / 90", "3.1", "2", "94", "256", "42", "123", "24.5",
    ]  # fmt: skip
    assert row(compare.profile_table(lines), "llama3.1")[1:] == ["256", "14.3", "3.1", "321", "0"]
    generate = row(compare.generate_table(lines), "SmolLM2")
    assert generate[1:] == ["221", "161", "12.5", "1.38", "17.71"]


def test_the_last_line_of_a_case_counts_and_rates_are_cases_of_their_own(tmp_path):
    again, half = OFFLINE | {"requests_per_s": 70.0}, SERVING | {"load": 0.5, "rate_per_s": 13.4}
    lines = lines_of(tmp_path, OFFLINE, SERVING, again, half, SERVING | {"rate_per_s": 22.0})
    assert [line["requests_per_s"] for line in of_bench(lines, "offline")] == [70.0]
    assert [line["rate_per_s"] for line in of_bench(lines, "serving")] == [13.4, 22.0]
    absolute = [SERVING | {"load": None, "rate_per_s": rate} for rate in (1.0, 2.0)]
    assert len(of_bench(lines_of(tmp_path, *absolute), "serving")) == 2


def test_loads_served_with_another_target_or_step_are_cases_of_their_own(tmp_path):
    target = SERVING | {"ttft_target_s": 0.2, "rate_per_s": 21.5}
    larger = SERVING | {"max_num_batched_tokens": 2048, "ttft_target_s": None, "rate_per_s": 21.6}
    lines = lines_of(tmp_path, SERVING, target, larger)
    assert [line["rate_per_s"] for line in of_bench(lines, "serving")] == [21.37, 21.5, 21.6]
    text = compare.serving_table(lines)
    assert "trace, 256 at once, 1,024 a step |" in text
    assert "trace, 256 at once, 1,024 a step, target 200 ms |" in text
    assert "trace, 256 at once, 2,048 a step |" in text


def test_lists_served_with_other_options_are_cases_of_their_own(tmp_path):
    changes = {
        "512 at once, 2,048 a step": {"max_num_seqs": 512},
        "256 at once, 512 a step": {"max_num_batched_tokens": 512, "prefix_caching": False},
        "256 at once, 2,048 a step, blocks of 64": {"block_size": 64},
        "256 at once, 2,048 a step, prefix caching": {"prefix_caching": True},
        "256 at once, 2,048 a step, contiguous blocks": {"contiguous_blocks": True},
    }
    ours = [OFFLINE | change for change in changes.values()]
    table = compare.offline_table(lines_of(tmp_path, OFFLINE, *ours, STATIC))
    for label in ("256 at once, 2,048 a step", *changes):
        cells = row(table, f"llama2-13b bfloat16 short, {label} (")
        assert cells[1:3] == ["60.0 · 7,680", "6.10 · 786 †"]


def test_devices_have_sections_of_their_own_gpus_first(tmp_path):
    lines = lines_of(tmp_path, GENERATE, OFFLINE, STATIC | {"torch_device": "cpu"})
    text = section(lines)
    assert [device(line) for line in lines.values()] == ["AMD EPYC", "NVIDIA H200", "Xeon"]
    assert re.findall("^### (.*)", text, re.MULTILINE) == [
        "NVIDIA H200",
        "AMD EPYC",
    ]  # a contender alone has none
    assert "jax 0.11.2" in text and "Weights are random" in text


def test_lines_of_other_benchmarks_are_passed_over(tmp_path):
    assert lines_of(tmp_path, {"bench": "paged_decode", "case": "x"}) == {}
    assert section({}).count("###") == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"bench": "step"}'])
def test_a_damaged_line_is_named(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"bench": "other", "case": "x"}\n' + text)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        read_lines([path])


def test_only_what_is_between_the_marks_changes():
    begin, end = compare.BEGIN, compare.END
    assert renewed(f"a\n{begin}old\n{end}z\n", "new") == f"a\n{begin}\nnew\n{end}z\n"
    for broken in ("a", begin, end + begin, begin + begin + end, begin + end + end):
        with pytest.raises(ValueError, match="once each"):
            renewed(broken, "new")


def test_lengths_and_bursts_of_preemption_share_a_table(tmp_path):
    text = memory_tables.preemption_table(lines_of(tmp_path, LENGTH, BURST))
    assert row(text, LENGTH["case"])[1:] == ["6.10", "26.2", "4.40", "10.0", "swap", "–", "–"]
    assert row(text, BURST["case"])[6:] == ["2,134", "19 / 17"]


def test_copies_are_set_beside_the_plain_one(tmp_path):
    text = memory_tables.offload_table(lines_of(tmp_path, STORE, OVERLAP))
    assert row(text, STORE["case"])[1:] == ["31.5", "54.2", "58"]
    assert OVERLAP["case"] not in text


def test_traces_are_told_apart_and_each_part_has_its_table(tmp_path):
    waste = {
        "bench": "kv_memory", "case": "waste_paged_16", "trace": "conv", "waste_share": 0.0061,
        "mean_running": 359.2, **H200,
    }  # fmt: skip
    other = waste | {"trace": "code", "waste_share": 0.0035}
    prefix = {
        "bench": "kv_memory", "case": "prefix_1000k", "trace": "talk", "hit_share": 0.05,
        "hit_share_lru": 0.06, "hit_share_belady": 0.25, "hit_share_infinite": 0.37, **H200,
    }  # fmt: skip
    lines = lines_of(tmp_path, waste, other, prefix)
    text = memory_tables.waste_table(lines)
    assert row(text, "conv")[1:] == ["paged 16", "0.61", "359"]
    assert row(text, "code")[1:] == ["paged 16", "0.35", "359"]
    assert "1000k" not in text
    text = memory_tables.prefix_table(lines)
    assert row(text, "talk, 1000k")[1:] == ["5.0", "6.0", "25.0", "37.0"]


def test_free_lists_stand_beside_each_other_for_each_trace_and_load(tmp_path):
    stack = {
        "bench": "kv_memory", "case": "free_list_timed_stack", "trace": "talk", "free_share": 0.378,
        "external_fragmentation": 0.3282, "unusable_16": 0.8623, "outside_longest_run": 0.961,
        "runs_per_seq": 711.4, "million_blocks_per_s": 140.8, **H200,
    }  # fmt: skip
    full = stack | {"case": "free_list_full_buddy", "runs_per_seq": 2.33}
    text = memory_tables.free_list_table(lines_of(tmp_path, stack, full))
    shares = ["32.82", "37.80", "86.23", "96.10"]
    assert row(text, "talk, timed, stack")[1:] == [*shares, "711", "141"]
    assert row(text, "talk, full, buddy")[1:] == [*shares, "2.33", "141"]


def test_blocks_saved_by_sharing_are_shown_by_kind_and_width(tmp_path):
    line = {
        "bench": "sharing", "case": "beams_4", "model": "SmolLM2", "saved_share": 0.527,
        "peak_blocks": 182, "peak_blocks_unshared": 384, **H200,
    }  # fmt: skip
    text = memory_tables.sharing_table(lines_of(tmp_path, line))
    assert row(text, "SmolLM2")[1:] == ["beams of 4", "52.7", "182 / 384"]


def test_ways_to_serve_a_real_model_are_counted_apart(tmp_path):
    teacher_forced = {k: GOLDEN[k] for k in ("bench", "prompts", "agreement", *H200)}
    lines = lines_of(tmp_path, GOLDEN, teacher_forced | {"case": "SmolLM2, bfloat16"})
    text = memory_tables.golden_table(lines)
    assert row(text, "SmolLM2, float32")[1:] == [
        "20 / 20", "19 / 20", "20 / 20", "20 / 20", "99.8"
    ]  # fmt: skip
    assert row(text, "SmolLM2, bfloat16")[1:] == ["–", "–", "–", "–", "99.8"]


def test_numbers_have_three_digits():
    assert [number(x) for x in (0.123, 9.876, 12.34, 1234.5)] == ["0.12", "9.88", "12.3", "1,234"]


def test_every_kind_of_line_is_drawn_and_old_plots_go(tmp_path):
    from benchmarks.plots import draw

    folder = tmp_path / "plots"
    everything = [*ALL, LENGTH, LENGTH | {"case": "length 2048", "tokens": 2048, "swap_ms": 18.0}]
    files = draw(lines_of(tmp_path, *everything), folder)
    assert [path.name for path in files] == [
        "offline_h200.png",
        "step_h200.png",
        "serving_h200.png",
        "preemption_h200.png",
    ]
    content = [path.read_bytes() for path in files]
    assert all(data.startswith(b"\x89PNG") and len(data) > 5000 for data in content)
    again = draw(lines_of(tmp_path, *everything), folder)
    assert [path.read_bytes() for path in again] == content  # nothing of the day in them
    assert draw(lines_of(tmp_path, STEP), folder) == [folder / "step_h200.png"]
    assert list(folder.iterdir()) == [folder / "step_h200.png"]


def test_swap_and_recompute_are_drawn_for_each_model(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from benchmarks.plots import figures

    small = {"case": "qwen3-0.6b bfloat16 length 512", "swap_ms": 3.0}
    lines = lines_of(tmp_path, LENGTH, BURST, LENGTH | small, LENGTH | small | {
        "case": "qwen3-0.6b bfloat16 length 64", "tokens": 64, "swap_ms": 2.0,
    })  # fmt: skip
    figure = figures(lines, pyplot)["preemption_h200"]
    drawn = {
        axes.get_title(): dict(zip(*axes.lines[0].get_data(), strict=True)) for axes in figure.axes
    }
    pyplot.close(figure)
    assert drawn == {
        "llama3.1-8b bfloat16": {512: 6.1}, "qwen3-0.6b bfloat16": {64: 2.0, 512: 3.0},
    }  # fmt: skip

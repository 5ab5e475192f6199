"""The command line, as a script sees it: output, error lines and exit codes."""

import io
import json
import math
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from pagedjax.cli import app
from pagedjax.cli.generate import read_prompts
from pagedjax.cli.jsonl import json_line
from pagedjax.cli.terminal import LiveAnswers, OrderedAnswers
from pagedjax.engine.kv_scales import calibrate, scales_for
from pagedjax.llm import LLM
from pagedjax.loading import load_model
from pagedjax.outputs import CompletionOutput, RequestOutput, Timings, TokenLogprobs
from pagedjax.tokenizer import Tokenizer
from tests.support.echo_engine import EchoEngine

COMMANDS = ["convert", "generate", "chat", "info", "calibrate", "top", "demo"]


@pytest.fixture
def engine(monkeypatch):
    """Let the commands find an engine without a model, whatever path they are given."""
    engine = EchoEngine()
    monkeypatch.setattr("pagedjax.llm.LLM", lambda model, **_: LLM.from_engine(engine))
    return engine


def pagedjax(*arguments, text=None):
    return CliRunner().invoke(app, arguments, input=text)


def strict_json(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    shown = pagedjax(command, "--help")
    assert shown.exit_code == 0
    assert f"Example: pagedjax {'chat' if command == 'demo' else command}" in shown.stdout


def test_all_commands_are_listed():
    listed = pagedjax("--help").stdout
    assert all(command in listed for command in COMMANDS)


def test_one_prompt_streams_its_text_and_nothing_else(engine):
    done = pagedjax("generate", "MODEL", "abc", "--max-tokens", "5")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "abcab\n", "")


def test_several_prompts_come_in_order_under_headings(engine):
    done = pagedjax("generate", "MODEL", "abc", "xy", "--max-tokens", "3")
    assert done.stdout == "\n## abc\nabc\n\n## xy\nxyx\n"


def test_prompts_from_a_file_are_its_lines(engine, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("žluť\n\n  \nsecond\n", encoding="utf-8")
    done = pagedjax("generate", "MODEL", "--file", str(file), "--max-tokens", "6", "--json")
    lines = [strict_json(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["žluť", "second"]
    assert [line["outputs"][0]["text"] for line in lines] == ["žluť", "second"]


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes("one\u2028page\x0cof text\r\n\ntwo\x85".encode())
    assert read_prompts([], str(file)) == ["one\u2028page\x0cof text", "two\x85"]


def test_a_dash_is_standard_input_as_one_prompt(engine):
    done = pagedjax("generate", "MODEL", "-", "--max-tokens", "4", text="a\nbc")
    assert done.stdout == "a\nbc\n"
    done = pagedjax("generate", "MODEL", "--file", "-", "--max-tokens", "2", "--json", text="a\nb")
    assert [strict_json(line)["prompt"] for line in done.stdout.splitlines()] == ["a", "b"]


def test_json_lines_hold_everything_a_script_needs(engine):
    done = pagedjax("generate", "MODEL", "abc", "", "--max-tokens", "2", "--json", "--stop", "b")
    first, second = map(strict_json, done.stdout.splitlines())
    assert done.exit_code == 1
    assert first["outputs"] == [
        {
            "index": 0,
            "text": "a",
            "token_ids": [97, 98],
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "b",
        }
    ]
    assert (first["index"], first["error"]) == (0, None)
    assert (first["num_prompt_tokens"], first["num_generated_tokens"]) == (3, 2)
    assert set(first["seconds"]) == {"queued", "time_to_first_token", "total"}
    assert second["error"] == "the prompt is empty"
    assert second["outputs"][0]["finish_reason"] == "error"


def test_impossible_log_probabilities_are_null():
    """SA24: minus infinity has no place in JSON."""
    entry = TokenLogprobs(token_id=1, logprob=-math.inf, top=((2, -0.5), (3, math.nan)))
    output = CompletionOutput(index=0, text="x", token_ids=(1,), logprobs=(entry,))
    result = RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=(1, 2),
        prompt_logprobs=(None, entry),
        outputs=(output,),
        timings=Timings(arrived=0.0),
    )
    line = strict_json(json_line(0, result))
    wanted = {"token_id": 1, "logprob": None, "top": [[2, -0.5], [3, None]]}
    assert line["outputs"][0]["logprobs"] == [wanted]
    assert line["prompt_logprobs"] == [None, wanted]


def test_a_failed_request_makes_the_exit_code_1_and_the_others_are_answered(engine):
    done = pagedjax("generate", "MODEL", "x" * 64, "ok", "--max-tokens", "2")
    assert done.exit_code == 1
    assert done.stderr == "error: prompt 1: the prompt has 64 tokens\n"
    assert done.stdout.endswith("ok\n")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate", "MODEL"], "no prompt"),
        (["generate", "MODEL", "x", "--temperature", "nan"], "temperature must be"),
        (["generate", "MODEL", "x", "--top-p", "0"], "top_p must be"),
        (["generate", "MODEL", "x", "--max-tokens", "-1"], "max_tokens must be"),
        (["generate", "MODEL", "x", "--n", "0"], "n must be"),
        (["generate", "MODEL", "x", "--n", "2"], "need --json"),
        (["generate", "MODEL", "-", "--file", "-"], "only once"),
        (["generate", "MODEL", "--file", "/absent/prompts"], "/absent/prompts"),
        (["generate", "/absent/model", "x"], "/absent/model"),
        (["generate", "/absent/model", "x", "--block-size", "17"], "block_size"),
        (["chat", "/absent/model"], "/absent/model"),
        (["chat", "MODEL", "--min-p", "2"], "min_p must be"),
        (["info", "/absent/model"], "/absent/model"),
        (["convert", "/absent/model", "/absent/dst"], "/absent/model"),
        (["generate", "/absent/model", "--file", "/usr"], "/usr: Is a directory"),
        (["calibrate", "/absent/model", "--file", "/usr"], "/usr: Is a directory"),
        (["demo", "--max-tokens", "0"], "max_tokens must be"),
        (["top", ""], "wanted a port, HOST:PORT or URL"),
    ],
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(arguments, complaint):
    done = pagedjax(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_file_that_is_not_text_is_refused(engine, tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes(b"\xff\xfe")
    done = pagedjax("generate", "MODEL", "--file", str(file))
    assert done.exit_code == 2
    assert "not UTF-8" in done.stderr


def test_unknown_options_are_bad_input():
    assert pagedjax("generate", "MODEL", "x", "--temprature", "1").exit_code == 2


def test_a_failing_engine_is_exit_code_1_without_a_traceback(engine):
    engine.fail_at = 2
    done = pagedjax("generate", "MODEL", "abc")
    assert done.exit_code == 1
    assert done.stderr == "error: device lost\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(13, "Permission denied", "p.txt"), 2, "p.txt: Permission denied"),
        (OSError(28, "No space left on device", "out"), 1, "out: No space left on device"),
        (OSError("cannot serve metrics"), 1, "cannot serve metrics"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_an_error_of_the_system_names_the_file_and_no_number(monkeypatch, error, code, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("convert.convert", fail)
    done = pagedjax("convert", "SRC", "DST")
    assert (done.exit_code, done.stderr) == (code, f"error: {said}\n")


def test_a_missing_optional_package_is_exit_code_1_without_a_traceback(monkeypatch):
    def fail(*_, **__):
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr("convert.convert", fail)
    done = pagedjax("convert", "SRC", "DST", "--check")
    assert (done.exit_code, done.stderr) == (1, "error: No module named 'torch'\n")


def test_an_interrupt_ends_with_the_customary_code(engine):
    engine.fail_at, engine.failure = 2, KeyboardInterrupt()
    done = pagedjax("generate", "MODEL", "abc", "--json")
    assert done.exit_code == 130
    assert "interrupted" in done.stderr


def test_chat_keeps_the_conversation(engine):
    arguments = ["chat", "MODEL", "--max-tokens", "2", "--system", "s"]
    done = pagedjax(*arguments, text="one\n\ntwo\n/reset\nthree\n/exit\nnever\n")
    assert done.exit_code == 0
    assert done.stdout == "<s\n" * 3  # the echo of the template's first two characters
    assert engine.prompts == [
        "<system>s<user>one<assistant>",
        "<system>s<user>one<assistant><s<user>two<assistant>",
        "<system>s<user>three<assistant>",
    ]


def test_a_message_that_cannot_be_answered_is_taken_back(engine):
    done = pagedjax("chat", "MODEL", "--max-tokens", "2", text=f"{'x' * 99}\nok\n")
    assert "error: the prompt has" in done.stderr
    assert engine.prompts == ["<user>ok<assistant>"]


def test_ordered_answers_stream_the_first_and_let_the_others_wait():
    out = io.StringIO()
    with OrderedAnswers(["A", "B", "C"], out) as answers:
        answers.add(1, "b1 ")
        answers.add(0, "a1 ")
        assert out.getvalue() == "\nA\na1 "
        answers.finish(1)
        answers.add(2, "c1 ")
        answers.finish(0)
        assert out.getvalue() == "\nA\na1 \n\nB\nb1 \n\nC\nc1 "
        answers.add(2, "c2")
        answers.finish(2)
    assert out.getvalue() == "\nA\na1 \n\nB\nb1 \n\nC\nc1 c2\n"


def test_live_answers_show_all_texts_and_count_the_finished():
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=30)
    with LiveAnswers(["first?", "second?"], console) as answers:
        answers.add(0, "[bold]not markup")
        answers.add(1, "two")
        answers.finish(0)
    shown = out.getvalue()
    assert "first?" in shown
    assert "[bold]not markup" in shown
    assert "1/2" in shown


# With a real checkpoint.


def test_info_states_architecture_parameters_and_what_fits(tiny_hf, tiny_native):
    native, hf = (pagedjax("info", str(path), "--json") for path in (tiny_native, tiny_hf))
    facts = strict_json(native.stdout)
    assert facts == strict_json(hf.stdout)
    stored = json.loads((tiny_native / "manifest.json").read_text())["tensors"]
    assert facts["parameters"] == sum(math.prod(tensor["shape"]) for tensor in stored.values())
    # 2 layers, keys and values, 2 heads of 24 numbers, 4 bytes each
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 24 * 4
    assert facts["tokens_that_fit"] == facts["kv_blocks"] * 16
    assert facts["weight_bytes"] == 4 * facts["parameters"]
    assert facts["step_bytes"] > 0
    shown = pagedjax("info", str(tiny_native))
    assert f"parameters              {facts['parameters']:,}\n" in shown.stdout


def test_info_prints_the_plan_of_the_engine_with_the_same_options(tiny_native, tmp_path):
    options = dict(
        max_num_seqs=3,
        max_num_batched_tokens=48,
        max_model_len=100,
        host_cache_bytes=1 << 20,
        disk_cache_path=str(tmp_path / "cache"),
        disk_cache_bytes=1 << 21,
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    for more in ({}, dict(num_blocks=5)):
        chosen = [*flags, *(f"--{name.replace('_', '-')}={value}" for name, value in more.items())]
        facts = strict_json(pagedjax("info", str(tiny_native), "--json", *chosen).stdout)
        llm = LLM(tiny_native, **options, **more, warm_up=False, progress=False)
        stats, sizes = llm.engine.stats(), llm.engine._scheduler.config
        assert (facts["max_num_seqs"], facts["max_num_batched_tokens"]) == (3, 48)
        assert facts["kv_blocks"] == stats.blocks_total == (4 if more else 3 * 7)
        assert facts["kv_pool_bytes"] == stats.pool_bytes
        assert facts["longest_sequence"] == llm.engine.max_model_len == (64 if more else 100)
        assert facts["host_tokens_that_fit"] == 16 * sizes.num_host_blocks > 0
        assert facts["disk_tokens_that_fit"] == 16 * sizes.num_disk_blocks > 0


@pytest.mark.parametrize(
    ("command", "option", "value", "complaint"),
    [
        ("generate", "--num-blocks", 10**12, "num_blocks: 1000000000000 blocks of"),
        ("info", "--num-blocks", 10**12, "num_blocks: 1000000000000 blocks of"),
        ("info", "--host-cache-bytes", 10**16, "host_cache_bytes is 10000000000000000, the host"),
        ("info", "--host-cache-bytes", 100, "host_cache_bytes is to hold a block, at least"),
    ],
)
def test_sizes_beyond_the_memory_are_bad_input(tiny_native, command, option, value, complaint):
    """OF17."""
    prompt = ["x"] if command == "generate" else []
    refused = pagedjax(command, str(tiny_native), *prompt, option, str(value))
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {complaint}") and refused.stderr.count("\n") == 1


def test_info_on_a_gpu_leaves_room_for_the_weights(tiny_native, monkeypatch):
    """A stand-in for the device: 24 MB, of which 0.9 are for weights, activations and KV pool."""

    class Gpu:
        platform, device_kind = "gpu", "Test GPU"

        def memory_stats(self):
            return {"bytes_limit": 24_000_000, "bytes_in_use": 0}

    monkeypatch.setattr(
        "pagedjax.engine.step_memory.planned_step_bytes",
        lambda _, config, **__: 9_000_000 * config.max_num_batched_tokens // 2048,
    )
    monkeypatch.setattr("jax.devices", lambda: [Gpu()])
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    arguments = ["info", str(tiny_native), "--json", "--dtype", "bfloat16"]
    facts = strict_json(pagedjax(*arguments).stdout)
    num_blocks = 24_000_000 // (16 * facts["kv_bytes_per_token"])
    too_many = pagedjax(*arguments, "--num-blocks", str(num_blocks))
    assert too_many.exit_code == 2  # they would fit if there were no weights
    assert f"the device has {24_000_000 - facts['weight_bytes']} for them" in too_many.stderr
    left = 0.9 * 24_000_000 - 2 * facts["parameters"] - 9_000_000
    assert (facts["weight_bytes"], facts["step_bytes"]) == (2 * facts["parameters"], 9_000_000)
    assert facts["device"] == "gpu, Test GPU"
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 24 * 2
    exact = left / (16 * facts["kv_bytes_per_token"])
    assert 0.998 * exact < facts["kv_blocks"] + 1 <= exact
    smaller = strict_json(pagedjax(*arguments, "--max-num-batched-tokens", "1024").stdout)
    assert smaller["step_bytes"] == 4_500_000
    exact = (left + 4_500_000) / (16 * facts["kv_bytes_per_token"])
    assert 0.998 * exact < smaller["kv_blocks"] + 1 <= exact
    monkeypatch.setattr(Gpu, "memory_stats", lambda _: {"bytes_limit": 100, "bytes_in_use": 0})
    assert "do not fit" in pagedjax(*arguments).stderr


def test_info_counts_a_compressed_cache_by_its_own_bytes(tiny_native):
    plain, small, mixed = (
        strict_json(pagedjax("info", str(tiny_native), "--json", *options).stdout)
        for options in ((), ("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype", "fp8-values"))
    )
    assert (plain["kv_dtype"], small["kv_dtype"]) == ("float32", "float8_e4m3fn")
    assert small["kv_bytes_per_token"] * 4 == plain["kv_bytes_per_token"]
    assert mixed["kv_dtype"] == "float32 keys, float8_e4m3fn values"
    assert mixed["kv_bytes_per_token"] * 8 == plain["kv_bytes_per_token"] * 5
    refused = pagedjax("info", str(tiny_native), "--kv-cache-dtype", "fp4")
    assert (refused.exit_code, "fp4" in refused.stderr) == (2, True)


def test_a_calibration_stays_in_the_checkpoint_and_is_used(tiny_native, tiny_hf, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_native, copy)
    texts = ["one two three", "3 + 4 = 7"]
    nothing = pagedjax("calibrate", str(copy))
    assert (nothing.exit_code, "error: no text: give one" in nothing.stderr) == (2, True)
    done = pagedjax("calibrate", str(copy), *texts)
    assert done.exit_code == 0, done.stderr
    loaded = load_model(copy, dtype="float32")
    tokenizer = Tokenizer(loaded.tokenizer_dir)
    sequences = [tokenizer.encode(text) for text in texts]
    arch = loaded.arch
    wanted = calibrate(arch, loaded.params, sequences, max_len=arch.max_positions)
    np.testing.assert_array_equal(loaded.kv_calibration.maxima, wanted.maxima)
    np.testing.assert_array_equal(loaded.kv_calibration.key_means, wanted.key_means)
    options = dict(max_num_seqs=2, num_blocks=8, warm_up=False, progress=False)
    llm = LLM(copy, kv_cache_dtype="int8", **options)
    kept = llm.engine._runner._kv_scales
    for got, want in zip(kept, scales_for(wanted, np.dtype(np.int8)), strict=True):
        np.testing.assert_array_equal(got.scales, want.scales)
        np.testing.assert_array_equal(got.key_mean, want.key_mean)
    llm.calibrate_kv([*texts, "!"])
    sequences.append(tokenizer.encode("!"))
    other = calibrate(arch, loaded.params, sequences, max_len=llm.engine.max_model_len)
    replaced = llm.engine._runner._kv_scales[0]
    assert (replaced.scales == scales_for(other, np.dtype(np.int8))[0].scales).all()
    assert (replaced.scales != kept[0].scales).any()
    refused = pagedjax("calibrate", str(tiny_hf), *texts)
    assert (refused.exit_code, "native checkpoint" in refused.stderr) == (2, True)


def test_convert_writes_a_checkpoint_once(tiny_hf, tmp_path):
    destination = str(tmp_path / "out")
    first = pagedjax("convert", str(tiny_hf), destination, "--dtype", "bfloat16")
    assert first.exit_code == 0
    assert "parameters in" in first.stdout
    again = pagedjax("convert", str(tiny_hf), destination)
    assert again.exit_code == 2
    assert "exists already; with overwrite" in again.stderr
    assert pagedjax("convert", str(tiny_hf), destination, "--overwrite").exit_code == 0
    twice = pagedjax("convert", destination, str(tmp_path / "twice"))
    assert (twice.exit_code, "native checkpoint already" in twice.stderr) == (2, True)
    for options in ((), ("--overwrite",)):
        other = pagedjax("convert", str(tiny_hf), str(tmp_path), *options)
        assert (other.exit_code, "not a native checkpoint" in other.stderr) == (2, True)
    assert pagedjax("convert", str(tiny_hf), destination, "--dtype", "int3").exit_code == 2


def test_generate_reports_log_probabilities_and_several_completions(tiny_llm, monkeypatch):
    monkeypatch.setattr("pagedjax.llm.LLM", lambda model, **_: tiny_llm)
    arguments = ["--json", "--n", "2", "--logprobs", "3", "--seed", "5", "--temperature", "1"]
    done = pagedjax("generate", "MODEL", "to be", "--max-tokens", "4", *arguments)
    assert done.exit_code == 0, done.stderr
    (line,) = map(strict_json, done.stdout.splitlines())
    first, second = line["outputs"]
    assert first["token_ids"] != second["token_ids"]
    for output in (first, second):
        assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
        assert all(len(entry["top"]) == 3 for entry in output["logprobs"])

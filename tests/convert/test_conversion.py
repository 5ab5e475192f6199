"""The conversion as one call and as a command: reports, exit codes, the check."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from convert import CheckFailed, compare, conversion, convert
from convert.__main__ import main
from pagedjax.loading import load_model
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import BF16, VARIANTS, random_tensors, write_checkpoint
from tests.support.tiny_models import tensor_shapes as shapes_of

LLAMA = VARIANTS["llama"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    write_checkpoint(tmp_path / "hf", LLAMA)
    return tmp_path / "hf"


def test_report_counts_what_was_written(source, tmp_path):
    seen = []
    report = convert(source, tmp_path / "native", dtype="bfloat16", progress=seen.append)
    numbers = sum(int(np.prod(shape)) for shape in shapes_of(LLAMA).values())
    assert report.num_params == numbers
    assert report.nbytes == 2 * numbers
    assert report.num_tensors == len(seen) == len(load_model(report.destination).params)
    assert report.arch == load_model(report.destination).arch
    assert report.largest_difference is None
    assert str(source) in report.source


def test_command_converts_and_says_so(source, tmp_path, capsys):
    assert main([str(source), str(tmp_path / "native"), "--dtype", "float16"]) == 0
    out = capsys.readouterr().out
    assert "0.1 M parameters" in out and str(tmp_path / "native") in out
    assert {a.dtype for a in load_model(tmp_path / "native").params.values()} == {np.dtype("f2")}


def test_command_passes_remarks_on(tmp_path, capsys):
    config = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    write_checkpoint(tmp_path / "hf", config)
    assert main([str(tmp_path / "hf"), str(tmp_path / "native")]) == 0
    assert "note: config.json: no rope_theta" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["no source", "exists", "pickle", "unknown architecture"])
def test_bad_input_is_exit_code_2_and_one_line(source, tmp_path, capsys, fault):
    dst = tmp_path / "native"
    if fault == "no source":
        source = tmp_path / "nowhere"
    elif fault == "exists":
        dst.mkdir()
    elif fault == "pickle":
        (source / "model.safetensors").rename(source / "pytorch_model.bin")
    else:
        write_checkpoint(source, LLAMA | {"model_type": "mamba"})
    assert main([str(source), str(dst)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert not (dst / "manifest.json").exists()


def test_wrong_options_are_exit_code_2(source, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        main([str(source), str(tmp_path / "native"), "--dtype", "int4"])


def test_a_full_disk_is_exit_code_1(source, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(conversion, "write_native", full)
    assert main([str(source), str(tmp_path / "native")]) == 1
    assert "No space left" in capsys.readouterr().err


FULL_DISK = """
    import resource, signal, sys
    from convert.__main__ import main
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    sys.exit(main(sys.argv[1:]))
"""


def test_a_write_that_the_system_refuses_is_one_line(source, tmp_path):
    """CV36: Orbax and TensorStore would tell it with two tracebacks."""
    code = textwrap.dedent(FULL_DISK)
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "native")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: [Errno 27] File too large")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "native").exists()


def test_module_runs_from_the_shell(source, tmp_path):
    command = [sys.executable, "-m", "convert", str(source)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "check": False}
    done = subprocess.run([*command, str(tmp_path / "native")], **options)
    assert (done.returncode, done.stderr) == (0, b"")
    again = subprocess.run([*command, str(tmp_path / "native")], **options)
    assert again.returncode == 2 and b"exists already" in again.stderr
    assert b"Traceback" not in again.stderr


def test_the_check_without_pytorch_stops_before_anything_is_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs torch"):
        convert(source, tmp_path / "native", check=True)
    assert not (tmp_path / "native").exists()
    assert main([str(source), str(tmp_path / "native"), "--check"]) == 1


class TestCheck:
    """`--check` against transformers."""

    @pytest.fixture(autouse=True)
    def needs_torch(self):
        pytest.importorskip("torch").set_num_threads(1)

    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_a_good_conversion_differs_by_rounding_only(self, source, tmp_path, dtype, capsys):
        options = [] if dtype is None else ["--dtype", dtype]
        assert main([str(source), str(tmp_path / "native"), "--check", *options]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith("largest logit difference")
        assert 0 < float(line.split()[-1]) < 1e-4

    def test_a_gguf_file_is_checked_through_transformers_own_reading(self, tmp_path):
        config = LLAMA | {"vocab_size": 300}
        tensors = random_tensors(shapes_of(config), BF16)
        write_gguf(tmp_path / "m.gguf", config, tensors, arch="llama")
        report = convert(tmp_path / "m.gguf", tmp_path / "native", check=True)
        assert 0 < report.largest_difference < 1e-4

    def test_a_wrong_conversion_is_exit_code_1(self, source, tmp_path, capsys, monkeypatch):
        """The very mistake it is there for: query and key rows in the wrong order."""
        opened = conversion.open_checkpoint

        def with_wrong_rows(path):
            import dataclasses

            return dataclasses.replace(opened(path), pairs_to_halves=True)

        monkeypatch.setattr(conversion, "open_checkpoint", with_wrong_rows)
        with pytest.raises(CheckFailed, match="differ from transformers' by up to"):
            convert(source, tmp_path / "a", check=True)
        assert main([str(source), str(tmp_path / "b"), "--check"]) == 1
        assert "logits differ" in capsys.readouterr().err

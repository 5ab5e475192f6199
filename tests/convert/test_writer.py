"""The native checkpoint on disk: complete or not there at all, and restorable by plain Orbax."""

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from convert import CheckpointError, open_checkpoint, write_native
from convert import writer as writer_module
from convert.checkpoint import NativeTensor
from pagedjax.loading import load_model
from tests.support.tiny_models import BF16, VARIANTS, tensor_shapes, write_checkpoint

LLAMA = VARIANTS["llama"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "hf"
    write_checkpoint(directory, LLAMA, shards=2)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 7], "top_k": 20}')
    return directory


def digest(directory):
    """Every file below a directory with its hash."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def left_beside(dst):
    return sorted(path.name for path in dst.parent.iterdir() if path.name != "hf")


def test_plain_orbax_restores_the_arrays_bit_by_bit(source, tmp_path):
    checkpoint = open_checkpoint(source)
    write_native(checkpoint, tmp_path / "native")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "native" / "params")
    wanted = {tensor.name: tensor.load() for tensor in checkpoint.tensors()}
    assert restored.keys() == wanted.keys()
    for name, array in wanted.items():
        assert restored[name].dtype == array.dtype
        assert restored[name].tobytes() == array.tobytes(), name


def test_manifest_names_source_files_and_tensors(source, tmp_path):
    checkpoint = open_checkpoint(source)
    write_native(checkpoint, tmp_path / "native", dtype="bfloat16")
    manifest = json.loads((tmp_path / "native" / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("pagedjax-checkpoint", 1)
    for file in manifest["source"]["files"]:
        content = (source / file["name"]).read_bytes()
        assert file["size"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["source"]["format"] == "hf"
    assert {file["name"] for file in manifest["source"]["files"]} == set(digest(source))
    assert str(source) not in json.dumps(
        manifest
    )  # where it lay on this machine is nobody's concern
    params = tmp_path / "native" / "params"
    sizes = {name: (params / name).stat().st_size for name in digest(params)}
    assert manifest["params_files"] == sizes
    assert manifest["tensors"] == {
        tensor.name: {"shape": list(tensor.shape), "dtype": "bfloat16"}
        for tensor in checkpoint.tensors()
    }


def test_generation_defaults_survive(source, tmp_path):
    """CV38: the list of end-of-text ids is not cut to one."""
    write_native(open_checkpoint(source), tmp_path / "native")
    generation = load_model(tmp_path / "native").generation
    assert generation.eos_ids == (1, 7)
    assert generation.top_k == 20
    assert generation.bos_id == LLAMA["bos_token_id"]


def test_progress_is_told_each_tensor_once_it_is_written(source, tmp_path):
    checkpoint = open_checkpoint(source)
    seen = []
    write_native(checkpoint, tmp_path / "native", progress=lambda tensor: seen.append(tensor.name))
    assert seen == sorted(tensor.name for tensor in checkpoint.tensors())


def test_one_tensor_is_in_memory_at_a_time(source, tmp_path, monkeypatch):
    """Each array is dropped before the next is loaded, up to TensorStore's threads' reaction."""
    alive = []
    plain_load = NativeTensor.load

    def counting_load(tensor):
        deadline = time.monotonic() + 5
        while any(reference() is not None for reference in alive):
            assert time.monotonic() < deadline, "an earlier array is still referred to"
            time.sleep(0.001)
        array = plain_load(tensor)
        alive.append(weakref.ref(array))
        return array

    monkeypatch.setattr(NativeTensor, "load", counting_load)
    checkpoint = open_checkpoint(source)
    write_native(checkpoint, tmp_path / "native")
    assert len(alive) == len(list(checkpoint.tensors()))


def test_an_existing_destination_is_refused_and_untouched(source, tmp_path):
    dst = tmp_path / "native"
    write_native(open_checkpoint(source), dst)
    before = digest(dst)
    with pytest.raises(CheckpointError, match="exists already"):
        write_native(open_checkpoint(source), dst)
    assert digest(dst) == before
    assert left_beside(dst) == ["native"]


@pytest.mark.parametrize("kind", ["empty directory", "directory", "file", "symlink"])
def test_overwrite_never_replaces_anything_but_a_native_checkpoint(source, tmp_path, kind):
    dst = tmp_path / "native"
    if kind == "file":
        dst.write_text("precious")
    elif kind == "symlink":
        write_native(open_checkpoint(source), tmp_path / "elsewhere")
        dst.symlink_to(tmp_path / "elsewhere")
    else:
        dst.mkdir()
        if kind == "directory":
            (dst / "thesis.tex").write_text("precious")
    before = digest(tmp_path)
    with pytest.raises(CheckpointError, match="not a native checkpoint"):
        write_native(open_checkpoint(source), dst, overwrite=True)
    assert digest(tmp_path) == before


def test_overwrite_replaces_a_native_checkpoint(source, tmp_path):
    dst = tmp_path / "native"
    write_native(open_checkpoint(source), dst)
    write_native(open_checkpoint(source), dst, dtype="bfloat16", overwrite=True)
    assert {array.dtype for array in load_model(dst).params.values()} == {BF16}
    assert left_beside(dst) == ["native"]


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["_write_json", "_manifest", "_sync", "_move_into_place"])
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "replacing"])
def test_a_disk_that_fills_up_leaves_nothing_behind(source, tmp_path, monkeypatch, where, old):
    """CV36: nor does it harm what was there before."""
    dst = tmp_path / "native"
    if old:
        write_native(open_checkpoint(source), dst)
    before, untouched = digest(tmp_path), digest(source)
    monkeypatch.setattr(writer_module, where, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_native(open_checkpoint(source), dst, overwrite=old)
    assert digest(tmp_path) == before
    assert digest(source) == untouched
    assert left_beside(dst) == (["native"] if old else [])


def test_a_rename_that_fails_puts_the_old_checkpoint_back(source, tmp_path, monkeypatch):
    dst = tmp_path / "native"
    write_native(open_checkpoint(source), dst)
    before = digest(dst)
    plain_rename = Path.rename

    def failing_rename(path, target):
        if path.name.endswith(".partial"):
            no_space()
        return plain_rename(path, target)

    monkeypatch.setattr(Path, "rename", failing_rename)
    with pytest.raises(OSError, match="No space left"):
        write_native(open_checkpoint(source), dst, overwrite=True)
    assert digest(dst) == before
    assert left_beside(dst) == ["native"]


def test_arrays_that_do_not_fit_on_the_disk_are_an_os_error(source, tmp_path):
    """CV36: a file size limit makes the kernel refuse real writes of the arrays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    dst = tmp_path / "native"
    checkpoint = open_checkpoint(source)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_native(checkpoint, dst)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert left_beside(dst) == []


def run_python(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


KILLED = """
    import os, signal, sys
    from convert import open_checkpoint, write_native, writer
    src, dst, moment = sys.argv[1:]
    checkpoint = open_checkpoint(src)
    left = len(list(checkpoint.tensors())) // 2

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def count(tensor):
        global left
        left -= 1
        if left == 0:
            die()

    if moment == "before the last file":
        writer._manifest = die
    write_native(checkpoint, dst, progress=count if moment == "half way" else None)
"""


@pytest.mark.parametrize("moment", ["half way", "before the last file"])
def test_a_killed_conversion_leaves_nothing_that_loads(source, tmp_path, moment):
    """CV36: and the next run clears its remains away."""
    dst, untouched = tmp_path / "native", digest(source)
    assert run_python(KILLED, source, dst, moment).returncode == -9
    assert left_beside(dst) == [".native.partial"]
    assert any((tmp_path / ".native.partial").iterdir())
    for path in (dst, tmp_path / ".native.partial"):
        with pytest.raises(ValueError, match="no checkpoint|does not exist"):
            load_model(path)
    write_native(open_checkpoint(source), dst)
    assert left_beside(dst) == ["native"]
    assert set(load_model(dst).params) == {t.name for t in open_checkpoint(source).tensors()}
    assert digest(source) == untouched


def test_a_replacement_killed_between_its_renames_is_undone(source, tmp_path):
    dst = tmp_path / "native"
    write_native(open_checkpoint(source), dst)
    before = digest(dst)
    dst.rename(tmp_path / ".native.replaced")
    with pytest.raises(CheckpointError, match="exists already"):
        write_native(open_checkpoint(source), dst)
    assert digest(dst) == before


def test_two_conversions_to_one_place_do_not_mix(source, tmp_path):
    dst = tmp_path / "native"
    checkpoint = open_checkpoint(source)
    refused = []

    def intrude(tensor):
        with pytest.raises(CheckpointError, match="another conversion"):
            write_native(checkpoint, dst)
        refused.append(tensor.name)

    write_native(checkpoint, dst, progress=intrude)
    assert refused
    assert load_model(dst).arch == checkpoint.arch


MEASURED = """
    import sys
    from pathlib import Path
    from convert import open_checkpoint, write_native
    from pagedjax.loading import load_model
    src, dst, what = sys.argv[1:]
    if what == "convert":
        write_native(open_checkpoint(src), dst)
    else:
        load_model(dst, dtype="float16")
    # Not ru_maxrss, which begins with what the process that forked this one held.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.mark.slow
def test_memory_stays_within_the_largest_tensor_and_a_gibibyte(tmp_path):
    """A model of 2.1 GB in bfloat16 whose largest tensor has 0.13 GB."""
    gib = 1 << 30
    config = LLAMA | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
    }
    # The source is a hole in a file: zeros that take neither time nor disk to make.
    header, position = {}, 0
    for name, shape in tensor_shapes(config).items():
        size = int(np.prod(shape)) * 2
        offsets = [position, position + size]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
        position += size
    text = json.dumps(header).encode()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    with (tmp_path / "hf" / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    largest = 32000 * 2048 * 2
    assert position > largest + 1.5 * gib  # or holding everything would pass as well

    peaks = {}
    for what in ("convert", "load"):
        done = run_python(MEASURED, tmp_path / "hf", tmp_path / "native", what, XLA_FLAGS="")
        assert done.returncode == 0, done.stderr[-2000:]
        peaks[what] = int(done.stdout.split()[-1])
    print(f"{position=} {largest=} {peaks=}")
    assert peaks["convert"] < largest + gib
    assert peaks["load"] < position + gib  # one copy of the model, although it was cast

"""Compiled programs that a later start finds again without tracing them."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from pagedjax import SamplingParams
from pagedjax.engine.buckets import Bucket
from pagedjax.engine.compilation_cache import enable_compilation_cache, program_store
from pagedjax.engine.program_store import Program, ProgramStore
from pagedjax.engine.programs import build
from tests.support.tiny_engines import compiles, serve, tiny_engine, tiny_model, tokens_of

DEVICE = jax.devices()[0]


@pytest.fixture(autouse=True)
def jax_cache(tmp_path_factory):
    """JAX's own cache, empty: what it brings back is not kept by a store."""
    directory = tmp_path_factory.mktemp("jax")
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    full = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{n}" for n in names[1:])]
    before = [jax.config.values[name] for name in full]
    for name, value in zip(full, (str(directory), 0.0, 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield directory
    for name, value in zip(full, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def program(scale=2.0, *, name="scaled", shape=(3,), store=None, device=DEVICE):
    def scaled(x):
        return {"y": x * scale}

    function = scaled if store is None else store.renamed(scaled)
    return Program(
        name=name,
        function=jax.jit(function),
        arguments=(
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(device)),
        ),
        options=None,
    )


def kept(directory, **changes):
    store = ProgramStore(directory, DEVICE)
    build({0: program(**changes)}, store=store)
    return store


class Gpu:
    """Stands in for a GPU, on which alone an engine uses a store."""

    platform, device_kind, id = "gpu", "none", 0
    client = DEVICE.client


def test_an_engine_that_finds_its_programs_lowers_none_and_gives_the_same_tokens(tmp_path):
    """Steps, redraws with and without penalties; also the donated pool must be taken."""
    requests = [
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(temperature=1.0, seed=1, max_tokens=6),
        SamplingParams(temperature=1.0, seed=2, top_k=5, logprobs=2, max_tokens=6),
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3, max_tokens=6),
    ]
    outputs, times, store = [], [], ProgramStore(tmp_path, DEVICE)
    for _ in range(2):
        engine = tiny_engine(max_num_seqs=1, max_num_batched_tokens=8)
        runner = engine._runner
        runner.store = store
        runner.warm_up()
        times.append(runner.warm_up_times)
        outputs.append(serve(engine, [[5, 6, 7]] * 4, requests))
        assert engine.stats().compiles_after_warmup == 0
    assert times[0].kept == 0
    assert times[1].kept == times[0].programs == times[1].programs > 0
    assert times[0].lower_s > 0
    assert times[1].lower_s == times[1].compile_s == 0
    first, second = map(tokens_of, outputs)
    assert first == second


def test_a_store_for_a_gpu_makes_the_runtime_of_mosaic_kernels_known(tmp_path):
    """Importing the module does it; else a process that lowers no such kernel could load none."""
    code = """if True:
        import sys
        from pathlib import Path
        import jax
        from pagedjax.engine.program_store import ProgramStore
        class Device:
            platform, device_kind, id, client = sys.argv[2], "none", 0, jax.devices()[0].client
        ProgramStore(Path(sys.argv[1]), Device)
        print("jax.experimental.mosaic.gpu.core" in sys.modules)
    """
    for platform, expected in (("gpu", "True"), ("cpu", "False")):
        command = [sys.executable, "-c", code, str(tmp_path), platform]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected]


@pytest.mark.parametrize("index", [0, 3])
def test_what_was_kept_is_found_without_a_compile_and_computes_the_same(tmp_path, index):
    device = jax.devices()[index]
    wanted, x = program(device=device), jax.device_put(jnp.ones(3), device)
    build({0: wanted}, store=ProgramStore(tmp_path, device))
    with compiles() as compiled:
        y = ProgramStore(tmp_path, device).load(wanted)(x)["y"]
    assert compiled == []
    assert np.asarray(y).tolist() == [2.0, 2.0, 2.0]
    assert y.devices() == {device}


@pytest.mark.parametrize("change", [dict(name="other"), dict(shape=(4,))])
def test_a_program_with_another_name_or_other_arguments_is_not_found(tmp_path, change):
    assert kept(tmp_path).load(program(**change)) is None


@pytest.mark.parametrize("change", ["options", "flags", "device", "source", "context"])
def test_nothing_is_found_in_another_environment(tmp_path, monkeypatch, change):
    found, device, options = program(), DEVICE, None
    kept(tmp_path)
    if change == "options":
        found = dataclasses.replace(found, options={"xla_llvm_disable_expensive_passes": True})
    elif change == "flags":
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_dump_to=nowhere")
    elif change == "device":
        device = jax.devices()[1]
    elif change == "source":
        monkeypatch.setattr("pagedjax.engine.program_store._PACKAGES", ("pagedjax",))
    else:
        options = "highest"
    with jax.default_matmul_precision(options):
        assert ProgramStore(tmp_path, device).load(found) is None
    assert ProgramStore(tmp_path, DEVICE).load(program()) is not None or change in (
        "flags",
        "source",
    )


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "foreign"])
def test_a_damaged_file_counts_as_absent_and_is_replaced(tmp_path, jax_cache, damage):
    store = kept(tmp_path)
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(
        {"empty": b"", "torn": content[:-7], "flipped": content, "foreign": b"x" * 99}[damage]
    )
    assert store.load(program()) is None
    for entry in jax_cache.iterdir():
        entry.unlink()
    _, times = build({0: program()}, store=store)
    assert times.kept == 0
    assert store.load(program()) is not None


def test_a_directory_that_cannot_be_made_costs_the_store_alone(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = ProgramStore(tmp_path / "file" / "programs", DEVICE)
    with pytest.warns(UserWarning, match="not kept for the next start"):
        built, _ = build({0: program()}, store=store)
    assert np.asarray(built[0](jnp.ones(3))["y"]).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("others", ["group", "world", "owner"])
def test_nothing_is_loaded_from_a_directory_that_others_may_write_to(tmp_path, monkeypatch, others):
    """A file that is loaded is run, whoever has written it."""
    directory = tmp_path / "programs"
    store = kept(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert store.load(program()) is not None
    if others == "owner":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    else:
        directory.chmod(0o720 if others == "group" else 0o702)
    assert store.load(program()) is None
    with pytest.warns(UserWarning, match="may write to"):
        build({0: program(3.0, name="other")}, store=store)
    assert len(list(directory.iterdir())) == 1


def test_a_disk_that_is_full_is_left_as_it_was(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    store = ProgramStore(tmp_path, DEVICE)
    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match="no space left"):
        build({0: program()}, store=store)
    assert list(tmp_path.iterdir()) == []


def test_the_programs_used_longest_ago_go_first(tmp_path):
    for age, scale in enumerate((1.0, 2.0, 3.0)):
        kept(tmp_path, scale=scale, name=str(scale))
        for path in tmp_path.iterdir():
            status = path.stat()
            os.utime(path, (status.st_atime, status.st_mtime - 100 * (age < 2)))
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    store = ProgramStore(tmp_path, DEVICE, most_bytes=2 * size)
    assert store.load(program(name="1.0")) is not None  # the oldest, but just used
    store.trim()
    found = [store.load(program(name=name)) is not None for name in ("1.0", "2.0", "3.0")]
    assert found == [True, False, True]


def test_what_jaxs_cache_brings_back_is_not_written_again(tmp_path, jax_cache):
    """A CPU's runtime writes such a program without its functions, and fails when it is run."""
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        jax.clear_caches()
        store = ProgramStore(directory, DEVICE)
        built, _ = build({0: program(store=store)}, store=store)
        assert np.asarray(built[0](jnp.ones(3))["y"]).tolist() == [2.0, 2.0, 2.0]
    assert any(jax_cache.iterdir())
    assert len(list(first.iterdir())) == 1
    assert not second.exists()


def test_a_new_environment_gets_nothing_from_jaxs_cache_that_it_could_not_keep(
    tmp_path, jax_cache, monkeypatch
):
    """Else the first start after an update would keep nothing, and none after it would be quick."""
    for packages in (("pagedjax",), ("pallas_kernels",)):
        jax.clear_caches()
        monkeypatch.setattr("pagedjax.engine.program_store._PACKAGES", packages)
        store = ProgramStore(tmp_path / "programs", DEVICE)
        build({0: program(store=store)}, store=store)
    assert len(list((tmp_path / "programs").iterdir())) == 2


def test_steps_of_other_models_and_sizes_have_other_names():
    """All that a step's code depends on besides the arrays' shapes."""
    runner = tiny_engine()._runner
    windowed = tiny_engine(tiny_model(windows=(16, None)))._runner
    names = {
        runner.program(Bucket(8, 8, True)).name,
        runner.program(Bucket(8, 8, False)).name,
        windowed.program(Bucket(8, 8, True)).name,
        tiny_engine(implementation="xla")._runner.program(Bucket(8, 8, True)).name,
    }
    assert len(names) == 4


def test_a_store_is_there_with_the_caches_own_directory_and_unedited_source(
    tmp_path, monkeypatch, jax_cache
):
    """Edited source is not what the process runs: programs would be kept by the wrong name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert program_store(Gpu()) is None  # JAX's cache is elsewhere, where somebody else put it
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compilation_cache()
    assert program_store(DEVICE) is None
    build({0: program()}, store=program_store(Gpu()))
    assert len(list((tmp_path / "pagedjax" / "programs").iterdir())) == 1
    monkeypatch.setattr("pagedjax.engine.program_store._PACKAGES", ("pagedjax",))
    assert program_store(Gpu()) is None

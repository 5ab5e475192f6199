"""Where a snapshot is to be: behind a link, or beside what a killed process has left."""

import os

from pagedjax.sampling_params import SamplingParams
from tests.support.tiny_engines import drain, random_prompts, tiny_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def test_what_a_killed_process_of_the_same_id_left_is_in_nobodys_way(tmp_path):
    """In a container the ids are the same after each start."""
    engine = tiny_engine()
    engine.snapshot(tmp_path / "s")
    for suffix in ("draft", "old"):
        (tmp_path / f".s.{os.getpid()}.{suffix}" / "left").mkdir(parents=True)
    engine.snapshot(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_link_goes_on_to_point_to_the_newest_snapshot(tmp_path):
    engine, link = tiny_engine(), tmp_path / "latest"
    link.symlink_to(tmp_path / "s", target_is_directory=True)
    for length in (20, 9):
        engine.add_request("a", None, random_prompts([length])[0], GREEDY)
        engine.step()
        engine.snapshot(link)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "s"]
        assert link.is_symlink()
        (output,) = tiny_engine().restore(link)
        assert len(output.prompt_token_ids) == length
        engine.abort("a")
        drain(engine)

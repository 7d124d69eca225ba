"""A model's directory is made once, and completely or not at all."""

import threading
from pathlib import Path

import pytest

from deploy.models.directory import made_in


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".making")]


def test_a_failed_build_of_a_model_leaves_no_directory(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        (draft / "config.json").write_text("{}")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        made_in(tmp_path / "m", "recipe", fail)
    assert not (tmp_path / "m").exists() and not leftovers(tmp_path)


def test_only_one_of_several_concurrent_builders_makes_the_model(tmp_path: Path) -> None:
    together, made = threading.Barrier(4), []

    def make() -> None:
        together.wait()
        made.append(made_in(tmp_path / "m", "recipe", lambda draft: (draft / "a").write_text("a")))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, False, False, True]


def test_a_model_is_made_again_when_its_recipe_changes(tmp_path: Path) -> None:
    assert made_in(tmp_path / "m", "first", lambda draft: (draft / "one").write_text(""))
    assert made_in(tmp_path / "m", "second", lambda draft: (draft / "other").write_text(""))
    assert (tmp_path / "m" / "other").exists() and not (tmp_path / "m" / "one").exists()

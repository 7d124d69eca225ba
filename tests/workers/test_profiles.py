"""The profile file: what was saved is found, under its own key only, and damage is told."""

from pathlib import Path

import pytest

from placement.iteration.latency import CONSERVATIVE, RegionError
from workers.profiles import Profile, ProfileKey, ProfileStore, ProfileStoreError

KEY = ProfileKey("qwen3-8b", "H200", "0.32.0")
PROFILE = Profile(CONSERVATIVE, (RegionError("all", 10, 0.01, 0.05, 0.2),), 0.004, 1.0)


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "fleet" / "profiles.json")
    assert store.find(KEY) is None
    store.save(KEY, PROFILE)
    assert store.find(KEY) == PROFILE


@pytest.mark.parametrize("field", ["model", "hardware", "vllm"])
def test_a_profile_of_something_else_does_not_fit(tmp_path: Path, field: str) -> None:
    store = ProfileStore(tmp_path / "profiles.json")
    store.save(KEY, PROFILE)
    other = {"model": KEY.model, "hardware": KEY.hardware, "vllm": KEY.vllm, field: "another"}
    assert store.find(ProfileKey(**other)) is None


def test_saving_one_keeps_the_others(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles.json")
    other = ProfileKey("qwen3-8b", "H100", "0.32.0")
    store.save(KEY, PROFILE)
    store.save(other, PROFILE)
    assert store.find(KEY) == store.find(other) == PROFILE


@pytest.mark.parametrize("content", ["{", "[]", '{"qwen3-8b | H200 | vllm 0.32.0": {"model": {}}}'])
def test_a_damaged_file_is_told_not_guessed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profiles.json"
    path.write_text(content)
    with pytest.raises(ProfileStoreError, match=r"profiles\.json"):
        ProfileStore(path).find(KEY)

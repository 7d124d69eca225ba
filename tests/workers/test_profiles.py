"""Saved profiles are found under their own key only, and a damaged file is reported."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from placement.scheduling.latency_model import CONSERVATIVE, RegionError
from workers.profiles import Profile, ProfileKey, ProfileStore, ProfileStoreError

KEY = ProfileKey("qwen3-8b", "bfloat16", "H200", 2, 1, 400.0, "graphs piecewise", "0.32.0")
PROFILE = Profile(CONSERVATIVE, (RegionError("all", 10, 0.01, 0.05, 0.2),), 0.004, 1.0)


def test_a_saved_profile_is_found(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "fleet" / "profiles.json")
    assert store.coefficients() == {}
    store.save(KEY, PROFILE)
    assert store.coefficients() == {str(KEY): asdict(CONSERVATIVE)}
    assert store.measured_at(KEY) == PROFILE.measured_at
    assert store.measured_at(replace(KEY, tensor=4)) is None


OTHERS = {
    **dict.fromkeys(("model", "dtype", "hardware", "graphs", "vllm"), "another"),
    "tensor": 1,
    "pipeline": 2,
    "power_cap_w": 500.0,
}


@pytest.mark.parametrize("field", [one.name for one in fields(ProfileKey)])
def test_a_profile_with_another_key_is_not_found(tmp_path: Path, field: str) -> None:
    store = ProfileStore(tmp_path / "profiles.json")
    store.save(KEY, PROFILE)
    assert str(replace(KEY, **{field: OTHERS[field]})) not in store.coefficients()


def test_a_profile_without_a_cap_differs_from_one_with_a_cap() -> None:
    assert str(replace(KEY, power_cap_w=None)) != str(KEY)


def test_saving_a_profile_keeps_the_others(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path / "profiles.json")
    other = replace(KEY, hardware="H100")
    store.save(KEY, PROFILE)
    store.save(other, PROFILE)
    assert store.coefficients() == dict.fromkeys((str(KEY), str(other)), asdict(CONSERVATIVE))


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({str(KEY): {"model": {}}})])
def test_a_damaged_file_of_profiles_is_reported(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profiles.json"
    path.write_text(content)
    with pytest.raises(ProfileStoreError, match=r"profiles\.json"):
        ProfileStore(path).coefficients()

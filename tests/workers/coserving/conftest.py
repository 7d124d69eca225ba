"""Fixture: the small model, made once per session."""

from pathlib import Path

import pytest

from deploy.small_model import ModelShape, make_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "small"
    make_model(out, ModelShape())
    return out

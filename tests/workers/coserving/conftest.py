"""The small model, made once a session."""

from pathlib import Path

import pytest

from deploy.model.make import make_model
from deploy.model.shape import ModelShape


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "small"
    make_model(out, ModelShape())
    return out

"""The models that are generated on this machine: `smollm2` and `small`."""

import logging
from collections.abc import Callable
from pathlib import Path

from deploy.errors import DeployError
from deploy.fleet.engine_needs import model_directory
from deploy.fleet.schema import SMALL_MODEL, FleetSpec
from deploy.home import FleetHome
from deploy.models import hub, smollm2
from deploy.models.parsers import Choice, ModelText, choose, text_in
from deploy.small_model import make_model

_logger = logging.getLogger("conserve.deploy.model")


def ensure_model(fleet: FleetSpec, home: FleetHome, tell: Callable[[str], None] = _logger.info) -> None:
    """Make the fleet's model on this node if it is a built-in one. Several keepers may do so at once."""
    if fleet.model.path == smollm2.NAME:
        smollm2.ensure(tell)
    elif fleet.model.path == SMALL_MODEL and make_model(home.model):
        tell(f"small model made in {home.model}")
    elif fleet.model.path != SMALL_MODEL and model_directory(fleet.model.path) is None:
        try:  # the files that its parsers are chosen by; an engine fetches the rest
            hub.describe(fleet.model.path)
        except DeployError as error:
            _logger.warning("no parsers are chosen for the model: %s", error)


def parsers(model: str) -> tuple[Choice, ...]:
    """Return which of vLLM's parsers the model's answers need, as far as its files are on this machine."""
    if model in (SMALL_MODEL, smollm2.NAME):
        return choose(ModelText("llama" if model == smollm2.NAME else "qwen3", smollm2.TEMPLATE))
    directory = model_directory(model)
    return choose(text_in(directory) if directory else None)


def model_path(fleet: FleetSpec, home: FleetHome) -> str:
    """Return the directory or the Hugging Face id that engines are given."""
    if fleet.model.path == SMALL_MODEL:
        return str(home.model)
    if fleet.model.path == smollm2.NAME:
        return str(smollm2.directory())
    path = Path(fleet.model.path).expanduser()
    return str(path.resolve()) if path.is_dir() else fleet.model.path

"""Provides a fleet's model on this machine: a generated one, one in a directory, or one of the Hub."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deploy.errors import DeployError
from deploy.fleet.model_architecture import model_directory
from deploy.fleet.schema import SMALL_MODEL, FleetSpec
from deploy.home import FleetHome
from deploy.models import hub, smollm2
from deploy.models.parsers import Choice, ModelText, choose, text_in
from deploy.small_model import make_model

_logger = logging.getLogger("conserve.deploy.model")

TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Options with which engines load other files than those that are fetched here.
OTHER_FILES = ("revision", "download-dir", "load-format", "config-format", "tokenizer")


def ensure_model(fleet: FleetSpec, home: FleetHome, tell: Callable[[str], None] = _logger.info) -> None:
    """Make the fleet's model on this node if it is a built-in one. Keepers may call this at the same time."""
    if fleet.model.path == smollm2.NAME:
        smollm2.ensure(tell)
    elif fleet.model.path == SMALL_MODEL and make_model(home.model):
        tell(f"small model made in {home.model}")
    elif fleet.model.path != SMALL_MODEL and model_directory(fleet.model.path) is None:
        try:  # the files from which its parsers are chosen; an engine fetches the rest
            hub.describe(fleet.model.path)
        except DeployError as error:
            if fetched_first(fleet):
                raise
            _logger.warning("no parsers are chosen for the model: %s", error)


def fetch_model(fleet: FleetSpec, tell: Callable[[str], None]) -> None:
    """Download a model of the Hub in advance, because the time in which engines must start is limited."""
    if fetched_first(fleet) and not is_here(fleet.model.path):
        tell(f"fetching {fleet.model.path} from Hugging Face")
        hub.fetch(fleet.model.path)


def fetched_first(fleet: FleetSpec) -> bool:
    """Tell whether a model of the Hub is fetched before engines start.

    On several machines, each engine downloads what its machine lacks.
    """
    other = fleet.model.path == SMALL_MODEL or any(name in fleet.engine.args for name in OTHER_FILES)
    return fleet.ray.address is None and not other


def lacking_file(directory: Path) -> str | None:
    """Return a file that `directory` lacks, which an engine would miss only after a minute; else None."""
    with suppress(OSError):
        index = hub.index_of(file.name for file in directory.iterdir())
        for name in hub.named_in(directory / index):
            if not (directory / name).is_file():
                return name
    return None if any(any(directory.glob(one)) for one in TOKENIZERS) else "tokenizer.json"


def is_here(model: str) -> bool:
    """Tell whether a model is on this machine; an interrupted download does not count."""
    if model == smollm2.NAME or Path(model).expanduser().is_dir():
        return True
    cached = model_directory(model)
    if cached is None or lacking_file(cached):
        return False
    return any(any(cached.glob(one)) for one in WEIGHTS)


def parsers(model: str) -> tuple[Choice, ...]:
    """Return which of vLLM's parsers the model's answers need, as its files on this machine tell."""
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

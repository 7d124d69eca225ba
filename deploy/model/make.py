"""Write the small model to a directory, once: the same shape gives the same bytes."""

import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from safetensors.numpy import save_file

from deploy.model.shape import ModelShape
from deploy.model.tokenizer import write_tokenizer
from deploy.model.vocabulary import END_OF_TURN, PADDING, token_id
from deploy.model.weights import make_weights

RECIPE = "conserve.json"
RECIPE_VERSION = 2  # raise when the same shape would give other files


def make_model(directory: Path, shape: ModelShape | None = None) -> bool:
    """Make the model unless `directory` already holds it; says whether it was written.

    It is written beside `directory` and moved into place: an interrupted run leaves nothing half made.
    """
    shape = shape or ModelShape()
    recipe = json.dumps({"version": RECIPE_VERSION, **asdict(shape)}, indent=2) + "\n"
    made = directory / RECIPE
    if made.exists() and made.read_text() == recipe:
        return False
    if directory.exists() and any(directory.iterdir()) and not made.exists():
        raise FileExistsError(f"{directory} holds something else; choose an empty directory for the model")
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".making-", dir=directory.parent))
    try:
        _write(draft, shape)
        (draft / RECIPE).write_text(recipe)
        draft.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


def _write(directory: Path, shape: ModelShape) -> None:
    save_file(make_weights(shape), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(shape.hugging_face_config(), indent=2) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": token_id(END_OF_TURN),
        "pad_token_id": token_id(PADDING),
    }
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    write_tokenizer(directory, shape.max_context)

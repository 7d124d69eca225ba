"""Model directories that are generated on this machine: as a whole or not at all, and only once."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from deploy.errors import DeployError

RECIPE = "conserve.json"  # what the directory was made from


def made_in(directory: Path, recipe: str, write: Callable[[Path], None]) -> bool:
    """Call `write` to make a model unless `directory` holds one of this `recipe`; return whether it was made.

    `write` gets a temporary directory, which becomes `directory` when it is complete: an interrupted run
    leaves no partial model. Of several processes that call this at the same time, one makes the model.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = directory / RECIPE
        if made.exists() and made.read_text() == recipe:
            return False
        if directory.exists() and any(directory.iterdir()) and not made.exists():
            raise DeployError(f"{directory} holds something else; choose an empty directory for the model")
        draft = Path(tempfile.mkdtemp(prefix=".making-", dir=directory.parent))
        try:
            write(draft)
            (draft / RECIPE).write_text(recipe)
            draft.chmod(0o755)
            if directory.exists():
                shutil.rmtree(directory)
            os.replace(draft, directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return True

"""Looks up a model on the Hugging Face Hub, and downloads its files.

`HF_TOKEN`, `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meaning.
"""

import json
import os
import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urlsplit

from deploy.errors import DeployError

INSTEAD = "give a directory with config.json, a Hugging Face id as in Qwen/Qwen3-0.6B, or smollm2"
REACH_S = 1.0  # to connect; a resolver that does not answer takes 20 s to give up
WAIT_S = 5.0
TEXT_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")
FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")  # beside weights
MISTRALS = "consolidated*.safetensors"  # the format that vLLM prefers where a model has both


def cache() -> Path:
    """Return the folder of downloaded models, by huggingface_hub's rules but without its import."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    everything = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HOME") or everything).expanduser() / "hub"


def describe(model: str) -> int:
    """Download the small files of a model; return the size of its weights."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(WAIT_S)))
    from huggingface_hub import HfApi, constants, hf_hub_download

    if not (constants.HF_HUB_OFFLINE or reaches(constants.ENDPOINT)):
        raise DeployError(_SILENT.format(model))
    with _errors(model, _SILENT):
        files = HfApi().model_info(model, timeout=WAIT_S, files_metadata=True).siblings or []
        there = [file.rfilename for file in files]
        if "config.json" not in there:
            raise DeployError(f"{model} has no config.json, so that vLLM cannot serve it: {INSTEAD}")
        for name in TEXT_FILES:
            if name in there:
                hf_hub_download(model, name)
        weights = _weights(model, there)
    return sum(file.size or 0 for file in files if file.rfilename in weights)


def fetch(model: str) -> None:
    """Download all files that engines load, with a progress bar: an engine that downloads seems to hang."""
    from huggingface_hub import HfApi, snapshot_download

    with _errors(model, _LOST):
        there = HfApi().list_repo_files(model)
        text = [name for name in there if "/" not in name and any(fnmatch(name, one) for one in FILES)]
        snapshot_download(model, allow_patterns=[*text, *_weights(model, there)])


def index_of(names: Iterable[str]) -> str:
    """Return the name of the index that lists the weights which vLLM loads from files `names`."""
    kind = "consolidated" if any(fnmatch(name, MISTRALS) for name in names) else "model"
    return f"{kind}.safetensors.index.json"


def named_in(index: Path) -> list[str]:
    """Return the files that an index of weights names; an empty list if the index is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        return sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    return []


def _weights(model: str, there: Sequence[str]) -> list[str]:
    """Return the weight files in `there` that vLLM loads, without copies in folders or in other formats."""
    from huggingface_hub import hf_hub_download

    files = [name for name in there if "/" not in name]
    index = index_of(files)
    if index in files and (named := named_in(Path(hf_hub_download(model, index)))):
        return named
    return [name for name in files if fnmatch(name, MISTRALS)] or [
        name for name in files if name.endswith(".safetensors")
    ]


_SILENT = f"{{}} is not on this machine, and Hugging Face cannot be reached: {INSTEAD}"
_AGAIN = "run it again: it continues where it stopped"
_LOST = f"{{}} is not whole, because the connection to Hugging Face is lost ({{}}): {_AGAIN}"


@contextmanager
def _errors(model: str, lost: str) -> Iterator[None]:
    """Turn errors of the Hub and of files into a DeployError, whose text is `lost` for a lost connection."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, RuntimeError) as error:
        # hf_xet, which downloads large files, raises RuntimeError. Only the cause of LocalEntryNotFoundError
        # says why a file was not fetched.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
        raise DeployError(_sentence(model, cause or error) or lost.format(model, error)) from error


def _sentence(model: str, error: BaseException) -> str | None:
    """Return a sentence that explains the error; None if the connection is lost."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"{model} is gated: accept its licence on its page, and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        why = "private, or there is no such model (with HF_TOKEN set, yours are found)"
        return f"Hugging Face does not show {model}: it is {why}; {INSTEAD}"
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        do = f"wait a minute, and {_AGAIN}" if status == 429 or status >= 500 else INSTEAD
        do = "make a valid HF_TOKEN, or unset it" if status in (401, 403) else do
        return f"Hugging Face answers {status} for {model}: {do}"
    if isinstance(error, HFValidationError):
        return f"{model} is neither a directory nor an id of Hugging Face: {INSTEAD}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{model} is not on this machine, and HF_HUB_OFFLINE is set: {INSTEAD}"
    lost = isinstance(error, ConnectionError | TimeoutError)
    if isinstance(error, OSError) and error.strerror and not lost:
        return f"{model} cannot be written: {error.filename or 'a file'}: {error.strerror}; then {_AGAIN}"
    return None


def reaches(url: str) -> bool:
    """Tell whether a connection to the server of `url` succeeds soon; behind a proxy, say yes untried."""
    parts, connected = urlsplit(url), threading.Event()
    if urllib.request.getproxies().get(parts.scheme):
        return True

    def connect() -> None:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with suppress(OSError), socket.create_connection((parts.hostname or "", port), REACH_S):
            connected.set()

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(REACH_S)
    return connected.is_set()

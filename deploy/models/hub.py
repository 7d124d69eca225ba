"""Looks up a model on the Hugging Face Hub, and downloads its files.

`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meaning.
"""

import os
import socket
import threading
import urllib.request
from contextlib import suppress
from urllib.parse import urlsplit

from deploy.errors import DeployError

INSTEAD = "give a directory with config.json, a Hugging Face id as in Qwen/Qwen3-0.6B, or smollm2"
REACH_S = 1.0  # to connect; a resolver that does not answer takes 20 s to give up
WAIT_S = 5.0
TEXT_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")
FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.py")


def describe(model: str) -> int:
    """Download the small files of a model; return their directory and the size of its weights."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(WAIT_S)))
    import httpx
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    silent = f"{model} is not on this machine, and Hugging Face cannot be reached: {INSTEAD}"
    if not (constants.HF_HUB_OFFLINE or reaches(constants.ENDPOINT)):
        raise DeployError(silent)
    try:
        files = HfApi().model_info(model, timeout=WAIT_S, files_metadata=True).siblings or []
        there = {file.rfilename for file in files}
        found = [hf_hub_download(model, name) for name in TEXT_FILES if name in there]
    except GatedRepoError as error:
        raise DeployError(f"{model} is gated: accept its licence on its page, and set HF_TOKEN") from error
    except HFValidationError as error:
        raise DeployError(f"{model} is neither a directory nor an id of Hugging Face: {INSTEAD}") from error
    except OfflineModeIsEnabled as error:
        raise DeployError(f"{model} is not on this machine, and HF_HUB_OFFLINE is set: {INSTEAD}") from error
    except HfHubHTTPError as error:
        why = "private, or there is no such model (with HF_TOKEN set, yours are found)"
        raise DeployError(f"Hugging Face does not show {model}: it is {why}; {INSTEAD}") from error
    except (httpx.HTTPError, OSError) as error:
        raise DeployError(silent) from error
    if not found or not found[0].endswith("config.json"):
        raise DeployError(f"{model} has no config.json, so that vLLM cannot serve it: {INSTEAD}")
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))


def reaches(url: str) -> bool:
    """Tell whether a connection to a server succeeds soon; behind a proxy it is not tried."""
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


def fetch(model: str) -> None:
    """Download all that an engine loads, with a progress bar, as an engine that downloads seems to hang."""
    from huggingface_hub import snapshot_download

    snapshot_download(model, allow_patterns=list(FILES))

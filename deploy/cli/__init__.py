"""The `conserve` command: one file a command, found by itself."""

import importlib
import pkgutil

import typer

from deploy.cli.errors import errors_as_sentences

app = typer.Typer(
    name="conserve",
    help="Conversation-level orchestrator for agentic LLM serving on vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def load_commands() -> None:
    """Each module `deploy/cli/commands/NAME.py` has a `register(app)`; that is all a new command needs."""
    from deploy.cli import commands

    for module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda module: module.name):
        importlib.import_module(f"{commands.__name__}.{module.name}").register(app)


def main() -> None:
    load_commands()
    with errors_as_sentences():
        app()

"""The `conserve` command."""

import typer

from deploy.cli.common import errors_as_sentences


def application() -> typer.Typer:
    """All commands, in the order of the help."""
    from deploy.cli.commands import batch, look, power, profile, run, simulate, top, workload

    app = typer.Typer(
        name="conserve",
        help="Conversation-level orchestrator for agentic LLM serving on vLLM.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for module in (run, look, top, batch, workload, simulate, profile, power):
        module.register(app)
    return app


def main() -> None:
    with errors_as_sentences():
        application()(prog_name="conserve")

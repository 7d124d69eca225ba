"""The `conserve` command."""

import typer

from deploy.cli.commands import batch, key, look, power, profile, run, simulate, workload
from deploy.cli.common import errors_as_sentences

app = typer.Typer(
    name="conserve",
    help="Conversation-level orchestrator for agentic LLM serving on vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for module in (run, look, workload, simulate, profile):  # in the order of the help
    app.add_typer(module.app)
app.add_typer(batch.app, name="batch")
app.add_typer(run.journal_app, name="journal")
app.add_typer(key.app, name="key")
app.add_typer(workload.traces, name="trace")
app.add_typer(power.app, name="power")


def main() -> None:
    with errors_as_sentences():
        app(prog_name="conserve")

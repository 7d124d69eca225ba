"""Registers the commands of `conserve`, each of which has a module in `commands`."""

import typer

from deploy.cli.commands import (
    advise,
    batch,
    check,
    doctor,
    down,
    journal,
    key,
    logs,
    plan,
    power,
    profile,
    replay,
    report,
    run,
    serve_model,
    simulate,
    status,
    targets,
    top,
    trace,
    up,
    version,
)

app = typer.Typer(
    name="conserve",
    help="Serve coding agents on your own GPUs: vLLM engines as one fleet behind one endpoint.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    serve_model.serve
)
for command in (  # in the order of the help
    *(
        check.check,
        doctor.doctor,
        up.up,
        down.down,
        status.status,
        top.top,
        logs.logs,
        advise.advise,
        targets.targets,
    ),
    run.run,
    *(replay.replay, report.report, simulate.simulate, plan.plan, profile.profile, version.version),
):
    app.command()(command)
for group in (batch, journal, key, trace, power):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])

"""The commands. A module here with `register(app: typer.Typer)` is one."""

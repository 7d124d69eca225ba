"""conserve key new|list|revoke: the file of API keys. Gateways take what is changed in it within seconds."""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from deploy.cli.common import FleetOption, home_of
from deploy.errors import DeployError
from deploy.fleet import load_fleet
from deploy.fleet.key_types import seconds
from router.auth.keys import Key, Limits, Scope, hash_secret
from router.auth.keys_file import load_keys, parse_keys
from workers.processes import write_atomically

app = typer.Typer(no_args_is_help=True, help="API keys: make, list and revoke them.")

SECRET_BYTES = 32

File = Annotated[Path | None, typer.Option("--file", help="the keys file; else gateway.keys_file of --fleet")]


@app.command("new")
def new(
    owner: Annotated[str, typer.Option(help="whose conversations, files and batches it sees")],
    expires: Annotated[str | None, typer.Option(help="a day, or a time from now: 2027-01-31, 90d")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="the only model it may use; may be repeated")
    ] = None,
    scope: Annotated[list[Scope] | None, typer.Option(help="may be repeated; else serve")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    turns: Annotated[int | None, typer.Option(help="at once", min=1)] = None,
    id: Annotated[str | None, typer.Option(help="its name in logs; else a new one")] = None,
    file: File = None,
    fleet: FleetOption = None,
) -> None:
    """Print a new key, once: the file gets its hash."""
    secret = f"ck-{secrets.token_urlsafe(SECRET_BYTES)}"
    entry: dict[str, Any] = {
        "id": id or f"key-{secrets.token_hex(4)}",
        "owner": owner,
        "hash": hash_secret(secret),
    }
    if scope:
        entry["scopes"] = [str(one) for one in scope]
    if model:
        entry["models"] = model
    if expires:
        entry["expires"] = _moment(expires)
    limits = Limits(requests_per_minute, tokens_per_minute, turns)
    if limits != Limits():
        entry["limits"] = _set(limits)
    path = _path(file, fleet)
    _edit(path, lambda text: _with(text, entry))
    print(secret)
    Console(stderr=True).print(
        f"{entry['id']} of {owner} is in {path}; the key is not kept anywhere: store it now", markup=False
    )


@app.command("list")
def list_keys(file: File = None, fleet: FleetOption = None) -> None:
    """The keys in the file."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("id", "owner", "scopes", "models", "expires", "limits"):
        table.add_column(heading)
    for key in load_keys(_path(file, fleet)):
        scopes, models = " ".join(sorted(key.scopes)), " ".join(key.models) or "all"
        limits = " ".join(f"{name}={most}" for name, most in _set(key.limits).items())
        table.add_row(key.id, key.owner, scopes, models, _until(key), limits)
    Console().print(table)


@app.command("revoke")
def revoke(
    id: Annotated[str, typer.Argument(help="as in `conserve key list`")],
    file: File = None,
    fleet: FleetOption = None,
) -> None:
    """Take a key out of the file; what its owner has in the fleet stays."""
    path = _path(file, fleet)
    _edit(path, lambda text: _without(text, id, path))
    print(f"{id} is no key any more")


def _set(limits: Limits) -> dict[str, Any]:
    return {name: most for name, most in vars(limits).items() if most is not None}


def _path(file: Path | None, fleet: str | None) -> Path:
    if file is not None:
        return file
    named = fleet is not None and fleet.endswith((".yaml", ".yml"))
    from_file = Path(str(fleet)) if named else home_of(fleet).fleet_file
    keys = load_fleet(from_file).gateway.keys_file
    if keys is None:
        raise DeployError(f"{from_file} has no gateway.keys_file: set it, or say --file")
    return Path(keys).expanduser()


def _moment(given: str) -> str:
    try:
        later = seconds(given)
    except ValueError:
        return given  # a day or a time, which the file's reader checks
    assert isinstance(later, float)
    return datetime.fromtimestamp(time.time() + later, UTC).isoformat(timespec="seconds")


def _until(key: Key) -> str:
    if key.expires is None:
        return "never"
    shown = datetime.fromtimestamp(key.expires, UTC).isoformat(sep=" ", timespec="minutes")
    return f"{shown} (over)" if key.expires <= time.time() else shown


def _edit(path: Path, change: Callable[[str], str]) -> None:
    """Who edits at the same time loses no change, and what would be wrong is not written."""
    path = path.resolve()
    with _alone(path.parent):
        text = path.read_text() if path.exists() else "[]\n"
        parse_keys(text, str(path))
        changed = change(text)
        parse_keys(changed, str(path))
        before = path.stat() if path.exists() else None
        write_atomically(path, changed, before.st_mode & 0o777 if before is not None else 0o600)
        if before is not None:  # or the gateways might be kept from it
            with suppress(PermissionError):
                os.chown(path, before.st_uid, before.st_gid)
            path.chmod(before.st_mode & 0o777)  # whatever the umask


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        held = os.open(folder, os.O_RDONLY)
    except OSError as wrong:
        raise DeployError(f"{folder}: {wrong.strerror}") from wrong
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _with(text: str, entry: dict[str, Any]) -> str:
    root = yaml.compose(text)
    if root is None or not root.value:
        text, indent = "", ""
    else:
        _check_block(root)
        indent = " " * root.start_mark.column
    lines = yaml.safe_dump([entry], sort_keys=False).splitlines()
    return f"{text.rstrip()}\n".lstrip("\n") + "".join(f"{indent}{line}\n" for line in lines)


def _without(text: str, id: str, path: Path) -> str:
    root = yaml.compose(text)
    ids = [key.id for key in parse_keys(text, str(path))]
    if root is None or id not in ids:
        raise DeployError(f"there is no key {id} in {path}; it has {', '.join(ids) or 'none'}")
    _check_block(root)
    lines, starts = text.splitlines(keepends=True), [one.start_mark.line for one in root.value]
    index = ids.index(id)
    end = starts[index + 1] if index + 1 < len(starts) else len(lines)
    left = "".join(lines[: starts[index]] + lines[end:])
    return left if len(ids) > 1 else "[]\n"


def _check_block(root: yaml.Node) -> None:
    if isinstance(root, yaml.CollectionNode) and root.flow_style:
        raise DeployError("the file's list is in brackets: edit it by hand, or begin each entry with '-'")

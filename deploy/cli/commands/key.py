"""conserve key new|list|revoke: edit the file of API keys. Gateways read a changed file within seconds."""

import fcntl
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
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
from router.auth.keys import Key, Limits, Scope, hash_secret
from router.auth.keys_file import load_keys, parse_keys
from router.settings import seconds
from workers.processes import write_atomically

app = typer.Typer(no_args_is_help=True, help="API keys: make, list and revoke them.")

SECRET_BYTES = 32

File = Annotated[Path | None, typer.Option("--file", help="The keys file; else gateway.keys_file of --fleet")]
Models = Annotated[list[str] | None, typer.Option(help="The only model it may use; may be repeated")]
Scopes = Annotated[list[Scope] | None, typer.Option(help="May be repeated; else serve")]


@app.command("new")
def new(
    owner: Annotated[str, typer.Option(help="Owner of the conversations, files and batches that it sees")],
    expires: Annotated[str | None, typer.Option(help="A day, or a time from now: 2027-01-31, 90d")] = None,
    model: Models = None,
    scope: Scopes = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    turns: Annotated[int | None, typer.Option(help="Concurrent turns", min=1)] = None,
    id: Annotated[str | None, typer.Option(help="Its name in logs; else a new one")] = None,
    file: File = None,
    fleet: FleetOption = None,
) -> None:
    """Make a key and print it. It cannot be shown again, because the file stores only its hash."""
    secret = f"ck-{secrets.token_urlsafe(SECRET_BYTES)}"
    entry: dict[str, Any] = {
        "id": id or f"key-{secrets.token_hex(4)}",
        "owner": owner,
        "hash": hash_secret(secret),
        "scopes": [str(one) for one in scope or ()],
        "models": model,
        "expires": _moment(expires) if expires else None,
        "limits": Limits(requests_per_minute, tokens_per_minute, turns).given(),
    }
    path = _path(file, fleet)
    _edit(path, lambda text: _append(text, {name: value for name, value in entry.items() if value}))
    print(secret)
    Console(stderr=True).print(
        f"{entry['id']} of {owner} is in {path}; the key is not kept anywhere: store it now", markup=False
    )


@app.command("list")
def list_keys(file: File = None, fleet: FleetOption = None) -> None:
    """Show the keys in the file."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("id", "owner", "scopes", "models", "expires", "limits"):
        table.add_column(heading)
    for key in load_keys(_path(file, fleet)):
        scopes, models = " ".join(sorted(key.scopes)), " ".join(key.models) or "all"
        limits = " ".join(f"{name}={limit}" for name, limit in key.limits.given().items())
        table.add_row(key.id, key.owner, scopes, models, _expiry(key), limits)
    Console().print(table)


@app.command("revoke")
def revoke(
    id: Annotated[str, typer.Argument(help="As in `conserve key list`")],
    file: File = None,
    fleet: FleetOption = None,
) -> None:
    """Remove a key from the file. Its owner's conversations, files and batches stay."""
    path = _path(file, fleet)
    _edit(path, lambda text: _remove(text, id, path))
    print(f"{id} is no key any more")


def _path(file: Path | None, fleet: str | None) -> Path:
    if file is not None:
        return file
    named = fleet is not None and fleet.endswith((".yaml", ".yml"))
    fleet_file = Path(str(fleet)) if named else home_of(fleet).fleet_file
    keys = load_fleet(fleet_file).gateway.keys_file
    if keys is None:
        raise DeployError(f"{fleet_file} has no gateway.keys_file: set it, or give --file")
    return Path(keys).expanduser()


def _moment(expires: str) -> str:
    """Return the time at which a duration such as 90d ends if it begins now, or else `expires` unchanged."""
    try:
        later = seconds(expires)
    except ValueError:
        return expires
    assert isinstance(later, float)
    return datetime.fromtimestamp(time.time() + later, UTC).isoformat(timespec="seconds")


def _expiry(key: Key) -> str:
    if key.expires is None:
        return "never"
    shown = datetime.fromtimestamp(key.expires, UTC).isoformat(sep=" ", timespec="minutes")
    return f"{shown} (over)" if key.expires <= time.time() else shown


def _edit(path: Path, change: Callable[[str], str]) -> None:
    """Replace the content of the keys file by `change(content)` under a lock, if gateways would accept it."""
    path = path.resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise DeployError(f"{path.parent}: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # concurrent edits wait for each other
        before = path.stat() if path.exists() else None
        text = path.read_text() if before is not None else "[]\n"
        parse_keys(text, str(path))
        changed = change(text)
        parse_keys(changed, str(path))
        write_atomically(path, changed, before.st_mode & 0o777 if before is not None else 0o600)
        if before is not None:  # keep its owner and mode: gateways may read it by their group
            with suppress(PermissionError):
                os.chown(path, before.st_uid, before.st_gid)
            path.chmod(before.st_mode & 0o777)  # the umask has narrowed it
    finally:
        os.close(folder)


def put_key(path: Path, entry: dict[str, Any]) -> None:
    """Add `entry` to a keys file, or replace the entry with its id, unless a key there has its secret."""

    def changed(text: str) -> str:
        hashes = {key.id: key.hash for key in parse_keys(text, str(path))}
        if entry["hash"] in hashes.values():
            return text
        return _append(_remove(text, entry["id"], path) if entry["id"] in hashes else text, entry)

    _edit(path, changed)


def _append(text: str, entry: dict[str, Any]) -> str:
    """Return the keys file's text with `entry` added, indented like its list; comments stay."""
    root, indent = _block_list(text), ""
    if root.value:
        indent = " " * root.start_mark.column
    else:
        text = ""
    lines = yaml.safe_dump([entry], sort_keys=False).splitlines()
    return f"{text.rstrip()}\n".lstrip("\n") + "".join(f"{indent}{line}\n" for line in lines)


def _remove(text: str, id: str, path: Path) -> str:
    """Return the keys file's text without the lines of the entry `id`; `path` is for the error message."""
    ids = [key.id for key in parse_keys(text, str(path))]
    if id not in ids:
        raise DeployError(f"there is no key {id} in {path}; it has {', '.join(ids) or 'none'}")
    lines, index = text.splitlines(keepends=True), ids.index(id)
    starts = [entry.start_mark.line for entry in _block_list(text).value] + [len(lines)]
    left = lines[: starts[index]] + lines[starts[index + 1] :]
    return "".join(left) if len(ids) > 1 else "[]\n"


def _block_list(text: str) -> yaml.SequenceNode:
    """Return the YAML list of a valid keys file, or raise DeployError if it cannot be edited line by line."""
    root = yaml.compose(text)
    assert isinstance(root, yaml.SequenceNode)
    if root.value and root.flow_style:
        raise DeployError("the file's list is in brackets: edit it by hand, or begin each entry with '-'")
    return root

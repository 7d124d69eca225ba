"""Read a fleet file, and report every mistake with its line, what was expected and the nearest key."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.errors import DeployError, KeyPath, Problem
from deploy.fleet.checks import check, check_files
from deploy.fleet.schema import FleetSpec
from router.auth.keys_file import line_of


class FleetFileError(DeployError, ValueError):
    """The fleet file cannot be used; the message has one line for each mistake."""

    def __init__(self, file: str, problems: Iterable[tuple[int, str]]) -> None:
        self.problems = tuple(f"{file}:{line}: {message}" for line, message in sorted(problems))
        super().__init__("\n".join(self.problems))


def dotted(path: KeyPath) -> str:
    """Return a path as text: tiers[0].role for ('tiers', 0, 'role')."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def from_pydantic(error: Mapping[str, Any]) -> Problem:
    path: KeyPath = tuple(error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return Problem(path, unknown_key(str(path[-1]), keys_at(path[:-1])), at_key=True)
    if error["type"] == "missing":
        return Problem(path[:-1], f"'{path[-1]}' is missing")
    message, found = error["msg"].removeprefix("Value error, "), error["input"]
    if isinstance(found, dict) and (key := message.split()[0]) in keys_at(path):
        return Problem((*path, key), message)  # a block whose keys do not fit each other
    shown = f", not {found!r}" if isinstance(found, str | int | float | bool | None) else ""
    return Problem(path, f"{_expected(message)}{shown}")


def unknown_key(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if near:
        return f"unknown key '{key}'; did you mean '{near[0]}'?"
    return f"unknown key '{key}'; expected one of {', '.join(sorted(valid))}"


def keys_at(path: KeyPath) -> list[str]:
    """Return the keys that the block at `path` may have, from the JSON schema."""
    whole = FleetSpec.model_json_schema()
    found: dict[str, Any] = whole
    for part in path:
        named = found.get("patternProperties", {}).values()  # blocks that users name, as those of slos
        inner = found.get("items") if isinstance(part, int) else found.get("properties", {}).get(part)
        found = inner or next(iter(named), None) or {}
        for option in (found, *found.get("anyOf", ())):
            if "$ref" in option:
                found = whole["$defs"][option["$ref"].rpartition("/")[2]]
            elif "items" in option:
                found = option
    return list(found.get("properties", ()))


def _expected(message: str) -> str:
    message = message.removeprefix("Input should be ")
    return message if message.startswith(("a time is", "String should")) else f"expected {message}"


def _repeated(node: yaml.Node, path: KeyPath = ()) -> Iterator[Problem]:
    """Yield a problem for each key that a mapping has twice, because PyYAML silently keeps the last value."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _repeated(value, (*path, index))
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in lines:
                message = f"the key '{name}' is already on line {lines[name]}"
                yield Problem((*path, name), message, at_key=True)
            lines[name] = key.start_mark.line + 1
            yield from _repeated(value, (*path, name))


def load_fleet(file: Path, *, to_start: bool = False) -> FleetSpec:
    """Return the fleet in a file. Raises FleetFileError with all mistakes.

    With `to_start`, the key and certificate files that it names are checked, too.
    """
    name = str(file)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FleetFileError(name, [(1, f"cannot be read: {reason}")]) from error
    return parse_fleet(text, name, to_start=to_start)


def parse_fleet(text: str, name: str, *, to_start: bool = False) -> FleetSpec:
    try:
        root, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise FleetFileError(name, [(line, f"not valid YAML: {error.problem}")]) from error
    if root is None or not isinstance(content, dict):
        raise FleetFileError(name, [(1, "expected a mapping with at least 'tiers'")])
    if repeated := list(_repeated(root)):
        raise _error(name, root, repeated)
    try:
        fleet = FleetSpec.of(content)
    except ValidationError as error:
        problems = (from_pydantic(detail) for detail in error.errors(include_url=False))  # type: ignore[arg-type]
        raise _error(name, root, list(dict.fromkeys(problems))) from error
    if beyond_types := list(check(fleet)) or list(check_files(fleet) if to_start else ()):
        raise _error(name, root, beyond_types)
    return fleet


def _error(name: str, root: yaml.Node, problems: list[Problem]) -> FleetFileError:
    lines = []
    for one in problems:
        path = dotted(one.path)
        message = f"{path}: {one.message}" if path else one.message
        lines.append((line_of(root, one.path, at_key=one.at_key), message))
    return FleetFileError(name, lines)

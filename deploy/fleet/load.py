"""Reading a fleet file: every mistake in it with file, line, what was expected and the nearest key."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from deploy.errors import DeployError
from deploy.fleet.checks import KeyPath, Problem, check
from deploy.fleet.schema import FleetSpec


@dataclass(frozen=True, slots=True)
class LocatedProblem:
    file: str
    line: int
    where: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.where}: {self.message}" if self.where else f"{place}: {self.message}"


class FleetFileError(DeployError, ValueError):
    """A fleet file that cannot be used, with everything that is wrong with it."""

    def __init__(self, problems: Iterable[LocatedProblem]) -> None:
        self.problems = tuple(
            sorted(problems, key=lambda problem: (problem.file, problem.line, problem.where))
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


def dotted(path: KeyPath) -> str:
    """('tiers', 0, 'role') -> tiers[0].role"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def from_pydantic(error: Mapping[str, Any], schema: type[BaseModel]) -> Problem:
    path: KeyPath = tuple(error["loc"])
    if error["type"] == "extra_forbidden":
        return Problem(path, unknown_key(str(path[-1]), keys_at(schema, path[:-1])), at_key=True)
    if error["type"] == "missing":
        return Problem(path[:-1], f"'{path[-1]}' is missing")
    message = error["msg"].removeprefix("Value error, ")
    found = error["input"]
    shown = f", not {found!r}" if isinstance(found, str | int | float | bool | None) else ""
    return Problem(path, f"{_expected(message)}{shown}")


def unknown_key(key: str, valid: list[str]) -> str:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    if near:
        return f"unknown key '{key}'; did you mean '{near[0]}'?"
    return f"unknown key '{key}'; expected one of {', '.join(sorted(valid))}"


def keys_at(schema: type[BaseModel], path: KeyPath) -> list[str]:
    kind: object = schema
    for part in path:
        kind = _step(kind, part)
    block = _block(kind)
    return list(block.model_fields) if block else []


def _step(kind: object, part: str | int) -> object:
    for option in _options(kind):
        if isinstance(option, type) and issubclass(option, BaseModel) and part in option.model_fields:
            return option.model_fields[str(part)].annotation
        origin = get_origin(option)
        if origin is list and isinstance(part, int):
            return get_args(option)[0]
        if origin is dict and isinstance(part, str):
            return get_args(option)[1]
    return None


def _options(kind: object) -> list[object]:
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [option for branch in get_args(kind) for option in _options(branch)]
    return [kind]


def _block(kind: object) -> type[BaseModel] | None:
    for option in _options(kind):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _expected(message: str) -> str:
    message = message.removeprefix("Input should be ")
    return message if message.startswith(("a time is", "String should")) else f"expected {message}"


@dataclass
class Positions:
    """1-based lines of keys and values by path; a mapping's line is where its first entry stands."""

    keys: dict[KeyPath, int] = field(default_factory=dict)
    values: dict[KeyPath, int] = field(default_factory=dict)
    duplicates: list[Problem] = field(default_factory=list)

    def line(self, problem: Problem) -> int:
        table = self.keys if problem.at_key else self.values
        path = problem.path
        while path and path not in table:
            path, table = path[:-1], self.values
        return table.get(path, 1)


def positions(root: yaml.Node | None) -> Positions:
    found = Positions()
    if root is not None:
        _visit(root, (), found)
    return found


def _visit(node: yaml.Node, path: KeyPath, found: Positions) -> None:
    found.values[path] = node.start_mark.line + 1
    for part, key, value in _children(node):
        inner = (*path, part)
        if key is not None:
            line = key.start_mark.line + 1
            if inner in found.keys:
                first = found.keys[inner]
                found.duplicates.append(
                    Problem(inner, f"the key '{part}' is already on line {first}", at_key=True)
                )
            found.keys[inner] = line
        _visit(value, inner, found)


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node | None, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key, value
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield index, None, value


def load_fleet(file: Path) -> FleetSpec:
    """The fleet of `file`, or FleetFileError with all that is wrong."""
    name = str(file)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FleetFileError([LocatedProblem(name, 1, "", f"cannot be read: {reason}")]) from error
    return parse_fleet(text, name)


def parse_fleet(text: str, name: str) -> FleetSpec:
    try:
        where = positions(yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise FleetFileError([LocatedProblem(name, line, "", f"not valid YAML: {error.problem}")]) from error
    if not isinstance(content, dict):
        raise FleetFileError([LocatedProblem(name, 1, "", "expected a mapping with at least 'tiers'")])
    if where.duplicates:
        raise _error(name, where, where.duplicates)
    try:
        fleet = FleetSpec.model_validate(content)
    except ValidationError as error:
        problems = (from_pydantic(detail, FleetSpec) for detail in error.errors(include_url=False))  # type: ignore[arg-type]
        raise _error(name, where, list(dict.fromkeys(problems))) from error
    problems_beyond_types = list(check(fleet))
    if problems_beyond_types:
        raise _error(name, where, problems_beyond_types)
    return fleet


def _error(name: str, where: Positions, problems: list[Problem]) -> FleetFileError:
    return FleetFileError(
        LocatedProblem(name, where.line(problem), dotted(problem.path), problem.message)
        for problem in problems
    )

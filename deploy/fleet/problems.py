"""What is wrong with a fleet file: where, what was expected, and the nearest valid key."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake; `path` leads to it, `at_key` when the key itself is wrong rather than its value."""

    path: Path
    message: str
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class LocatedProblem:
    file: str
    line: int
    where: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}"
        return f"{place}: {self.where}: {self.message}" if self.where else f"{place}: {self.message}"


class FleetFileError(ValueError):
    """A fleet file that cannot be used, with everything that is wrong with it."""

    def __init__(self, problems: Iterable[LocatedProblem]) -> None:
        self.problems = tuple(
            sorted(problems, key=lambda problem: (problem.file, problem.line, problem.where))
        )
        super().__init__("\n".join(str(problem) for problem in self.problems))


def dotted(path: Path) -> str:
    """('tiers', 0, 'role') -> tiers[0].role"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def from_pydantic(error: Mapping[str, Any], schema: type[BaseModel]) -> Problem:
    path: Path = tuple(error["loc"])
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


def keys_at(schema: type[BaseModel], path: Path) -> list[str]:
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

"""Read a fleet file; every mistake in it comes with file and line."""

from pathlib import Path as FilePath

import yaml
from pydantic import ValidationError

from deploy.fleet.checks import check
from deploy.fleet.positions import Positions, positions
from deploy.fleet.problems import FleetFileError, LocatedProblem, Problem, dotted, from_pydantic
from deploy.fleet.schema import Fleet


def load_fleet(file: FilePath) -> Fleet:
    """The fleet of `file`, or FleetFileError with all that is wrong."""
    name = str(file)
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FleetFileError([LocatedProblem(name, 1, "", f"cannot be read: {reason}")]) from error
    return parse_fleet(text, name)


def parse_fleet(text: str, name: str) -> Fleet:
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
        fleet = Fleet.model_validate(content)
    except ValidationError as error:
        problems = (from_pydantic(detail, Fleet) for detail in error.errors(include_url=False))  # type: ignore[arg-type]
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

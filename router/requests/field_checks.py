"""Checks of request field values, each with its JSON schema for `/openapi.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import orjson

from router.errors import BadRequest


class BodyPart(Enum):
    """Kinds of fields in a body; each kind has a limit of its own."""

    PROMPT = auto()  # engines tokenise it: at most a context (`cost_limits.py`)
    GRAMMAR = auto()  # engines compile it: at most `MAX_GRAMMAR_BYTES` a field
    OTHER = auto()  # all other fields: at most `MAX_OTHER_BYTES` together


@dataclass(frozen=True, slots=True)
class Check:
    """Check of a field's value: a function that raises BadRequest, and a schema for `/openapi.json`."""

    apply: Callable[[str, Any], None]
    schema: Mapping[str, Any] = field(default_factory=dict)
    part: BodyPart = BodyPart.OTHER

    def __call__(self, name: str, value: Any) -> None:
        self.apply(name, value)


def checks(
    part: BodyPart = BodyPart.OTHER, /, **schema: Any
) -> Callable[[Callable[[str, Any], None]], Check]:
    """Return a decorator that turns a function into a `Check` with the JSON schema `schema`."""
    return lambda apply: Check(apply, schema, part)


def wrong(name: str, expected: str, value: object) -> BadRequest:
    """Return the error for a field whose value has the wrong type or is out of bounds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    code = "invalid_value" if is_number else "invalid_type"
    return BadRequest(f"{name} must be {expected}", param=name, code=code)


def integer(least: int, most: int) -> Check:
    expected = f"a whole number from {least} to {most}"

    @checks(type="integer", minimum=least, maximum=most)
    def check(name: str, value: Any) -> None:
        whole = type(value) is int or (type(value) is float and value.is_integer())
        if not whole:
            raise wrong(name, expected, value)
        if not least <= value <= most:
            code = "integer_below_min_value" if value < least else "integer_above_max_value"
            raise BadRequest(f"{name} must be {expected}", param=name, code=code)

    return check


def number(least: float, most: float) -> Check:
    expected = f"a number from {least:g} to {most:g}"

    @checks(type="number", minimum=least, maximum=most)
    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not least <= value <= most:  # NaN is within no bounds
            raise wrong(name, expected, value)

    return check


def positive(most: float) -> Check:
    expected = f"a number above 0 and at most {most:g}"

    @checks(type="number", exclusiveMinimum=0, maximum=most)
    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not 0 < value <= most:
            raise wrong(name, expected, value)

    return check


def items(most: int, each: Check) -> Check:
    @checks(type="array", maxItems=most, items=each.schema)
    def check(name: str, value: Any) -> None:
        if type(value) is not list:
            raise wrong(name, f"a list of at most {most}", None)
        if len(value) > most:
            raise BadRequest(f"{name} has {len(value)} items; it may have {most}", param=name)
        for one in value:
            each(name, one)

    return check


def text(most: int) -> Check:
    @checks(type="string", maxLength=most)
    def check(name: str, value: Any) -> None:
        if type(value) is not str:
            raise wrong(name, "a string", None)
        if len(value) > most:
            raise BadRequest(f"{name} has {len(value)} characters; it may have {most}", param=name)

    return check


def one_or_more(each: Check, most: int) -> Check:
    several = items(most, each)

    @checks(anyOf=[each.schema, several.schema])
    def check(name: str, value: Any) -> None:
        (several if type(value) is list else each)(name, value)

    return check


@checks(type="boolean")
def flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise wrong(name, "true or false", None)


@checks()
def nested(name: str, value: Any) -> None:
    """Accept any value, unless it is nested so deeply that an engine's parser would fail."""
    try:
        orjson.dumps(value)
    except (TypeError, ValueError):
        raise BadRequest(f"{name} is nested too deeply", param=name) from None

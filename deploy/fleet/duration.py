"""Times in the fleet file: seconds as a number, or `30s`, `10m`, `2h`."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)$")


def seconds(value: object) -> object:
    """Turn `10m` into 600.0; leave anything else to pydantic's own check."""
    if not isinstance(value, str):
        return value
    match = _PATTERN.match(value.strip())
    if match is None:
        raise ValueError(
            "a time is seconds, or a number with ms, s, m, h or d, as in 30s or 10m, never negative"
        )
    return float(match[1]) * _UNITS[match[2]]


Duration = Annotated[
    float,
    Field(ge=0, allow_inf_nan=False),
    BeforeValidator(seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": r"^\d+(\.\d+)?\s*(ms|s|m|h|d)$"},
            ],
            "description": "seconds, or a number with ms, s, m, h or d",
        }
    ),
]

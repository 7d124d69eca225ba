"""Types of the fleet file's keys: times, sizes, names, and vLLM's options.

A default stands in one place: where a key sets a field of a component's configuration, it is that field's.
"""

import re
from dataclasses import MISSING, fields
from ipaddress import ip_network
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

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


Period = Annotated[Duration, Field(gt=0)]  # where none at all would mean nothing
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=0, le=65_535)]
Gib = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=0)]
Watts = Annotated[int, Field(gt=0)]


def _option_value(value: object) -> object:
    if not isinstance(value, bool | int | float | str | dict | list):
        raise ValueError("Input should be true, false, a number, a text, a list or a mapping")
    return value


Arguments = dict[
    str,
    Annotated[
        Any,
        AfterValidator(_option_value),
        WithJsonSchema({"type": ["boolean", "integer", "number", "string", "array", "object"]}),
    ],
]


def network(text: str) -> str:
    ip_network(text)  # says itself what it expects
    return text


MIB = 1 << 20


def default(config: type[Any], name: str) -> Any:
    """Of that field of a component's configuration."""
    values = {field.name: field.default for field in fields(config) if field.default is not MISSING}
    return values[name]

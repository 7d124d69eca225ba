"""Defines types for the settings in a fleet file: times, sizes, names and counts.

A block of the fleet file is a frozen dataclass beside the component that receives it, with `SETTINGS` as its
pydantic configuration. A field `lease_s` is the key `lease` in the file, where `30s` is a valid time.
"""

import re
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import (
    AliasGenerator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from router.errors import GatewayConfigError

MIB = 1 << 20
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_PATTERN = re.compile(r"^(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)$")

# Unknown keys are errors, and a number in quotes is not a number.
SETTINGS = ConfigDict(
    extra="forbid",
    strict=True,
    use_attribute_docstrings=True,
    alias_generator=AliasGenerator(lambda name: name.removesuffix("_s")),
    validate_by_name=True,
    serialize_by_alias=True,
)


def seconds(value: object) -> object:
    """Convert a text such as `10m` to seconds (600.0); leave other values to pydantic's own check."""
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
Period = Annotated[Duration, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
FilePath = Annotated[str, Field(pattern=r"^(/|~/)")]
Port = Annotated[int, Field(ge=0, le=65_535)]
Gib = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(gt=0, le=10**12)]

Config = TypeVar("Config")


class ConfigFile(Generic[Config]):
    """JSON file with the configuration of one process."""

    def __init__(self, kind: type[Config]) -> None:
        self._adapter: TypeAdapter[Config] = TypeAdapter(kind)

    def load(self, path: Path) -> Config:
        """Read a file. Raises GatewayConfigError with one line for each problem."""
        try:
            return self._adapter.validate_json(path.read_bytes())
        except OSError as error:
            raise GatewayConfigError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            found = ((".".join(map(str, one["loc"])) or "file", one["msg"]) for one in error.errors())
            raise GatewayConfigError(
                "\n".join(f"{path}: {where}: {what}" for where, what in found)
            ) from error

    def dump(self, config: Config) -> bytes:
        """Return the content of a file from which `load` makes the same configuration."""
        return self._adapter.dump_json(config, indent=2)

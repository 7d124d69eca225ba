"""Task for every framework: its tool's schema allows only valid arguments, even from a random model."""

import json
import sys
from typing import Literal

City = Literal["Paris", "Rome"]
SYSTEM = "You are a careful assistant that looks things up before it answers."
TASK = "Compare the weather of the two cities. " + "Context: the archive lists one reading an hour. " * 20
TURNS = 4
TOOL_NAME = "weather"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "Weather of a city.", "parameters": PARAMETERS},
}
FORCED = {"type": "function", "function": {"name": TOOL_NAME}}


def weather(city: str) -> str:
    if city not in ("Paris", "Rome"):
        raise ValueError(f"the model called the tool with {city!r}")
    return f"{city}: 21 degrees, wind from the west."


def endpoint() -> tuple[str, str]:
    """Return the base URL and the model that the command line names."""
    return sys.argv[1], sys.argv[2]


def report(requests: int) -> None:
    print(json.dumps({"requests": requests}))

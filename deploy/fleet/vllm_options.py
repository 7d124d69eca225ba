"""Names and values of the options of the pinned vLLM release.

Importing vLLM takes twenty seconds, so `conserve check` reads the options from a file instead. `python -m
tests.support.vllm_options_file` makes it from vLLM's parser, and
tests/deploy/fleet/test_final_configuration.py compares the file with the parser.
"""

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
KINDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "flag": ("true or false", (bool,)),
    "integer": ("an integer", (int,)),
    "number": ("a number", (int, float)),
}


@functools.cache
def options() -> dict[str, Any]:
    """Return the kind of each option (a key of KINDS, or text), or the list of values that it takes."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def problem(name: str, value: object) -> str | None:
    """Return what is wrong with `value` for vLLM's option `name`, or None."""
    known = options()
    name = name.split(".")[0]  # `compilation-config.mode`: a field of a JSON option
    if name not in known:
        positive = name.removeprefix("no-")
        if known.get(positive) == "flag":
            return f"written as '{positive}: false'"
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return f"vLLM has no option '{name}'" + (f"; did you mean '{near[0]}'?" if near else "")
    kind = known[name]
    if isinstance(kind, list):
        if isinstance(value, list) or str(value) in kind:
            return None
        return f"expected one of {', '.join(kind)}, not {value!r}"
    expected, types = KINDS.get(kind, ("", ()))
    wrong_bool = isinstance(value, bool) and kind != "flag"
    if types and (wrong_bool or not isinstance(value, types)):
        return f"expected {expected}, not {value!r}"
    return None

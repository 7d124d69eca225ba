"""Names and values of the options of the pinned vLLM release.

`conserve check` has two seconds and vLLM takes twenty to import, so they are read from a file, which
`python -m deploy.fleet.vllm_options` makes from vLLM's parser (tests/deploy/fleet/test_final_configuration.py
compares).
"""

import difflib
import functools
import json
from argparse import Action
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
    """Return, for each option, its kind (a key of KINDS, or text) or its list of choices."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def problem(name: str, value: object) -> str | None:
    """Return what is wrong with an option of a fleet file, or None."""
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


def of_parser(actions: list[Action]) -> dict[str, Any]:
    found = {}
    for action in actions:
        for name in action.option_strings:
            if name.startswith("--") and not name.startswith("--no-"):
                found[name.removeprefix("--")] = _kind(action)
    return dict(sorted(found.items()))


def _kind(action: Action) -> Any:
    if action.nargs == 0:
        return "flag"
    if action.nargs is not None or "cpu" in (action.choices or ()):
        return "text"  # a list, which argparse takes apart; or what depends on the machine that asks
    if action.choices is not None:
        return sorted(str(choice) for choice in action.choices)
    for kind, sample, refused in (("integer", "1", ("1.5", "2k", "{}")), ("number", "1.5", ("2k", "{}"))):
        if _takes(action, sample) and not any(_takes(action, other) for other in refused):
            return kind
    return "text"


def _takes(action: Action, text: str) -> bool:
    if not callable(action.type):
        return True
    try:
        action.type(text)
    except Exception:  # noqa: BLE001  whatever a parser of vLLM's raises, it does not take it
        return False
    return True


def parser_actions() -> list[Action]:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: list[Action] = []

    def recording(add: Any) -> Any:
        def add_argument(*names: Any, **settings: Any) -> Any:
            found.append(add(*names, **settings))
            return found[-1]

        return add_argument

    class Recording(FlexibleArgumentParser):  # type: ignore[misc]
        def add_argument_group(self, *args: Any, **settings: Any) -> Any:
            group = super().add_argument_group(*args, **settings)
            group.add_argument = recording(group.add_argument)
            return group

    parser = Recording(add_help=False)
    parser.add_argument = recording(parser.add_argument)
    make_arg_parser(parser)
    return found


def text() -> str:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    found = of_parser(parser_actions())
    found["tool-call-parser"] = sorted(ToolParserManager.list_registered())
    found["reasoning-parser"] = sorted(ReasoningParserManager.list_registered())
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

"""Writes the file of vLLM's options for `conserve check`: `python -m tests.support.vllm_options_file`."""

import json
from argparse import Action
from typing import Any

from deploy.fleet.vllm_options import FILE


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
        return "text"  # a list, or a choice that depends on this machine
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

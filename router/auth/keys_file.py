"""Reads and checks the file of API keys: a YAML list with one mapping for each key."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from router.auth.keys import Key, Limits
from router.errors import GatewayConfigError
from router.process import content_of

_MAX_BYTES = 8 << 20
_MAX_DEPTH = 8  # nested lists and mappings; a key needs four
_KEY = TypeAdapter(Key)
_NOT_A_LIST = "expected a list of keys, each with id, owner and hash"
YamlPath = Sequence[int | str]  # index of an entry, and the fields below it


class KeysFileError(GatewayConfigError):
    """The keys file cannot be used. Each line of the message is `FILE:LINE: PROBLEM`."""


class _Loader(yaml.CBaseLoader):
    """YAML loader that keeps scalars as text, because each field converts its own value."""

    _depth = 0

    def descend_resolver(self, parent: Any, index: Any) -> None:
        """Limit the nesting depth: libyaml recurses on the C stack, so deep nesting would crash."""
        self._depth += 1
        if parent is not None and self._depth > _MAX_DEPTH:
            problem = f"more than {_MAX_DEPTH} levels of lists and mappings"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=parent.start_mark)
        super().descend_resolver(parent, index)

    def ascend_resolver(self) -> None:
        self._depth -= 1
        super().ascend_resolver()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            names = [key.value for key, _ in node.value]
            key = next(key for at, (key, _) in enumerate(node.value) if key.value in names[:at])
            raise yaml.MarkedYAMLError(
                problem=f"'{key.value[:100]}' is repeated", problem_mark=key.start_mark
            )
        return mapping


def load_keys(file: Path, inline: Sequence[Key] = ()) -> tuple[Key, ...]:
    """Read a keys file and check it."""
    return parse_keys(read_keys_file(file), str(file), inline)


def read_keys_file(file: Path) -> bytes:
    """Return the content of a keys file; raise KeysFileError if it is too large."""
    try:
        content = content_of(file, _MAX_BYTES)
    except OSError as error:
        raise KeysFileError(f"{file}:1: cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise KeysFileError(f"{file}:1: is longer than {_MAX_BYTES >> 20} MiB")
    return content


def parse_keys(content: bytes | str, name: str, inline: Sequence[Key] = ()) -> tuple[Key, ...]:
    """Parse and check the content of a keys file.

    `inline` are the keys of the fleet file. An entry with the id of one of them must have the same hash.
    """
    try:
        loader = _Loader(content)
        root = loader.get_single_node()
        entries = loader.construct_document(root) if root is not None else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise KeysFileError(f"{name}:{line}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise KeysFileError(f"{name}:1: not valid YAML: {error}") from error
    if root is None:  # the file may be in the middle of being written
        raise KeysFileError(f"{name}:1: the file is empty; write [] for no keys")
    if not isinstance(entries, list):
        raise KeysFileError(f"{name}:1: {_NOT_A_LIST}")
    keys: list[Key] = []
    problems: list[tuple[YamlPath, str]] = []
    for index, entry in enumerate(entries):  # in a loop, so that other threads can run in between
        try:
            keys.append(_KEY.validate_python(entry))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            problems += [((index, *one["loc"]), _message(one)) for one in found]
    problems = problems or list(_conflicts(keys, inline))
    if problems:
        lines = dict.fromkeys(f"{name}:{line_of(root, path)}: {message}" for path, message in problems)
        raise KeysFileError("\n".join(lines))
    return tuple(keys)


def line_of(node: yaml.Node, path: YamlPath, *, at_key: bool = True) -> int:
    """Return the line at which a path leads to a key, or to its value if `at_key` is False.

    If the path does not exist, return the line of its longest beginning that exists.
    """
    line: int = node.start_mark.line + 1
    for part in path:
        children: Mapping[Any, tuple[yaml.Node, yaml.Node]] = {}
        if isinstance(node, yaml.SequenceNode):
            children = {index: (child, child) for index, child in enumerate(node.value)}
        elif isinstance(node, yaml.MappingNode):
            children = {key.value: (key, child) for key, child in node.value}
        if part not in children:
            break
        key, node = children[part]
        line = (key if at_key else node).start_mark.line + 1
    return line


def _message(error: Mapping[str, Any]) -> str:
    path = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        kind = Limits if path.startswith("limits.") else Key
        return f"unknown field '{path}'; it is one of {', '.join(sorted(kind.__dataclass_fields__))}"
    if error["type"] in ("missing", "missing_argument"):
        return f"'{path}' is missing"
    if not path:
        return _NOT_A_LIST
    return f"{path}: {str(error['msg']).removeprefix('Value error, ')}"


def _conflicts(keys: Sequence[Key], inline: Sequence[Key]) -> Iterator[tuple[YamlPath, str]]:
    """Yield path and problem of each key that has no hash, or the id or hash of another key."""
    for field in ("id", "hash"):
        first: dict[str, int] = {}
        for index, key in enumerate(keys):
            value = getattr(key, field)
            if not value:
                yield (index, field), f"{field}: is empty"
            elif first.setdefault(value, index) != index:
                yield (index, field), f"{field}: the key {keys[first[value]].id} has the same {field}"
    hashes = {key.id: key.hash for key in inline}
    for index, key in enumerate(keys):
        if hashes.get(key.id, key.hash) != key.hash:
            yield (index, "id"), "id: the fleet file has another key with this id"

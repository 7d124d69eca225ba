"""Line numbers of everything in a YAML file."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from deploy.fleet.problems import Path, Problem


@dataclass
class Positions:
    """1-based lines of keys and values by path; a mapping's line is where its first entry stands."""

    keys: dict[Path, int] = field(default_factory=dict)
    values: dict[Path, int] = field(default_factory=dict)
    duplicates: list[Problem] = field(default_factory=list)

    def line(self, problem: Problem) -> int:
        table = self.keys if problem.at_key else self.values
        path = problem.path
        while path and path not in table:
            path, table = path[:-1], self.values
        return table.get(path, 1)


def positions(root: yaml.Node | None) -> Positions:
    found = Positions()
    if root is not None:
        _visit(root, (), found)
    return found


def _visit(node: yaml.Node, path: Path, found: Positions) -> None:
    found.values[path] = node.start_mark.line + 1
    for part, key, value in _children(node):
        inner = (*path, part)
        if key is not None:
            line = key.start_mark.line + 1
            if inner in found.keys:
                first = found.keys[inner]
                found.duplicates.append(
                    Problem(inner, f"the key '{part}' is already on line {first}", at_key=True)
                )
            found.keys[inner] = line
        _visit(value, inner, found)


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node | None, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key, value
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield index, None, value

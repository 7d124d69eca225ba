"""Counter of the structure: modules, lines, import circles, class names, and the files of a turn.

    python -m benchmarks.structure                      what the syntax trees say
    python -m benchmarks.structure --trips              and the product files that one turn passes through
    python -m benchmarks.structure --tree ../other ...  the same of another checkout

A *module* is a Python file of a product package that protoc did not write; a *small* one has under 60 lines.
An *import circle* is a group of modules that reach one another by import statements, wherever they stand:
under TYPE_CHECKING and inside functions too. What a trip is, `benchmarks.trips` says.
"""

import argparse
import ast
import gc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("placement", "kvtransfer", "workers", "router", "deploy", "traces")
SMALL = 60


@dataclass(frozen=True)
class Module:
    """One source file and its syntax tree."""

    name: str
    path: Path
    text: str

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        # What a collection runs in the middle of it may parse, too, which CPython 3.11 takes for an error of
        # its own: "AST constructor recursion depth mismatch".
        collecting = gc.isenabled()
        gc.disable()
        try:
            return list(ast.walk(ast.parse(self.text, str(self.path))))
        finally:
            if collecting:
                gc.enable()

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def imported(self) -> Iterator[tuple[str, list[str]]]:
        """Module, and what is taken out of it: (a.b, []) for `import a.b`."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, []) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield self._absolute(node), [alias.name for alias in node.names]

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        if self.path.name != "__init__.py":
            package = package[:-1]
        above = package[: len(package) - node.level + 1]
        return ".".join([*above, *filter(None, [node.module])])


def modules(root: Path = ROOT, packages: tuple[str, ...] = PRODUCT) -> dict[str, Module]:
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            if path.stem.endswith(("_pb2", "_pb2_grpc")):
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, path.read_text())
    return found


def import_graph(found: dict[str, Module]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module in found.values():
        targets = set()
        for source, names in module.imported():
            submodules = {f"{source}.{name}" for name in names} & found.keys()
            # `from package import module` needs the module; another name needs the package's own file.
            targets |= submodules
            if source in found and len(submodules) < max(1, len(names)):
                targets.add(source)
        graph[module.name] = targets - {module.name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return sorted(found)


def class_names_defined_twice(found: dict[str, Module]) -> dict[str, list[str]]:
    where: dict[str, list[str]] = defaultdict(list)
    for module in found.values():
        for node in module.classes:
            where[node.name].append(module.name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to count (default: this one)")
    parser.add_argument("--trips", action="store_true", help="start a fleet and observe two turns")
    arguments = parser.parse_args()
    root = arguments.tree.resolve()
    found = modules(root)

    print(f"{'package':<12}{'modules':>9}{'lines':>9}{'under ' + str(SMALL):>10}{'longest':>9}")
    for package in (*PRODUCT, "all"):
        ours = [module for module in found.values() if package in (module.package, "all")]
        small = sum(module.lines < SMALL for module in ours)
        lines = [module.lines for module in ours]
        print(f"{package:<12}{len(ours):>9}{sum(lines):>9}{small:>10}{max(lines):>9}")

    groups = circles(import_graph(found))
    print(f"\nimport circles: {len(groups)}")
    for group in groups:
        print("  " + ", ".join(group))
    twice = class_names_defined_twice(found)
    print(f"\nclass names defined more than once: {len(twice)}")
    for name, places in twice.items():
        print(f"  {name}: {', '.join(places)}")

    if arguments.trips:
        from benchmarks import trips

        trips.report(root)


if __name__ == "__main__":
    main()

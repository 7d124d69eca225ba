"""Count the lines, import circles, folders and docstring faults of a source tree.

    python -m benchmarks.structure                             print the figures
    python -m benchmarks.structure --json FILE                 and write them to FILE
    python -m benchmarks.structure --list docstring_fragments  print each place of one figure
    python -m benchmarks.structure --trips                     also count the files that one turn runs
    python -m benchmarks.structure --tree ../other             count another checkout

The figures leave out files that protoc wrote:

    product_lines        lines of the product packages
    benchmark_lines      lines of benchmarks/
    circles              groups of product modules that import one another, inside functions too
    fmt_skips            `# fmt: skip` comments anywhere in the tree
    docstring_fragments  docstrings anywhere in the tree that begin with a word of FRAGMENTS
    short_docstrings     docstrings of product and benchmarks with fewer than four words
    longest_folder       Python files of the product folder that has most, deploy/cli excepted
    files_over_400       files of product and benchmarks with more than 400 lines
    first_turn_files     with --trips: product files that the first turn of a conversation runs
    later_turn_files     with --trips: product files that its second turn runs
"""

import ast
import gc
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.harness.output import command, write_json

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("placement", "kvtransfer", "workers", "router", "deploy", "traces")
OTHER = ("configs", "tests", "examples", "recipes")
FRAGMENTS = {
    *("Of", "Those", "Who", "Whose", "Whoever", "What", "Whatever"),
    *("Likewise", "It", "Its", "Their", "They", "Them", "None"),
}
SHORTEST_DOCSTRING = 4
LONG_FILE = 400
SMALL_FILE = 60
CLI = "deploy/cli"


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
        # A garbage collection during a parse may run code that also parses. CPython 3.11 then raises "AST
        # constructor recursion depth mismatch".
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

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Yield the line number and the text of each docstring."""
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield node.body[0].lineno, text

    def fmt_skips(self) -> Iterator[int]:
        """Yield the line numbers of `# fmt: skip` comments, but not of strings that quote one."""
        if "fmt: skip" in self.text:
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
                if token.type == tokenize.COMMENT and "fmt: skip" in token.string:
                    yield token.start[0]

    def imported(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each imported module with the names taken from it: (a.b, []) for `import a.b`."""
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
    """Return the modules of some packages by dotted name, without files that protoc wrote."""
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
    """Return for each module of `found` the modules of `found` that it imports."""
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
    """Return the groups of modules that import one another, directly or indirectly (Tarjan)."""
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
    """Return each class name that several modules define, with these modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for module in found.values():
        for node in module.classes:
            where[node.name].append(module.name)
    return {name: places for name, places in sorted(where.items()) if len(places) > 1}


def begins_with_fragment(docstring: str) -> bool:
    """Return whether a docstring begins with one of `FRAGMENTS`, which leave out a noun or a verb."""
    return docstring.split(maxsplit=1)[0].rstrip(",:;") in FRAGMENTS


def is_short(docstring: str) -> bool:
    return len(docstring.split()) < SHORTEST_DOCSTRING


def folder_sizes(root: Path, product: dict[str, Module]) -> dict[str, int]:
    """Return the number of Python files in each product folder outside the CLI."""
    sizes: dict[str, int] = defaultdict(int)
    for module in product.values():
        folder = module.path.parent.relative_to(root).as_posix()
        if not f"{folder}/".startswith(f"{CLI}/"):
            sizes[folder] += 1
    return dict(sizes)


class Structure:
    """Figures about the structure of one source tree, and the places in its code that each figure counts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.product = modules(root)
        self.benchmarks = modules(root, ("benchmarks",))
        self.counted = {**self.product, **self.benchmarks}
        self.everything = {**self.counted, **modules(root, OTHER)}

    def places(self) -> dict[str, list[str]]:
        """Return the places that each figure counts, by the figure's name."""
        docstrings = [
            (module, line, text) for module in self.everything.values() for line, text in module.docstrings()
        ]
        sizes = sorted(folder_sizes(self.root, self.product).items(), key=lambda item: -item[1])
        return {
            "circles": [", ".join(group) for group in circles(import_graph(self.product))],
            "fmt_skips": [
                self._at(module, line) for module in self.everything.values() for line in module.fmt_skips()
            ],
            "docstring_fragments": [
                f"{self._at(module, line)}: {text.splitlines()[0]}"
                for module, line, text in docstrings
                if begins_with_fragment(text)
            ],
            "short_docstrings": [
                f"{self._at(module, line)}: {text}"
                for module, line, text in docstrings
                if module.name in self.counted and is_short(text)
            ],
            "longest_folder": [f"{folder}: {size}" for folder, size in sizes],
            "files_over_400": [
                f"{module.path.relative_to(self.root)}: {module.lines}"
                for module in self.counted.values()
                if module.lines > LONG_FILE
            ],
        }

    def figures(self) -> dict[str, int]:
        """Return the figures by name, as `--json` writes them."""
        counts = {name: len(found) for name, found in self.places().items()}
        return {
            "product_lines": sum(module.lines for module in self.product.values()),
            "benchmark_lines": sum(module.lines for module in self.benchmarks.values()),
            **counts,
            "longest_folder": max(folder_sizes(self.root, self.product).values()),
        }

    def print_packages(self) -> None:
        """Print a table of the packages: modules, lines, small modules and the longest module."""
        print(f"{'package':<12}{'modules':>9}{'lines':>9}{f'under {SMALL_FILE}':>10}{'longest':>9}")
        for package in (*PRODUCT, "benchmarks"):
            lines = [module.lines for module in self.counted.values() if module.package == package]
            small = sum(count < SMALL_FILE for count in lines)
            print(f"{package:<12}{len(lines):>9}{sum(lines):>9}{small:>10}{max(lines, default=0):>9}")

    def _at(self, module: Module, line: int) -> str:
        return f"{module.path.relative_to(self.root)}:{line}"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to count (default: this one)")
    parser.add_argument("--trips", action="store_true", help="start a fleet and observe two turns")
    parser.add_argument("--list", metavar="FIGURE", help="print each place that this figure counts")
    arguments = parser.parse_args()
    structure = Structure(arguments.tree.resolve())

    if arguments.list:
        places = structure.places()
        if arguments.list not in places:
            parser.error(f"--list knows {', '.join(places)}")
        print("\n".join(places[arguments.list]))
        return
    structure.print_packages()
    figures = structure.figures()
    if arguments.trips:
        from benchmarks import trips

        figures |= trips.measure(structure.root)
    print()
    for name, value in figures.items():
        print(f"{name:<20}{value:>8,}")
    twice = class_names_defined_twice(structure.product)
    print(f"{'class names twice':<20}{len(twice):>8}")
    for name, where in twice.items():
        print(f"  {name}: {', '.join(where)}")
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()

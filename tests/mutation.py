"""Change one comparison, constant, `not` or early return of a module at a time; its tests must fail.

    python -m tests.mutation router/auth/addresses.py [--tests tests/router/test_addresses.py …] [--most 60]

Without `--tests`, the tests that import the module run. A change that no test notices is printed: a test is
missing, or the change makes no difference.
"""

import argparse
import ast
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.broken.__main__ import FAILED, PASSED, ROOT, copy_tree, status_of

OPPOSITES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def changed(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of one node; None if there is nothing to change."""
    match node:
        case ast.Compare(ops=[operator, *others]) if type(operator) in OPPOSITES:
            return ast.Compare(node.left, [OPPOSITES[type(operator)](), *others], node.comparators)
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.BoolOp(op=operator, values=values):
            return ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.If(body=[ast.Return() | ast.Raise() | ast.Continue() | ast.Break()]):
            return ast.If(ast.Constant(False), node.body, node.orelse)
    return None


class Mutation(ast.NodeTransformer):
    """Changes node number `number` of the nodes that can be changed, counted from 0."""

    def __init__(self, number: int) -> None:
        self._number, self._seen = number, -1
        self.what = ""  # line and change; empty if there are fewer nodes

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node  # a docstring
        if isinstance(node, ast.AnnAssign):
            node.value = self.visit(node.value) if node.value is not None else None  # type: ignore[assignment]
            return node
        new = changed(node)
        if new is not None:
            self._seen += 1
            if self._seen == self._number:
                self.what = f"{node.lineno}: {_first_line(node)}  ->  {_first_line(new)}"  # type: ignore[attr-defined]
                return ast.copy_location(new, node)
        return self.generic_visit(node)


def _first_line(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yield, for each mutant of `source`, a description of its change and its own source."""
    number = 0
    while True:
        mutation = Mutation(number)
        tree = mutation.visit(ast.parse(source))
        if not mutation.what:
            return
        yield mutation.what, ast.unparse(ast.fix_missing_locations(tree))
        number += 1


def importing(module: Path) -> tuple[str, ...]:
    """Return the test files that import a module."""
    name = ".".join(module.with_suffix("").parts)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(str(file.relative_to(ROOT)) for file in files if f"from {name} import" in file.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("module", type=Path)
    parser.add_argument("--tests", nargs="+", default=[])
    parser.add_argument("--most", type=int, default=60, help="mutants to try, drawn at random")
    options = parser.parse_args()
    tests = tuple(options.tests) or importing(options.module)
    if not tests:
        parser.error(f"no test imports {options.module}; name some with --tests")
    source = (ROOT / options.module).read_text()
    found = list(mutants(source))
    tried = random.Random(0).sample(found, min(options.most, len(found)))
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy_tree(Path(folder))
        if status_of(tests, Path(folder)) != PASSED:
            print("the tests fail in the unchanged tree, so they show nothing")
            return 2
        for what, mutant in sorted(tried):
            (Path(folder) / options.module).write_text(mutant)
            if status_of(tests, Path(folder)) != FAILED:
                survived.append(what)
                print(f"survives {options.module}:{what}", flush=True)
    print(f"{len(tried) - len(survived)} of {len(tried)} mutants are noticed ({len(found)} in the module)")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

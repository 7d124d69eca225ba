"""Print a random sample of texts that newcomers read: `python -m tests.structure.reading_sample SEED`."""

import ast
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.structure import ROOT, Module, Structure

COUNTS = {"docstrings": 60, "README rows": 40, "test names": 40, "paragraphs": 20}
SHORTEST_PARAGRAPH = 80  # characters


def docstrings(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yield the place and the first paragraph of each docstring in `modules`."""
    for module in modules:
        for line, text in module.docstrings():
            yield f"{module.path}:{line}", " ".join(text.split("\n\n")[0].split())


def names_of_tests(modules: Iterable[Module]) -> Iterator[tuple[str, str]]:
    """Yield the file and the name, as a sentence, of each test in `modules`."""
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield str(module.path), node.name.removeprefix("test_").replace("_", " ")


def readme_rows(root: Path, folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the rows whose first cell is a name, except tables' heads, from the READMEs below `folders`."""
    for folder in folders:
        for page in sorted((root / folder).rglob("README.md")):
            for row in re.findall(r"^\| `.*\|$(?!\n\|-)", page.read_text(), re.M):
                yield str(page), row


def paragraphs(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the prose paragraphs of the documentation."""
    for page in sorted((root / "docs").rglob("*.md")):
        for block in re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S).split("\n\n"):
            text = " ".join(block.split())
            if len(text) >= SHORTEST_PARAGRAPH and text[0] not in "|#<":
                yield str(page), text


def draw(root: Path, counted: list[Module], tests: list[Module], seed: int) -> Iterator[str]:
    """Yield the lines of a sample; the same seed draws the same texts from the same tree."""
    chance = random.Random(seed)
    product_folders = sorted({module.package for module in counted})
    kinds = {
        "docstrings": docstrings([*counted, *tests]),
        "README rows": readme_rows(root, product_folders),
        "test names": names_of_tests(tests),
        "paragraphs": paragraphs(root),
    }
    for kind, found in kinds.items():
        texts = list(found)
        chosen = chance.sample(texts, min(COUNTS[kind], len(texts)))
        yield f"\n{len(chosen)} of {len(texts)} {kind}"
        yield from (f"{Path(place).relative_to(root)}  {text}" for place, text in chosen)


if __name__ == "__main__":
    structure = Structure(ROOT)
    of_tests = [module for module in structure.everything.values() if module.package == "tests"]
    print("\n".join(draw(ROOT, list(structure.counted.values()), of_tests, int(sys.argv[1]))))

"""Count the docstrings that a reader cannot understand alone, by top-level package.

    python -m tests.structure.docstrings           print them
    python -m tests.structure.docstrings --write   lower the numbers in docstring_allowance.json

A docstring is refused when it begins with a fragment ("Of the engine.", "Who asks first.") or has fewer than
four words. The allowance says how many each package still has. No number may grow, except where files move
between packages: `--write` accepts that as long as the total does not grow.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.structure import PRODUCT, ROOT, Module, begins_with_fragment, is_short, modules
from tests.structure.trees import MODULES, TEST_MODULES

ALLOWANCE = Path(__file__).with_name("docstring_allowance.json")
PACKAGES = (*PRODUCT, "benchmarks", "configs", "examples", "tests")
# Beginnings that `benchmarks.structure` does not count, because their first word alone is good English.
LEADING_PHRASES = tuple(
    f"{preposition} {pronoun} "
    for preposition in ("By", "For", "From", "In", "On", "To", "With")
    for pronoun in ("its", "it", "their", "them", "those", "what", "which", "who", "whom", "whose")
)


def is_refused(docstring: str) -> bool:
    """Tell whether a docstring begins with a fragment or has fewer than four words."""
    first_line = " ".join(docstring.split())
    return begins_with_fragment(docstring) or is_short(docstring) or first_line.startswith(LEADING_PHRASES)


def refused(found: Iterable[Module]) -> dict[str, list[str]]:
    """Return file, line and first line of each refused docstring, by top-level package."""
    places: dict[str, list[str]] = {}
    for module in found:
        for line, text in module.docstrings():
            if is_refused(text):
                place = f"{module.path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
                places.setdefault(module.package, []).append(place)
    return places


def refused_here() -> dict[str, list[str]]:
    """Return the refused docstrings of this checkout, by top-level package."""
    others = modules(packages=("configs", "examples"))
    return refused([*MODULES.values(), *TEST_MODULES.values(), *others.values()])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.structure.docstrings",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write the numbers of today, if none are more")
    arguments = parser.parse_args()
    places = refused_here()
    counts = {package: len(found) for package, found in sorted(places.items())}
    if not arguments.write:
        print("\n".join(place for found in places.values() for place in found))
        print(counts, sum(counts.values()))
        return
    allowed = json.loads(ALLOWANCE.read_text()) if ALLOWANCE.exists() else counts
    if sum(counts.values()) > sum(allowed.values()):
        sys.exit(
            f"{sum(counts.values())} docstrings are refused, {sum(allowed.values())} are allowed: mend some"
        )
    ALLOWANCE.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()

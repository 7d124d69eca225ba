"""Finds docstrings that cannot be understood without the code.

A docstring is refused when it begins with a fragment ("Of the engine.", "Who asks first.") or has fewer than
four words.
"""

from collections.abc import Iterable

from benchmarks.structure import PRODUCT, ROOT, Module, begins_with_fragment, is_short, modules
from tests.structure.trees import MODULES, TEST_MODULES

PACKAGES = (*PRODUCT, "benchmarks", "configs", "examples", "tests")
# Beginnings that `benchmarks.structure` does not count, because their first word alone is good English.
LEADING_PHRASES = tuple(
    f"{preposition} {pronoun} "
    for preposition in ("By", "For", "From", "In", "On", "To", "With")
    for pronoun in ("its", "it", "their", "them", "those", "what", "which", "who", "whom", "whose")
)


def is_refused(docstring: str) -> bool:
    """Return whether a docstring begins with a fragment or has fewer than four words."""
    first_line = " ".join(docstring.split())
    return begins_with_fragment(docstring) or is_short(docstring) or first_line.startswith(LEADING_PHRASES)


def refused(found: Iterable[Module]) -> dict[str, list[str]]:
    """Return the place and first line of each refused docstring, by top-level package."""
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

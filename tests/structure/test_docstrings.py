"""A docstring makes sense without the code: it has a noun or a verb, and at least four words."""

import json

import pytest

from tests.structure.docstrings import ALLOWANCE, PACKAGES, is_refused, refused_here

REFUSED = refused_here()
ALLOWED: dict[str, int] = json.loads(ALLOWANCE.read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_no_more_refused_docstrings_than_it_is_allowed(package: str) -> None:
    found = REFUSED.get(package, [])
    allowed = ALLOWED.get(package, 0)
    assert len(found) <= allowed, (
        f"{package} has {len(found)} docstrings that begin with a fragment or have fewer than four words; "
        f"{allowed} are allowed. Rewrite the new ones (CONTRIBUTING.md, `Words`). Where a file moved here "
        "with its docstrings, run `python -m tests.structure.docstrings --write`.\n" + "\n".join(found)
    )


@pytest.mark.parametrize(
    "docstring",
    [
        "Of one engine now.",
        "Those that wait longest.",
        "Who edits at the same time loses nothing.",
        "Whose turn is next here.",
        "What only hints refuses nothing.",
        "Likewise, but in several pieces.",
        "It is no second thought any more.",
        "Its rows are written here.",
        "Their rows are written here.",
        "They are known from here on.",
        "None: there is no such engine.",
        "By whose order this was done.",
        "By what did not come in time.",
        "In its flow of requests.",
        "To who asks for it.",
        "Rows are written.",
    ],
)
def test_fragments_and_short_docstrings_are_refused(docstring: str) -> None:
    assert is_refused(docstring)


@pytest.mark.parametrize(
    "docstring",
    [
        "Return the prefill queue of a tier.",
        "Journal of bindings, one row per placement.",
        "By default, wait for the engine.",
        "In production this file is written by a keeper.",
        "Online work runs before offline work.",
        "Theirs and ours are merged by key.",
    ],
)
def test_complete_phrases_are_accepted(docstring: str) -> None:
    assert not is_refused(docstring)

"""A docstring makes sense without the code: it has a noun or a verb, and at least four words."""

import pytest

from tests.structure.docstrings import PACKAGES, is_refused, refused_here

REFUSED = refused_here()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_docstring_of_a_package_is_a_fragment_or_shorter_than_four_words(package: str) -> None:
    found = REFUSED.get(package, [])
    assert not found, (
        f"{package} has {len(found)} docstrings that begin with a fragment or have fewer than four words. "
        "Rewrite them (CONTRIBUTING.md, `Words`).\n" + "\n".join(found)
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
def test_docstrings_that_are_fragments_or_too_short_are_refused(docstring: str) -> None:
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
def test_docstrings_that_are_complete_phrases_are_accepted(docstring: str) -> None:
    assert not is_refused(docstring)

"""Each mutant differs from its module in one place, and each place that can change has a mutant."""

from tests.mutation import mutants

SOURCE = """
LIMIT = 3


def few(items: list[int], strict: bool = False) -> bool:
    '''Return whether there are 2 or less.'''
    if not items:
        return True
    return len(items) < LIMIT
"""


def test_each_place_that_can_change_has_a_mutant() -> None:
    found = dict(mutants(SOURCE))
    assert list(found) == [
        "2: 3  ->  4",
        "5: False  ->  True",
        "7: if not items:  ->  if False:",
        "7: not items  ->  items",
        "8: True  ->  False",
        "9: len(items) < LIMIT  ->  len(items) <= LIMIT",
    ]
    results = []
    for mutant in found.values():
        names: dict[str, object] = {}
        exec(mutant, names)
        few = names["few"]
        results.append((few([]), few([1, 2]), few([1, 2, 3])))  # type: ignore[operator]
    assert results == [
        (True, True, True),
        (True, True, False),
        (True, True, False),
        (True, True, True),
        (False, True, False),
        (True, True, True),
    ]

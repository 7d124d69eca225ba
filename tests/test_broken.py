"""What `python -m tests.broken` takes away is there to be taken away."""

from collections import Counter

import pytest

from tests.broken.__main__ import LISTS, ROOT, Finding, findings

FINDINGS = findings(LISTS)


def test_there_are_some_and_each_is_there_once() -> None:
    assert len(FINDINGS) >= 25
    assert not [what for what, count in Counter(one.what for one in FINDINGS).items() if count > 1]


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.what)
def test_it_is_of_the_code_as_it_is(finding: Finding) -> None:
    assert (ROOT / finding.file).read_text().count(finding.was) == 1
    assert finding.broken != finding.was
    assert all((ROOT / test.partition("::")[0]).is_file() for test in finding.tests)

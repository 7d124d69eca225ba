"""Each fault of `python -m tests.broken` still fits the code."""

from collections import Counter

import pytest

from tests.broken.__main__ import LISTS, ROOT, Finding, findings

FINDINGS = findings(LISTS)


def test_every_fault_is_listed_only_once() -> None:
    assert len(FINDINGS) >= 25
    assert not [what for what, count in Counter(one.what for one in FINDINGS).items() if count > 1]


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.what)
def test_each_listed_fault_still_fits_the_code(finding: Finding) -> None:
    assert (ROOT / finding.file).read_text().count(finding.was) == 1
    assert finding.broken != finding.was
    assert all((ROOT / test.partition("::")[0]).is_file() for test in finding.tests)

"""docs/models.md says what test_architectures.py runs."""

import re

from tests.support.architectures import SERVED
from tests.support.fleet import ROOT


def test_the_table_has_the_architectures_that_are_run() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \([^|]*\) \| (\d)", text.split("Dense models")[0], re.M)
    assert rows == [(one.kind, str(one.groups)) for one in SERVED.values()]

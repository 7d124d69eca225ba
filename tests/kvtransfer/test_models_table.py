"""docs/models.md lists what test_architectures.py runs, and names a test for everything else."""

import ast
import re

from tests.support.architectures import SERVED
from tests.support.fleet import ROOT

TEXT = (ROOT / "docs" / "models.md").read_text()


def test_the_table_lists_the_architectures_that_run_in_tests() -> None:
    rows = re.findall(r"^\| `(\w+)` \([^|]*\) \| (\d)", TEXT, re.M)
    assert rows == [(one.kind, str(one.groups)) for one in SERVED.values()]


def test_every_other_row_names_a_test_or_states_that_it_has_not_run() -> None:
    rows = re.findall(r"^\| (?!-|architecture|what |`\w+` \()(.*) \|$", TEXT, re.M)
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", row)
        assert named or "not run" in row, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text())
            assert name in {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}, name

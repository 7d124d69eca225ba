"""`benchmarks.structure` counts each kind of fault in a made-up source tree."""

from pathlib import Path

import pytest

from benchmarks.structure import Module, Structure
from tests.structure.reading_sample import draw

FILES = {
    "placement/one.py": '"""A complete first line here."""\nfrom placement import two\n',
    "placement/two.py": '"""Of the other module."""\nimport placement.one\n',
    "placement/many.py": "\n" * 401,
    "router/table.py": 'ROW = {"a": 1}  # fmt: skip\nTEXT = "# fmt: skip"\n',
    "router/table_pb2.py": "\n" * 1000,
    "deploy/cli/commands/a.py": "",
    "deploy/cli/commands/b.py": "",
    "deploy/cli/commands/c.py": "",
    "deploy/cli/commands/d.py": "",
    "benchmarks/bench.py": '"""Too short."""\n',
    "tests/test_one.py": '"""Likewise, in a test."""\n',
}
FIGURES = {
    "product_lines": 2 + 2 + 401 + 2,
    "benchmark_lines": 1,
    "circles": 1,
    "fmt_skips": 1,
    "docstring_fragments": 2,
    "short_docstrings": 1,
    "longest_folder": 3,
    "files_over_400": 1,
}


@pytest.fixture
def structure(tmp_path: Path) -> Structure:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Structure(tmp_path)


def test_each_figure_about_the_structure_of_a_made_up_source_tree_is_right(structure: Structure) -> None:
    assert structure.figures() == FIGURES


def test_each_fault_is_listed_with_file_and_line(structure: Structure) -> None:
    assert structure.places()["docstring_fragments"] == [
        "placement/two.py:1: Of the other module.",
        "tests/test_one.py:1: Likewise, in a test.",
    ]
    assert structure.places()["fmt_skips"] == ["router/table.py:1"]


def test_one_seed_always_draws_the_same_reading_sample(tmp_path: Path) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "router" / "README.md").write_text("| `Key` | job |\n|---|---|\n| `table.py` | a table |\n")
    (tmp_path / "docs" / "page.md").write_text(f"# Page\n\n{'word ' * 30}\n")
    many = Module(
        "router.table",
        tmp_path / "router" / "table.py",
        '"""One."""\n'
        + "\n".join(f'def f{number}():\n    """Return the number {number}."""' for number in range(100)),
    )
    test = Module(
        "tests.test_one",
        tmp_path / "tests" / "test_one.py",
        'def test_a_plain_name(): ...\nSOURCE = """\ndef test_in_a_string(): ...\n"""\n',
    )
    samples = [list(draw(tmp_path, [many], [test], seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    assert "1 of 1 test names" in "\n".join(samples[0])
    assert "60 of 101 docstrings" in "\n".join(samples[0]) and "tests/test_one.py  a plain name" in samples[0]
    assert "\n1 of 1 README rows" in samples[0], "the head of the table is no row"

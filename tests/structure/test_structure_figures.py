"""`benchmarks.structure` counts each kind of fault in a made-up source tree."""

from pathlib import Path

import pytest

from benchmarks.structure import Structure

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


def test_each_figure_counts_its_faults(structure: Structure) -> None:
    assert structure.figures() == FIGURES


def test_each_place_names_file_and_line(structure: Structure) -> None:
    assert structure.places()["docstring_fragments"] == [
        "placement/two.py:1: Of the other module.",
        "tests/test_one.py:1: Likewise, in a test.",
    ]
    assert structure.places()["fmt_skips"] == ["router/table.py:1"]

"""Every file of a product package is in the file table of the nearest README: its folder's, or one above."""

import re
from collections import defaultdict
from pathlib import Path

from tests.structure.trees import PRODUCT_MODULES

UNNAMED = {"__init__.py", "__main__.py"}  # the folder itself, and its entry point


def readme_of(path: Path) -> Path:
    return next(folder / "README.md" for folder in path.parents if (folder / "README.md").exists())


def named(readme: Path) -> set[Path]:
    """Return the files that the tables of a README name.

    A first cell names files; one without a folder is in the folder of the file before it. A first cell may
    also name a folder: the next cell then names its files, with or without `.py`.
    """
    found: set[Path] = set()
    for line in readme.read_text().splitlines():
        if not line.startswith("| `"):
            continue
        _, names, job, *_ = line.split("|")
        folder = readme.parent
        for name in re.findall(r"`([^`]+)`", names):
            if name.endswith("/"):
                for stem, ending in re.findall(r"`(\w+)(\.py)?`", job):
                    file = readme.parent / name / f"{stem}.py"
                    if ending or file.exists():
                        found.add(file)
            elif name.endswith(".py"):
                file = (readme.parent if "/" in name else folder) / name
                folder = file.parent
                found.add(file)
    return {file.resolve() for file in found}


def test_every_file_is_in_the_table_of_a_readme() -> None:
    by_readme: dict[Path, set[Path]] = defaultdict(set)
    for module in PRODUCT_MODULES.values():
        if module.path.name not in UNNAMED:
            by_readme[readme_of(module.path)].add(module.path.resolve())
    missing = sorted(path for readme, files in by_readme.items() for path in files - named(readme))
    assert not missing, "\n".join(map(str, missing))


def test_every_file_in_the_table_of_a_readme_exists() -> None:
    readmes = {readme_of(module.path) for module in PRODUCT_MODULES.values()}
    gone = sorted(path for readme in readmes for path in named(readme) if not path.exists())
    assert not gone, "\n".join(map(str, gone))

"""Every link, path, command and fleet key in the documentation exists."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from benchmarks.structure import PRODUCT, ROOT
from deploy.fleet import FleetSpec

FOLDERS = (
    *PRODUCT,
    "benchmarks",
    "configs",
    "docs",
    "tests",
    "requirements",
    "examples",
    "recipes",
    ".github",
)
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (
        *ROOT.glob("*.md"),
        ROOT / "llms.txt",
        *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")),
    )
)
HISTORY = {Path("CHANGELOG.md"), Path("docs/measurements/retired.md")}  # names of things that are gone
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./*{},-]+\.(?:py|md|ya?ml|sh|json|toml|txt|html|jinja)")
MODULE = re.compile(r"python -m ([a-z_][\w.]*)")
TARGET = re.compile(r"(?<![\w`/-])`?make ([a-z]+)(?=[`\s,;.:)]|$)", re.M)
CREATED = {  # files that a fleet, a user or a command writes
    *("fleet.yaml", "engine.json", "run.json", "profiles.json", "power.json", "config.json", "new.yaml"),
    *("keys.yaml", "targets.json", "my-fleet.yaml", "fleet.json", "adapter_config.json", "tokenizer.json"),
    *("conserve-cpu.cdx.json", "generate_multi_turn.json"),
}
OTHERS = (
    "/",
    "~",
    "http",
    "vllm/",
    "benchmark_serving_multi_turn.py",
    "benchmarks/multi_turn/",
)  # paths of a machine, and of vLLM's own tree


@cache
def text_of(page: Path) -> str:
    return (ROOT / page).read_text()


@cache
def base_names() -> set[str]:
    """Return the name of every file in the tree."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.name for path in (*inside, *ROOT.iterdir())}


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", text_of(page), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def expanded(path: str) -> Iterator[str]:
    """Yield the paths that a path with braces stands for: two for `a/{b,c}.py`."""
    found = re.search(r"\{([^{}]*)\}", path)
    if found is None:
        yield path
        return
    for choice in found[1].split(","):
        yield from expanded(path[: found.start()] + choice.strip() + path[found.end() :])


def exists(path: str, page: Path) -> bool:
    """Return whether a path exists below the root or the page's folder, or a bare file name anywhere."""
    if Path(path).name in CREATED:
        return True
    if "/" not in path:
        return path in base_names() or ("*" in path and any(Path(name).match(path) for name in base_names()))
    near = (ROOT, (ROOT / page).parent, *(ROOT / folder for folder in FOLDERS))
    if path.startswith("../"):
        return (near[1] / path).exists()
    return any(any(folder.glob(path)) for folder in near)


def missing_links(page: Path) -> list[str]:
    missing = []
    for link in LINK.findall(text_of(page)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (ROOT / page).parent / target if target else ROOT / page
        is_page = file.is_file() and file.suffix == ".md"
        found = anchors(file.resolve().relative_to(ROOT)) if is_page and anchor else {anchor}
        if not file.exists() or anchor not in found:
            missing.append(link)
    return missing


def missing_paths(page: Path) -> list[str]:
    """Return the files and folders that `page` names in backticks and that do not exist."""
    missing = []
    for code in CODE.findall(text_of(page)):
        name = code.split("::")[0]
        is_folder = name.endswith("/") and name.split("/")[0] in FOLDERS
        if (FILE.fullmatch(name) or is_folder) and not name.startswith(OTHERS):
            missing += [one for one in expanded(name) if not exists(one.rstrip("/"), page)]
    return missing


def missing_commands(page: Path) -> list[str]:
    """Return the modules after `python -m` and the targets after `make` on `page` that do not exist."""
    text = text_of(page)
    ours = [name.rstrip(".") for name in MODULE.findall(text)]
    modules = [name for name in ours if name.partition(".")[0] in FOLDERS and not is_module(name)]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    in_code = "\n".join([*CODE.findall(text), *re.findall(r"^```\n(.*?)^```", text, re.M | re.S)])
    return modules + [f"make {name}" for name in TARGET.findall(in_code) if name not in targets]


def is_module(name: str) -> bool:
    """Return whether `python -m name` would find a module; a name in capitals stands for any module."""
    if "NAME" in name:
        return True
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def fleet_keys(kind: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys of `kind`, a class of the fleet schema, each after `above`."""
    if not hasattr(kind, "__pydantic_fields__"):
        for part in get_args(kind):
            yield from fleet_keys(part, above)
        return
    for name, field in kind.__pydantic_fields__.items():
        yield above + (field.alias or name)
        yield from fleet_keys(field.annotation, f"{above}{field.alias or name}.")


FLEET_KEYS = set(fleet_keys(FleetSpec))
BLOCKS = {key.partition(".")[0] for key in FLEET_KEYS if "." in key}


def unknown_keys(page: Path) -> list[str]:
    """Return dotted names in backticks on `page` that look like keys of the fleet file but are not."""
    named = re.findall(r"`([a-z_]+(?:\.[a-zA-Z_]+)+)(?::[^`]*)?`", text_of(page))
    plain = [re.sub(r"^slos\.(NAME|default)\.?", "slos.", key).rstrip(".") for key in named]
    return [
        key
        for key in plain
        if key.partition(".")[0] in BLOCKS
        and key not in {*FLEET_KEYS, "slos"}
        and not (FILE.fullmatch(key) or is_code(key))
    ]


def is_code(name: str) -> bool:
    """Return whether a dotted name is that of one of our modules or classes, or of a benchmark."""
    above = name.rpartition(".")[0]
    return is_module(name) or ("." in above and is_module(above)) or is_module(f"benchmarks.{name}")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_of_a_page_has_a_target(page: Path) -> None:
    assert missing_links(page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in HISTORY], ids=str)
def test_every_path_command_and_fleet_key_of_a_page_exists(page: Path) -> None:
    assert missing_paths(page) + missing_commands(page) + unknown_keys(page) == []


def test_wrong_links_paths_commands_and_keys_of_a_page_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path("docs/glossary.md")
    wrong = "[a](gone.md) [b](kv.md#gone) `router/gone.py` `gone.py` `router/gone/` `make gone` "
    wrong += "`python -m benchmarks.gone` `router/{keys,gone}.yaml` `gateway.gone` `gateway.tls: {}`"
    monkeypatch.setattr(f"{__name__}.text_of", {page: wrong, Path("docs/kv.md"): "# KV"}.__getitem__)
    anchors.cache_clear()
    assert missing_links(page) == ["gone.md", "kv.md#gone"]
    assert missing_paths(page) == ["router/gone.py", "gone.py", "router/gone/", "router/gone.yaml"]
    assert missing_commands(page) == ["benchmarks.gone", "make gone"]
    assert unknown_keys(page) == ["gateway.gone"]
    anchors.cache_clear()


def test_pre_commit_runs_the_linters_of_make_check() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    makefile = (ROOT / "Makefile").read_text()
    used = {re.search(r"-m (ruff \w+|mypy)", hook["entry"])[1] for hook in hooks}  # type: ignore[index]
    assert used == set(re.findall(r"-m (ruff \w+|mypy)", makefile))


@pytest.mark.parametrize("package", PRODUCT)
def test_every_product_package_has_a_py_typed_file(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_the_readme_has_at_most_800_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 800

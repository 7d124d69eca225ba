"""Adds pages from outside docs/ to the documentation site: READMEs, and reference made from the code."""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
from click import Command, Context, Group
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
NAMED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting-vulnerabilities.md",
}
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)]*)?\)")
ELSEWHERE = re.compile(r"^(\w+:|/|$)")  # other sites, and anchors of the same page


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, uri in repository_pages().items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    files.append(File.generated(config, "reference/commands.md", content="\n".join(commands())))
    files.append(File.generated(config, "reference/fleet-file.md", content="\n".join(fleet_file())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; source files lose their link."""
    pages = repository_pages()
    origin = {uri: path for path, uri in pages.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def replaced(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if ELSEWHERE.match(target):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if (ROOT / path).is_dir():
            path = posixpath.join(path, "README.md")
        uri = path.removeprefix("docs/") if path.startswith("docs/") else pages.get(path)
        if uri is None or files.get_file_from_path(uri) is None:
            return link["text"]
        return f"{link['image']}[{link['text']}]({posixpath.relpath(uri, page.file.src_uri + '/..')}{anchor})"

    return LINK.sub(replaced, markdown)


def repository_pages() -> dict[str, str]:
    """Return the site's page for each documentation file outside docs/, by its path in the repository."""
    packages = ("placement", "router", "kvtransfer", "workers", "deploy", "traces", "benchmarks", "configs")
    readmes = (path.relative_to(ROOT) for name in packages for path in (ROOT / name).rglob("README.md"))
    found = {path.as_posix(): f"packages/{'-'.join(path.parts[:-1])}.md" for path in readmes}
    return {**NAMED, **found}


def commands() -> Iterator[str]:
    from deploy.cli.application import app

    yield "# Commands\n\nWhat `conserve COMMAND --help` prints.\n"
    yield from help_of(typer.main.get_command(app), "conserve")


def help_of(command: Command, name: str) -> Iterator[str]:
    context = Context(command, info_name=name, terminal_width=100, max_content_width=100)
    if isinstance(command, Group):
        for each in command.list_commands(context):
            if (sub := command.get_command(context, each)) is not None and not sub.hidden:
                yield from help_of(sub, f"{name} {each}")
        return
    yield f"## `{name}`\n\n{(command.help or '').strip()}\n"
    yield "| | |\n|---|---|"
    for parameter in command.get_params(context):
        names = " ".join(f"`{one}`" for one in parameter.opts) if parameter.opts else f"`{parameter.name}`"
        yield f"| {names} | {cell(getattr(parameter, 'help', None) or '')} |"
    yield ""


def fleet_file() -> Iterator[str]:
    schema = json.loads((ROOT / "configs" / "fleet.schema.json").read_text())
    yield "# Fleet file\n\nEvery key of the YAML file. `conserve check FILE` says what is wrong with it.\n"
    yield from keys_of("(top level)", schema, schema)


def keys_of(
    path: str, block: Mapping[str, Any], schema: Mapping[str, Any], seen: tuple[str, ...] = ()
) -> Iterator[str]:
    yield f"## `{path}`\n\n{block.get('description', '')}\n\n| key | default | meaning |\n|---|---|---|"
    inner = []
    for name, key in block.get("properties", {}).items():
        references = re.findall(r'"#/\$defs/(\w+)"', json.dumps(key))
        nested = [one for one in references if "properties" in schema["$defs"][one] and one not in seen]
        inner += [(f"{path}.{name}".removeprefix("(top level)."), one) for one in nested]
        default = f"`{json.dumps(key['default'])}`" if "default" in key and not nested else ""
        required = "required" if name in block.get("required", ()) else default
        about = key.get("description") or (schema["$defs"][nested[0]].get("description") if nested else "")
        yield f"| `{name}` | {cell(required)} | {cell(about or '')} |"
    yield ""
    for where, reference in inner:
        yield from keys_of(where, schema["$defs"][reference], schema, (*seen, reference))


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

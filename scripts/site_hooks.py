"""MkDocs hooks of the documentation site (`mkdocs.yml`).

They add pages that docs/ does not hold: one page per interface module, made from docstrings, and
copies of the repository's files that a document links to. Links of a copied document are rewritten
to the copies.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
INTERFACES = ("frame/core/interfaces", "frame/interfaces")
COPIES = "repository"  # folder of the site that holds files from outside docs/
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the interface pages and every linked file of the repository, links of copied documents
    included."""
    for name, text in interface_pages():
        files.append(File.generated(config, name, content=text))
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages() if file.generated_by is None]
    seen: set[str] = set()
    while waiting:
        path, text = waiting.pop()
        for target in linked_files(path, text) - seen:
            seen.add(target)
            content = (ROOT / target).read_text()
            files.append(File.generated(config, f"{COPIES}/{target}", content=content))
            if target.endswith(".md"):
                waiting.append((target, content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/."""
    del config, files
    return rewritten(page.file.src_uri, markdown)


def interface_pages() -> Iterator[tuple[str, str]]:
    """(path in the site, Markdown) of the interface index and of each interface module."""
    paths = [path for folder in INTERFACES for path in sorted((ROOT / folder).glob("*.py")) if path.stem != "__init__"]
    modules = {path.stem: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    links = "\n".join(f"- [{module}]({name}.md)" for name, module in modules.items())
    yield (
        "interfaces/index.md",
        f"# Interfaces\n\nThe contracts that plugins implement, from the docstrings of the code, for plugin authors.\n\n{links}\n",
    )
    for name, module in modules.items():
        yield f"interfaces/{name}.md", f"# {module}\n\n::: {module}\n"


def linked_files(path: str, text: str) -> set[str]:
    """Files outside docs/ that the document links to, as paths in the repository. A folder stands
    for its README."""
    found = {resolved(path, target) for _, target, _ in LINK.findall(text) if "://" not in target}
    return {name for name in found if not name.startswith("docs/") and (ROOT / name).is_file()}


def resolved(path: str, target: str) -> str:
    """The path in the repository of a link's target."""
    name = posixpath.normpath((PurePosixPath(path).parent / target).as_posix())
    return posixpath.normpath(f"{name}/README.md") if (ROOT / name).is_dir() else name


def rewritten(src_uri: str, markdown: str) -> str:
    """The page's Markdown with links between docs/ and copied files as the site has them."""
    origin = src_uri.removeprefix(f"{COPIES}/") if src_uri.startswith(f"{COPIES}/") else f"docs/{src_uri}"

    def replace(match: re.Match[str]) -> str:
        if "://" in match[2]:
            return match[0]
        name = resolved(origin, match[2])
        place = name.removeprefix("docs/") if name.startswith("docs/") else f"{COPIES}/{name}"
        return match[1] + posixpath.relpath(place, posixpath.dirname(src_uri) or ".") + match[3]

    return LINK.sub(replace, markdown)

"""A hook of MkDocs: the repository's own pages and files in the site, so that links work in both places."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    **{f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG")},
}
"""File of the repository → page of the site."""
_LINK = re.compile(r"\]\(([^)#:]+)((?:#[^)]*)?)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `PAGES`, and each file of the repository that a page links to."""
    from mkdocs.structure.files import File

    linked: set[str] = set()
    for page in [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")]:
        linked |= set(_targets(page.relative_to(ROOT).as_posix(), page.read_text()))
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for target in sorted(linked):
        file = ROOT / target
        if file.is_file() and target not in PAGES and not target.startswith("docs/"):
            files.append(File.generated(config, target, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Write links as from the page's place in the site."""
    place = page.file.src_uri
    source = next((name for name, there in PAGES.items() if there == place), f"docs/{place}")

    def moved(link: re.Match[str]) -> str:
        target = _resolved(source, link[1])
        there = PAGES.get(target, target.removeprefix("docs/"))
        return f"]({posixpath.relpath(there, posixpath.dirname(place) or '.')}{link[2]})"

    return _LINK.sub(moved, markdown)


def _targets(source: str, text: str) -> Iterator[str]:
    return (_resolved(source, target) for target, _ in _LINK.findall(text))


def _resolved(source: str, target: str) -> str:
    """A link's target as a path in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))

"""A hook of MkDocs: the repository's own pages and files in the site, so that links work in both places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    **{f"{name}.md": f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")},
}
"""File of the repository → page of the site."""
_LINK = re.compile(r"\]\((?:\.\./)?([^)#:]+)((?:#[^)]*)?)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of `PAGES`, and each file of the repository that a page links to."""
    from mkdocs.structure.files import File

    texts = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    for name, page in PAGES.items():
        texts.append((ROOT / name).read_text())
        files.append(File.generated(config, page, content=texts[-1]))
    linked = {target for text in texts for target, _ in _LINK.findall(text)}
    for target in sorted(linked):
        file = ROOT / target
        if file.is_file() and target not in PAGES and not target.startswith("docs/"):
            files.append(File.generated(config, target, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write links as from a page in docs/."""

    def moved(link: re.Match[str]) -> str:
        target = PAGES.get(link[1], link[1].removeprefix("docs/"))
        return f"]({target}{link[2]})"

    return _LINK.sub(moved, markdown)

"""Self-contained HTML pages: `page.html` with a script and data inside. They load nothing and run no script of data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib import resources
from typing import Any


def web_page(title: str, script: str, data: Any) -> bytes:
    """A page whose content is drawn by `page.js` and another script of this package.

    Only these scripts run (their hash is in the page's content security policy). In the data, `<` is escaped, so that
    no text can end the element that holds it. NaN and infinity become null.
    """
    folder = resources.files("multipack.reports")
    template, helpers, own = (
        folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.js", script)
    )
    code = f"\n{helpers}\n{own}"
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    text = json.dumps(plain(data), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "SCRIPT_HASH": f"sha256-{digest}",
        "PAGE_TITLE": html.escape(title),
        "PAGE_DATA": text,
        "PAGE_SCRIPT": code,
    }
    made = ""
    for name, content in parts.items():  # in the order of the template; content is not searched
        before, _, template = template.partition(name)
        made += before + content
    return (made + template).encode("utf-8", errors="replace")


def plain(value: Any) -> Any:
    """A value for strict JSON: numbers with six digits, and null where one is not finite."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value

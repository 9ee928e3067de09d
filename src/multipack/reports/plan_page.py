"""The HTML page of a plan: its picture, an animation of documents that fall into packs, and its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import multipack
from multipack.reports.web_page import web_page


def plan_page(view: dict[str, Any], title: str, rows: Sequence[tuple[str, str]]) -> bytes:
    """The page of a plan.

    Args:
        view: values of `plan_view`.
        title: heading of the page.
        rows: (name, text) of the plan's report.
    """
    more = {
        "title": title,
        "rows": rows,
        "made": f"multipack {multipack.__version__}",
    }
    return web_page(f"{title} · multipack", "plan_page.js", view | more)

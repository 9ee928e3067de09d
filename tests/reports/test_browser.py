"""The pages in a real browser: `apt-get update && apt-get install -y chromium`; skipped without it."""

import sys
from pathlib import Path

import pytest

from multipack.reports.run_data import read_run
from multipack.reports.run_page import run_page

sys.path.insert(0, str(Path(__file__).parent))
from browser import CHROMIUM, MISSING, Browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def check(browser, path, width, dark):
    """Open a page; it logs nothing, loads nothing and does not overflow."""
    browser.problems.clear()
    browser.open(path, width, dark=dark)
    assert browser.problems == []
    assert browser.overflowing() == []
    ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 21, 27)") is dark


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_runs(browser, trained, written, tmp_path, width, dark):
    check(browser, trained / "report.html", width, dark)
    charts = browser.evaluate("document.querySelectorAll('.chart svg').length")
    assert charts >= 6
    assert browser.evaluate("document.querySelectorAll('.chart path[d=\"\"]').length") == 0
    assert browser.evaluate("/NaN|undefined/.test(document.getElementById('page').outerHTML)") is False
    (tmp_path / "two.html").write_bytes(run_page([read_run(written("a")), read_run(written("b", lr="0.1"))]))
    check(browser, tmp_path / "two.html", width, dark)
    # Every control works: log axes, smoothing, samples, the filter of settings.
    browser.evaluate(
        """for (const input of document.querySelectorAll("input")) {
          if (input.type === "checkbox") input.click();
          else {
            input.value = input.type === "search" ? "optimizer" : input.min;
            input.dispatchEvent(new Event("input"));
          }
        }"""
    )
    assert browser.problems == []
    assert browser.evaluate("/NaN|undefined/.test(document.getElementById('page').outerHTML)") is False
    shown = browser.evaluate("[...document.querySelectorAll('tr')].filter((row) => !row.hidden).length")
    assert shown < browser.evaluate("document.querySelectorAll('tr').length")


def test_what_the_browser_finds(browser, tmp_path):
    """The checks of this file can fail."""
    bad = tmp_path / "bad.html"
    bad.write_text("<body><p style='width: 2000px'>wide</p><script>console.error('no'); missing()</script>")
    browser.open(bad, 390)
    assert len(browser.problems) == 2
    assert browser.overflowing() == ["P  wide"]
    browser.problems.clear()
    bad.write_text("<img src='http://localhost:9/x.png'>")
    browser.open(bad, 390)
    assert any("localhost" in problem for problem in browser.problems)

"""The pages in a real browser: `apt-get update && apt-get install -y chromium`; skipped without it."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from multipack.planning.plan import plan
from multipack.planning.report import report
from multipack.reports.plan_page import plan_page, plan_view
from multipack.reports.run_data import RunData
from multipack.reports.run_page import run_page

sys.path.insert(0, str(Path(__file__).parent))
from browser import CHROMIUM, MISSING, Browser

WAIT = "new Promise((done) => setTimeout(done, 150))"
PIXELS = "document.querySelector('canvas').toDataURL()"
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
    # Names of metrics that objects of JavaScript inherit.
    record = {"step": 21, "loss": 1.0, "dt": 1.0, "constructor": 1.0, "toString": 2.0, "__proto__": 3.0}
    evaluation = {"step": 21, "val_loss": 1.0, "val_constructor": 1.0, "valueOf": 1.0}
    with (trained / "metrics.jsonl").open("a") as file:
        file.write(f"{json.dumps(record)}\n{json.dumps(evaluation)}\n")
    (trained / "report.html").write_bytes(run_page([RunData(trained)]))
    check(browser, trained / "report.html", width, dark)
    charts = browser.evaluate("document.querySelectorAll('.chart svg').length")
    assert charts >= 6
    assert browser.evaluate("document.querySelectorAll('.chart path[d=\"\"]').length") == 0
    assert browser.evaluate("/NaN|undefined/.test(document.getElementById('page').outerHTML)") is False
    (tmp_path / "two.html").write_bytes(run_page([RunData(written("a")), RunData(written("b", lr="0.1"))]))
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


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_a_plan(browser, tmp_path, width, dark):
    lengths = np.random.default_rng(0).lognormal(5, 1, 3000).clip(1, 2048).astype(np.int64)
    made = plan(lengths, capacity=2048, packs_per_step=16)
    view = plan_view(made, report(made, 8), 8, 0.4, "multipack train")
    (tmp_path / "plan.html").write_bytes(plan_page(view, "Plan of <lengths>", [("documents", "3,000")]))
    check(browser, tmp_path / "plan.html", width, dark)
    assert browser.evaluate("document.querySelectorAll('canvas').length") == 2
    # The animation runs, pauses, and can be moved.
    first, second = (browser.evaluate(f"{WAIT}.then(() => time.value)") for _ in range(2))
    assert 0 < float(first) < float(second) < 1
    paused = browser.evaluate(
        f"play.click(); const at = time.value; {WAIT}.then(() => [at, time.value, play.textContent])"
    )
    assert paused[0] == paused[1]
    assert paused[2] == "play"
    empty = browser.evaluate(PIXELS)
    browser.evaluate("time.value = 1; time.dispatchEvent(new Event('input'))")
    assert browser.evaluate(PIXELS) != empty
    assert browser.evaluate("play.textContent") == "play again"
    assert browser.problems == []


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

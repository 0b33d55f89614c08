"""Pages of reports in a real browser: drawn without an error, light and dark, every tab; where there is a Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnxc
from onnxc.reports.compare import compare_page
from onnxc.reports.explain import explain_page
from onnxc.reports.page import written
from onnxc.tools.compare.results import Comparison, Metrics, OutputComparison, Special, TensorComparison
from onnxc.tools.compare.verdict import Verdict
from onnxc.tools.pages import write_comparison
from tests.browser import Browser, find
from tests.test_reports import DIGITS, HOSTILE, hostile, lstm, parsed

pytestmark = pytest.mark.skipif(find() is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find()
    assert executable is not None
    with Browser(executable, tmp_path_factory.mktemp("browser")) as found:
        yield found


def looked_at(browser: Browser, page: Path, *, dark: bool = False) -> None:
    """Opens a page, then each of its tabs, and both themes: nothing is logged, nothing is asked for."""
    browser.open(page, dark=dark)
    for tab in browser.evaluate("Object.keys(tabs.all)"):
        browser.evaluate(f"openTab({json.dumps(tab)})")
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
    for _ in range(3):
        browser.evaluate("show('theme').click()")
    assert browser.problems == []
    assert browser.evaluate("show('fault').hidden"), browser.evaluate("show('fault').textContent")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"


def test_explain(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    onnxc.compile(DIGITS).explain().to_html(page)
    looked_at(browser, page)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"
    browser.evaluate("openTab('graph')")
    boxes = browser.evaluate("view.graph.cy.nodes().filter(n => n.data('frame')).map(n => n.data('label'))")
    assert [b.split(" ")[0] for b in boxes] == ["#0", "#1", "#2", "#3", "#4", "#5"], "small models are open"
    assert browser.evaluate("view.graph.cy.nodes().filter(n => n.data('item')).length") == 12
    browser.evaluate("view.graph.closeAll()")
    assert browser.evaluate("view.graph.cy.nodes().length") == 8, "six kernels, an input, an output"
    browser.evaluate("view.graph.toggle(3)")
    assert browser.evaluate("view.graph.cy.nodes().filter(n => n.data('item')).length") == 3
    browser.evaluate("view.graph.search('block2')")
    assert browser.evaluate("view.graph.hits.join()") == "3"
    browser.evaluate("void view.graph.cy.getElementById('g1').emit('tap')")
    details = browser.evaluate("show('aside').textContent")
    assert "Why these are together" in details and "static void k1" in details and "n3 Conv" in details
    browser.evaluate("[...document.querySelectorAll('#aside .link')].find(l => l.textContent === 'n3 Conv').click()")
    assert "n3 Conv" in browser.evaluate("show('aside').querySelector('h2').textContent")
    browser.evaluate("openTab('compile')")
    assert "+ " in browser.evaluate("document.querySelector('pre.diff').textContent")
    browser.evaluate("openTab('nodes')")
    field = "document.querySelector('#tab-nodes input')"
    browser.evaluate(f"({field}.value = 'relu', {field}.dispatchEvent(new Event('input')))")
    assert browser.wait("document.querySelector('#tab-nodes .count').textContent") == "3 of 14"
    assert browser.problems == []


def test_profile_of_a_loop_in_the_dark(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    onnxc.compile(lstm()).profile({"x": np.zeros((7, 1, 8), np.float32)}, runs=3).to_html(page)
    looked_at(browser, page, dark=True)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 27)"
    assert browser.evaluate("document.querySelectorAll('#tab-kernels canvas').length") >= 3
    browser.evaluate("openTab('kernels')")
    browser.evaluate("choose(0)")
    assert "Over the runs" in browser.evaluate("show('aside').textContent")
    browser.resize(390, 844)
    looked_at(browser, page)
    browser.resize(1400, 900)
    assert browser.evaluate("localStorage !== null") and browser.problems == []


def test_hostile_strings_are_text(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    model = onnxc.compile(hostile())
    model.profile({f"{HOSTILE}0": np.ones((2, 4), np.float32)}, runs=2).to_html(page, model=hostile())
    looked_at(browser, page)
    browser.evaluate("choose(0)")
    assert HOSTILE in browser.evaluate("show('aside').textContent")
    assert browser.evaluate("document.title").startswith(HOSTILE.replace("\u2028", "")[:20])
    assert browser.evaluate("document.images.length + document.scripts.length") == 7
    result = Comparison(
        (OutputComparison(HOSTILE, 0, "float32", (2,), 1.0, 1.0, 0, False, note=HOSTILE),), HOSTILE, 1, 1e-3, 1e-5
    )
    write_comparison(page, result, hostile(), title=HOSTILE)
    looked_at(browser, page)
    assert browser.evaluate("document.images.length + document.scripts.length") == 7


def layer(node: int, verdict: Verdict, introduced: float | None, *, metrics: bool = True) -> TensorComparison:
    histogram = {"0": 90, "1": 8, "4": 2}
    found = Metrics(
        1e-3,
        1e-4,
        1e-2,
        1e-3,
        {"0.5": 1e-5},
        5.0,
        {"0.5": 0.0},
        histogram,
        1.0,
        80.0,
        theirs=Special(nan=1, first=(0, 1)),
    )
    error = float("inf") if verdict is Verdict.WRONG else 1e-6 * node
    return TensorComparison(
        f"t{node}", node, "Relu", f"block.{node}", "model.py:3", (node,), node, "float32", (1, 8),
        found if metrics else None, error, 0.0, introduced, 1e-6, verdict, tap="inside",
    )  # fmt: skip


def test_compare(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    layers = (
        layer(0, Verdict.EQUAL, 0.0), layer(1, Verdict.ROUNDING, 9e-7), layer(2, Verdict.THEIRS_WORSE, 1e-5),
        layer(3, Verdict.WRONG, 0.5),
        layer(4, Verdict.OURS_WORSE, None), layer(5, Verdict.SKIPPED, None, metrics=False),
    )  # fmt: skip
    outputs = (OutputComparison("y", 0, "float32", (1, 8), 0.5, 0.5, 0, False, verdict=Verdict.WRONG, note="too far"),)
    result = Comparison(
        outputs, "onnxruntime", 1, 1e-3, 1e-5, layers=layers, seed=0, notes=("a note",), seconds={"layers": 1.0}
    )
    write_comparison(page, result, DIGITS)
    looked_at(browser, page)
    top = browser.evaluate("show('tiles').textContent")
    assert "Differs" in top and "n3 Relu" in top and "2 introduce more" in top
    assert "n3 Relu" in browser.evaluate("show('aside').textContent"), "the culprit is shown at once"
    assert browser.evaluate("view.graph.groups.get(3).tone") == "heat3"
    browser.evaluate("openTab('layers')")
    pick = "document.querySelector('#tab-layers select')"
    browser.evaluate(f"({pick}.value = 'wrong', {pick}.dispatchEvent(new Event('input')))")
    assert browser.wait("document.querySelector('#tab-layers .count').textContent") == "1 of 6"
    browser.evaluate("choose(1)")
    assert "ulp" in browser.evaluate("show('aside').textContent")
    assert browser.wait("document.querySelector('#aside canvas') !== null") and browser.problems == []


def test_empty_states(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    empty = onnxc.compile(parsed("(float[2] x) => (float[2] x2) { x2 = Identity(x) }")).explain().to_dict()
    written(page, explain_page({**empty, "kernels": [], "outputs": [], "stages": {}}, None))
    looked_at(browser, page)
    assert "no kernels" in browser.evaluate("show('tab-graph').textContent")
    written(page, compare_page(Comparison((), "onnxruntime", 1, 1e-3, 1e-5).to_dict()))
    looked_at(browser, page)
    assert "Only the outputs" in browser.evaluate("show('tab-error').textContent")


def test_a_large_model_is_drawn_whole(browser: Browser, tmp_path: Path) -> None:
    """More than a thousand kernels, with residual connections: the layout may not be worse than about linear."""
    page = tmp_path / "p.html"
    report = onnxc.compile(parsed("(float[2, 2] x) => (float[2, 2] y) { y = MatMul(x, x) }")).explain().to_dict()
    (first,) = report["kernels"]
    kernels = []
    for k in range(1200):
        takes = [{"kernel": k - d, "store": 0} for d in (1, 6) if k >= d and (d == 1 or k % 6 == 0)]
        origins = [{**first["origins"][0], "number": 2 * k + j, "name": f"n{2 * k + j}"} for j in range(2)]
        kernels.append({**first, "number": k, "takes": takes, "origins": origins, "steps": []})
    written(page, explain_page({**report, "kernels": kernels}, None))
    looked_at(browser, page)
    assert browser.evaluate("view.graph.cy.nodes().length") == 1201
    assert browser.evaluate("view.graph.open.size") == 0, "a large model is closed at first"
    browser.evaluate("(openTab('graph'), view.graph.search('n2398'))")
    assert browser.evaluate("view.graph.hits.join()") == "1199"

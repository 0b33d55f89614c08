"""Reports as data and as pages: edges of the graph, passes, memory, traces, and that a page is one safe file.

What a browser makes of the pages is in test_reports_browser.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import onnxc
from onnxc.cli import app
from onnxc.errors import InputError
from onnxc.frontends import onnx_file
from onnxc.ir.text import from_text, to_text
from onnxc.passes import record
from onnxc.passes.pipeline import PassOptions, passes
from onnxc.passes.record import record_import, record_passes
from onnxc.report import Report
from onnxc.reports.compare import compare_page
from onnxc.reports.page import ASSETS, asset, embedded
from onnxc.tools.compare.results import Comparison, OutputComparison
from onnxc.tools.compare.verdict import Verdict
from onnxc.tools.pages import nodes_of, write_comparison
from tests.small_models import parse

DIGITS = Path(__file__).parents[1] / "models/digits/digits.onnx"
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<!--\u2028{{ 7 * 7 }}"


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {text}')


def hostile() -> onnx.ModelProto:
    """A model whose every name is an attack on a page."""
    names = [f"{HOSTILE}{k}" for k in range(4)]
    nodes = [
        helper.make_node("MatMul", names[:2], [names[2]], name=HOSTILE, doc_string=HOSTILE),
        helper.make_node("Exp", [names[2]], [names[3]], name=HOSTILE + "b"),
    ]
    nodes[1].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f'File "{HOSTILE}.py", line 3, in f')
    types = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [HOSTILE, 4]) for n in (names[0], names[3])]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), names[1])
    graph = helper.make_graph(nodes, HOSTILE, types[:1], types[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def lstm() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    size, hidden, steps = 8, 16, 7
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=hidden)
    weights = {"w": (1, 4 * hidden, size), "r": (1, 4 * hidden, hidden)}
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, (steps, 1, size)),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]  # fmt: skip
    constants = [numpy_helper.from_array(rng.standard_normal(s, np.float32), n) for n, s in weights.items()]
    graph = helper.make_graph([node], "g", info[:1], info[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


class Page(HTMLParser):
    """The elements of a page, in the order in which they begin; that each is closed; the texts of scripts."""

    VOID = ("meta", "link", "input", "br", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    @property
    def data(self) -> Any:
        (found,) = [
            k for k, (tag, attrs) in enumerate(t for t in self.tags if t[0] == "script") if attrs.get("id") == "data"
        ]
        return json.loads(self.texts["script"][found])


def checked(text: str) -> Page:
    """A page that is whole and loads nothing."""
    page = Page(text)
    assert text.startswith("<!doctype html>") and page.tags[0][0] == "html"
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert links == ["data:,"], "nothing is loaded"
    assert not any(key.startswith("on") for _, attrs in page.tags for key in attrs), "no handler is written as text"
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    assert [tag for tag, _ in page.tags].count("script") == 7
    assert not [tag for tag, _ in page.tags if tag in ("img", "iframe", "object", "embed", "form", "base")]
    return page


# ---------------------------------------------------------------- what a report knows


def edges(report: Report) -> list[list[int]]:
    return [sorted({take.kernel for take in k.takes}) for k in report.kernels]


def test_edges_lead_from_the_kernels_that_store_to_those_that_read() -> None:
    text = "(float[8, 8] x, float[8, 8] w, float[8, 8] v) => (float[8, 8] y, float[8, 8] z) {"
    text += " a = MatMul(x, w) b = Tanh(a) c = MatMul(b, v) y = Add(c, b) z = MatMul(y, x) }"
    report = onnxc.compile(parsed(text)).explain()
    assert [k.label for k in report.kernels] == ["MatMul, Tanh", "MatMul, Add", "MatMul"]
    assert edges(report) == [[-2, -1], [-3, 0], [-1, 1]]
    assert [(p.name, p.type) for p in report.inputs] == [(n, "float32[8, 8]") for n in "xwv"]
    assert [(p.name, p.source and p.source.kernel) for p in report.outputs] == [("y", 1), ("z", 2)]
    steps = report.kernels[0].steps
    assert [s.op for s in steps] == ["matmul", "tanh"] and steps[1].reads == (0,)
    assert [s.nodes for s in steps] == [(0,), (1,)] and steps[0].work > steps[1].work > 0


def test_edges_of_a_concatenation_and_of_views() -> None:
    text = "(float[4, 8] x, float[8, 8] w) => (float[8, 8] z) <int64[2] s = {8, 8}> {"
    text += " a = MatMul(x, w) b = Exp(x) c = Concat<axis = 0>(a, b) r = Reshape(c, s) z = MatMul(r, w) }"
    report = onnxc.compile(parsed(text)).explain()
    last = len(report.kernels) - 1
    made = {k.number for k in report.kernels if "MatMul" in k.label or "Exp" in k.label} - {last}
    reached: set[int] = set()
    left = [last]
    while left:
        number = left.pop()
        reached.add(number)
        left += [t.kernel for t in report.kernels[number].takes if t.kernel >= 0]
    assert made and reached >= made | {last}


def test_edges_of_a_loop_come_from_the_step_before_too() -> None:
    report = onnxc.compile(lstm()).explain()
    back = [(t.kernel, k.number) for k in report.kernels for t in k.takes if t.kernel >= k.number]
    assert back and all(k.takes for k in report.kernels)
    assert all(
        0 <= t.store < len(report.kernels[t.kernel].boundaries)
        for k in report.kernels
        for t in k.takes
        if t.kernel >= 0
    )
    assert all(0 <= p.first <= p.last < len(report.kernels) for p in report.memory.places)


def overlapping(report: Report) -> list[Any]:
    """Pairs of intermediates that are alive at once in the same bytes."""
    places = [p for p in report.memory.places if p.offset is not None and p.nbytes]
    found = []
    for k, a in enumerate(places):
        for b in places[:k]:
            together = a.first <= b.last and b.first <= a.last
            assert a.offset is not None and b.offset is not None and a.nbytes is not None and b.nbytes is not None
            if together and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes:
                found.append((a, b))
    return found


def test_places_in_the_arena() -> None:
    dynamic = onnxc.compile(DIGITS)
    assert all(p.offset is None for p in dynamic.explain().memory.places)
    profiled = dynamic.profile({"image": np.zeros((3, 1, 8, 8), np.float32)}, runs=2)
    fixed = onnxc.compile(DIGITS, input_shapes={"image": (3, 1, 8, 8)}).explain()
    for report in (profiled, fixed):
        memory = report.memory
        assert isinstance(memory.arena, int) and len(memory.places) == memory.buffers
        assert memory.buffers_total == sum(p.nbytes or 0 for p in memory.places)
        assert max((p.offset or 0) + (p.nbytes or 0) for p in memory.places) <= memory.arena
        assert not overlapping(report)


def test_times_of_nodes_add_up_to_those_of_kernels() -> None:
    report = onnxc.compile(DIGITS).profile({"image": np.zeros((3, 1, 8, 8), np.float32)}, runs=3)
    assert report.profile is not None and len(report.profile.times) == 3
    rows = report.node_times()
    assert sum(r.seconds for r in rows) == pytest.approx(sum(k.best for k in report.profile.kernels))
    assert rows == sorted(rows, key=lambda r: -r.seconds) and rows[0].origin.op_type == "Conv"
    assert all(report.kernels[n].origins for r in rows for n in r.kernels)
    assert json.loads(json.dumps(report.to_dict()))["node_times"][0]["seconds"] == rows[0].seconds
    assert onnxc.compile(DIGITS).explain().node_times() == []


def test_a_saved_model_and_one_of_several_programs_have_the_same(tmp_path: Path) -> None:
    model = onnxc.compile(DIGITS)
    model.save(tmp_path / "m.onnxc")
    assert onnxc.load(tmp_path / "m.onnxc").explain().kernels == model.explain().kernels
    text = "(float[n] x) => (float[m] y) { a = Exp(x) k = NonZero(a) f = Cast<to = 1>(k) b = Exp(f)"
    text += " d = ReduceSum<keepdims = 0>(b) r = Neg(x) u = Unique(r) y = Add(u, d) }"
    report = onnxc.compile(parsed(text)).explain()
    assert all(-1 < t.kernel < len(report.kernels) for k in report.kernels for t in k.takes)
    report.to_html(tmp_path / "staged.html")
    checked((tmp_path / "staged.html").read_text())


# ---------------------------------------------------------------- passes


def test_texts_of_passes_are_the_graphs() -> None:
    text = '(float[2, 3] x) => (float[3, 2] y) { a = Transpose(x) b = Transpose(x) c = Gelu<approximate = "tanh">(a)'
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text} y = Add(c, b) }}')
    graph = onnx_file.load(model)
    log = record_passes(graph, PassOptions())
    assert [r.name for r in log.records] == [record.IMPORT, *(name for name, _ in passes(PassOptions()))]
    assert [s.op_type for s in log.nodes] == ["Transpose", "Transpose", "Gelu", "Add"]
    texts = list(log.texts())
    assert to_text(from_text(texts[0])) == to_text(graph)
    for (_, run), found, entry in zip(passes(PassOptions()), texts[1:], log.records[1:], strict=True):
        graph = run(graph)
        assert to_text(from_text(found)) == to_text(graph)
        assert entry.nodes == len(graph.nodes)
    shared = next(r for r in log.records if r.name == "share-common")
    assert shared.ops == {"transpose": -1} and shared.change is not None
    kept = sum(n for sign, n in shared.change if sign == "=" and isinstance(n, int))
    assert kept > len(texts[-1].splitlines()) / 2, "what a pass leaves alone keeps its names"


def test_a_large_graph_has_numbers_and_no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_LINES", 3)
    log = record_passes(onnx_file.load(DIGITS), PassOptions())
    assert all(r.change is None for r in log.records) and log.records[1].ops["conv"] == 3
    graph = onnx_file.load(DIGITS)
    assert [r.name for r in record_import(graph, graph).records] == ["import", "decompose"]


def test_strings_that_look_like_values_stay() -> None:
    graph = onnx_file.load(parsed("(float[2] x) => (float[2] y) { a = Neg(x) y = Exp(a) }"))
    graph.nodes[0].outputs[0].name = '%7 = "a\\"%1'
    text = next(record_passes(graph, PassOptions()).texts())
    assert json.dumps('%7 = "a\\"%1') in text


# ---------------------------------------------------------------- pages


def test_a_name_of_a_megabyte_is_looked_at_once() -> None:
    model = parse("(float[n] x) => (float[n] y) { y = Exp(x) }")
    model.graph.input[0].name = model.graph.node[0].input[0] = 'a\n%3 "' * 200_000
    texts = list(record_passes(onnx_file.load(model), PassOptions()).texts())
    assert max(len(line) for text in texts for line in text.splitlines()) < 5000
    assert all(r"a\n%3 \"a\n%3 \"" in text for text in texts)


def test_json_in_a_script_element() -> None:
    data = {"a": HOSTILE, "b": [float("inf"), 1.5, float("nan")], HOSTILE: None}
    text = embedded(data)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": HOSTILE, "b": [None, 1.5, None], HOSTILE: None}


def test_vendored_files_are_those_that_were_listed() -> None:
    listed = json.loads(asset("vendored.json"))
    for name, digest in listed["files"].items():
        assert hashlib.sha256(asset(name).encode()).hexdigest() == digest, f"{name} is not as `make assets` made it"
    licences = asset("LICENSES.txt")
    assert all(
        f"{p['name']} {p['version']} ({p['license']})" in licences and p["integrity"] for p in listed["packages"]
    )
    names = {p["name"] for p in listed["packages"]}
    assert {"cytoscape", "d3-dag", "echarts", "tabulator-tables"} <= names


def test_scripts_can_stand_in_a_page() -> None:
    for path in (Path(onnxc.__file__).parent / "reports" / ASSETS).iterdir():
        text = path.read_text(encoding="utf-8").lower()
        assert path.suffix == ".txt" or ("</script" not in text and "<!--" not in text and "</style" not in text)


def test_own_scripts_show_text_as_text() -> None:
    for name in ("common.js", "graph.js", "explain.js", "compare.js"):
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http:",
            "https:",
        ):
            assert word not in asset(name)


def test_a_page_of_a_hostile_model(tmp_path: Path) -> None:
    model = onnxc.compile(hostile())
    report = model.profile({f"{HOSTILE}0": np.ones((2, 4), np.float32)}, runs=2)
    report.to_html(tmp_path / "p.html", model=hostile())
    text = (tmp_path / "p.html").read_text()
    page = checked(text)
    assert page.data["name"] == HOSTILE and page.data["kind"] == "profile"
    assert page.data["kernels"][0]["origins"][0]["name"] == HOSTILE
    assert [r["name"] for r in page.data["passes"]["records"]][:2] == ["import", "decompose"]
    assert page.texts["title"] == [f"{HOSTILE}: profile"] and page.texts["h1"] == [f"{HOSTILE}: where the time goes"]
    assert "<img src=x" not in text
    model.explain().to_html(tmp_path / "e.html", title="<b>")
    page = checked((tmp_path / "e.html").read_text())
    assert page.data["kind"] == "explain" and page.data["passes"] is None and page.texts["title"] == ["<b>: explain"]


def test_a_number_is_no_path(tmp_path: Path) -> None:
    """Where `open` would take it for an open file."""
    report = onnxc.compile(parse("(float[n] x) => (float[n] y) { y = Exp(x) }")).profile({"x": np.ones(2, np.float32)})
    with open(tmp_path / "mine", "w") as mine:
        for write in (report.to_html, report.to_trace):
            with pytest.raises(TypeError):
                write(mine.fileno())  # type: ignore[arg-type]
        mine.write("ours")
    assert (tmp_path / "mine").read_text() == "ours"


def test_passes_are_those_of_the_file_that_was_compiled(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(parsed("(float[2] x) => (float[2] y) { y = Exp(x) }"), path)
    report = onnxc.compile(path).explain()
    assert report.record is not None
    log = report.record()
    assert log is not None and [s.op_type for s in log.nodes] == ["Exp"]
    onnx.save(parsed("(float[2] x) => (float[2] y) { y = Neg(x) }"), path)
    assert report.record() is None, "the file is another now"
    path.unlink()
    assert report.record() is None


def comparison(*outputs: OutputComparison) -> Comparison:
    return Comparison(outputs, "onnxruntime", 1, 1e-3, 1e-5)


def output(name: str = "y", **more: Any) -> OutputComparison:
    return OutputComparison(name, 0, "float32", (2, 3), 1e-3, 1e-2, 0, False, verdict=Verdict.WRONG, **more)


def test_the_page_of_a_comparison(tmp_path: Path) -> None:
    result = comparison(output(HOSTILE, note=HOSTILE), output(errors64=(float("inf"), 0.5)))
    write_comparison(tmp_path / "c.html", result, hostile())
    page = checked((tmp_path / "c.html").read_text())
    found: Mapping[str, Any] = page.data
    assert found["comparison"]["outputs"][0]["name"] == HOSTILE and found["comparison"]["verdict"] == "wrong"
    assert [(n["number"], n["op_type"], n["reads"]) for n in found["graph"]] == [(0, "MatMul", []), (1, "Exp", [0])]
    assert found["graph"][0]["name"] == HOSTILE
    assert checked(compare_page(result.to_dict())).data["graph"] == []
    graph = onnx_file.load(DIGITS)
    assert [n["op_type"] for n in nodes_of(graph)][:3] == ["Conv", "BatchNormalization", "Relu"]


# ---------------------------------------------------------------- traces


def test_a_trace_has_each_kernel_of_each_run(tmp_path: Path) -> None:
    report = onnxc.compile(DIGITS).profile({"image": np.zeros((2, 1, 8, 8), np.float32)}, runs=3)
    report.to_trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert all(
        e["dur"] >= 0 and e["ts"] >= 0 and isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in slices
    )
    runs = [e for e in slices if e["cat"] == "run"]
    kernels = [e for e in slices if e["pid"] == 1 and e["tid"] == 1 and e["cat"] != "run"]
    assert len(runs) == 3 and len(kernels) == 3 * len(report.kernels)
    assert report.profile is not None
    assert [e["dur"] * 1e3 for e in kernels] == pytest.approx([n for run in report.profile.times for n in run])
    for a, b in pairwise(kernels):
        assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    for run in runs:
        inside = [k for k in kernels if run["ts"] - 1e-6 <= k["ts"] < run["ts"] + run["dur"] - 1e-6]
        assert sum(k["dur"] for k in inside) == pytest.approx(run["dur"])
    assert kernels[0]["args"]["nodes"][0].startswith("n0 Conv") and kernels[0]["args"]["flops"] > 0
    of_nodes = [e for e in slices if e["pid"] == 1 and e["tid"] == 2]
    assert sum(e["dur"] for e in of_nodes) == pytest.approx(sum(e["dur"] for e in kernels))
    assert {e["name"] for e in events if e["ph"] == "C"} == {"intermediates"}
    assert {e["name"] for e in slices if e["pid"] == 2} == set(report.stages)


def test_a_trace_needs_a_profile(tmp_path: Path) -> None:
    model = onnxc.compile(parsed("(float[0] x) => (float[0] y) { y = Exp(x) }"))
    with pytest.raises(InputError, match="profile"):
        model.explain().to_trace(tmp_path / "t.json")
    model.profile([np.zeros(0, np.float32)], runs=2).to_trace(tmp_path / "t.json")
    slices = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in slices if e["cat"] == "run"] == ["run 1", "run 2"]


# ---------------------------------------------------------------- the command line


def test_the_commands(tmp_path: Path) -> None:
    html, trace = tmp_path / "r.html", tmp_path / "t.json"
    ran = CliRunner().invoke(app, ["explain", str(DIGITS), "--html", str(html)])
    assert ran.exit_code == 0 and f"written to {html}" in ran.stdout
    page = checked(html.read_text())
    assert page.data["passes"]["records"] and page.texts["title"] == ["digits.onnx: explain"]
    command = ["profile", str(DIGITS), "--dim", "batch=2", "--runs", "2", "--html", str(html), "--trace", str(trace)]
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    assert "us a run (best of 2" in ran.stdout and "nodes of the model" in ran.stdout and "n3 Conv" in ran.stdout
    assert checked(html.read_text()).data["profile"]["dims"] == {"batch": 2}
    assert json.loads(trace.read_text())["otherData"]["name"] == "digits"
    ran = CliRunner().invoke(app, ["profile", str(DIGITS), "--dim", "batch=2", "--runs", "2", "--json"])
    assert ran.exit_code == 0 and json.loads(ran.stdout)["node_times"]
    ran = CliRunner().invoke(app, ["explain", str(DIGITS), "--html", str(tmp_path / "no" / "r.html")])
    assert ran.exit_code == 2 and "onnxc: error:" in ran.stderr

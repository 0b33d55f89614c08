"""Peers of the benchmarks, the models that they make, and what is made of their results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import onnxc
from benchmarks import generated, plots
from benchmarks.common import Mark
from benchmarks.zoo import row, share_of_peak
from onnxc.errors import InputError
from onnxc.tools import bench as tool
from onnxc.tools.bench import Bench, Timing, bench

MODEL = '<ir_version: 8, opset_import: ["" : 18]> g (float[N, 8] x) => (float[N, 8] y) { y = Tanh(x) }'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


# ---------------------------------------------------------------- peers


def test_a_peer_that_is_not_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no engine 'tvm' to compare with; there are onnxruntime, openvino"):
        bench(model, peers=["tvm"])
    with pytest.raises(InputError, match="no engine 'onnxc'"):
        bench(model, peers=["onnxc"])
    monkeypatch.setattr(tool, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="'openvino' is not installed; `pip install openvino` installs it"):
        bench(model, peers=["openvino"])


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_openvino_beside_onnxruntime(model: Path) -> None:
    shapes = {"x": (3, 8)}
    found = bench(
        model,
        peers=["onnxruntime", "openvino"],
        rounds=1,
        turn=0.001,
        warm_up=0.001,
        input_shapes=shapes,
        profile_runs=2,
    )
    assert [t.engine for t in found.timings] == ["onnxc", "onnxruntime", "openvino"]
    assert set(found.to_dict()["ratios"]) == {"onnxruntime", "openvino"}
    assert found.profile is not None and found.profile["kernels"][0]["pointwise"] == 10 * 3 * 8


# ---------------------------------------------------------------- results


def result(scale: float = 1.0) -> dict[str, Any]:
    times = {"onnxc": 1e-3 * scale, "onnxruntime": 2e-3, "openvino": 1.6e-3}
    kernel = {"kind": "conv winograd F(2x2)", "label": "Conv", "best": 9e-4, "reads": 10**6, "writes": 10**6,
              "flops": 10**8, "pointwise": 10**6}  # fmt: skip
    profile = {"peaks": {"threads": 2, "lanes": 8, "flops": 2e11, "bandwidth": 4e10}, "total": 1e-3, "flops": 10**8,
               "share_of_peak": 0.5, "kernels": [kernel, {**kernel, "kind": "loops", "flops": 0, "best": 1e-4},
                                                 {**kernel, "best": 1e-9}], "kinds": {}}  # fmt: skip
    timings = tuple(Timing(e, "1", 0.1, (t, 2 * t)) for e, t in times.items())
    return Bench("m.onnx", 2, 20, timings, profile).to_dict()


def results(**speed: Any) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "compiler": "g++ 12", "peaks": result()["profile"]["peaks"],
               "packages": {"onnxruntime": "1.0", "openvino": "2.0"}}  # fmt: skip
    marks = [{"of": "speed", **Mark("bert by onnxruntime's", 0.1, 0.7).to_dict()},
             {"of": "int8", **Mark("resnet50", 0.5, 0.7).to_dict()},
             {"of": "memory", **Mark("share", 0.9, 0.85, at_least=True).to_dict()}]  # fmt: skip
    return {"machine": machine, "marks": marks, "results": {"speed": speed}}


def test_a_line_of_the_table() -> None:
    assert row("m", result()) == ["m", "1 ms", "2 ms", "1.6 ms", "0.50", "0.50", "0.62", "0.62", "0.62", "50%"]
    assert share_of_peak(result(), "onnxruntime") == 0.25
    alone = result()
    alone["timings"], alone["ratios"] = alone["timings"][:2], {"onnxruntime": alone["ratios"]["onnxruntime"]}
    assert row("m", {**alone, "profile": None})[3:] == ["", "0.50", "0.50", "", "", "0.50", ""]


def test_marks_that_are_to_be_reached() -> None:
    assert Mark("a", 0.9, 0.85, at_least=True).met and not Mark("a", 0.8, 0.85, at_least=True).met
    assert Mark("a", 0.8, 0.85).met and not Mark("a", 0.9, 0.85).met


def test_later_results_go_before_earlier_ones() -> None:
    first, second = results(bert=result(), resnet50=result()), results(bert=result(0.5))
    second["marks"] = [{**second["marks"][1], "value": 0.4}]
    whole = plots.compact(plots.merged([first, second]))
    assert list(whole["results"]["speed"]) == ["resnet50", "bert"]
    assert whole["results"]["speed"]["bert"]["timings"][0]["best"] == 5e-4
    marks = {m["name"]: m["value"] for m in whole["marks"]}
    assert marks["resnet50"] == 0.4 and marks["share"] == 0.9
    # Those of speed are made of all models together.
    assert marks["bert: share of the FMA peak"] == 1.0 and "bert by onnxruntime's" not in marks
    assert marks["time over 2 models by onnxruntime's, geometric mean, best"] == 0.3536
    assert len(whole["results"]["speed"]["bert"]["profile"]["kernels"]) == 2  # the third takes no time


def test_tables_are_written_at_their_places() -> None:
    page = "a\n<!-- results: speed -->\nold\n<!-- end -->\nb\n<!-- results: marks -->\n<!-- end -->\n"
    found = results(bert=result(), m_softmax=result(0.4), unet={"error": "fails"})
    text = plots.fill(page, found)
    assert text.startswith("a\n") and "old" not in text and "\nb\n" in text
    assert "| bert | 1 ms | 2 ms | 1.6 ms | 0.50 |" in text and "| share | 0.9 | at least 0.85 | met |" in text
    assert plots.fill(text, found) == text
    assert "| 1 models | 0.50 | 0.50 | 0.62 |" in "\n".join(plots.summary_table(found))
    assert "200 GFLOP/s" in plots.machine_table(found)[0] and "20 rounds" in plots.machine_table(found)[0]


def test_every_place_in_the_documentation_has_a_table() -> None:
    for page in plots.PAGES:
        names = [place[2] for place in plots._PLACE.finditer(page.read_text())]
        assert names and set(names) <= set(plots.TABLES)


def test_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = plots.compact(json.loads(json.dumps(results(resnet50=result(), bert=result(1.2), m_softmax=result(0.4)))))
    plots.draw(found, tmp_path)
    for name in plots.DRAWN:
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    first = (tmp_path / "speed.svg").read_bytes()
    plots.draw(found, tmp_path)
    assert (tmp_path / "speed.svg").read_bytes() == first


# ---------------------------------------------------------------- models that the benchmarks make


@pytest.mark.parametrize("mask", [False, True])
def test_attention_models_become_one_kernel(mask: bool) -> None:
    model, inputs = generated.attention(33, mask)
    assert onnxc.compare(model, inputs).agree
    assert any(k.kind == "attention" for k in onnxc.compile(model).explain().kernels)


@pytest.mark.parametrize("bits", [32, 8, 4])
def test_weights_of_few_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "WIDTH", 64)
    model, inputs = generated.decoder(bits)
    assert onnxc.compare(model, inputs).agree
    assert generated.weight_bytes(model) < generated.LAYERS * 4 * 64 * 64 * (bits + 9) / 32


def test_the_perceptron() -> None:
    model, inputs = generated.perceptron(3, 16, 2)
    (y,) = onnxc.compile(model)(**inputs).values()
    assert y.shape == (3, 16) and np.isfinite(y).all()

"""The autotuner and ``accuracy``: which algorithm a convolution gets, and that the answers stay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxc
from onnxc import tuned
from onnxc.errors import InputError
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import level


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """A 3x3 convolution for which there are several algorithms, and a 1x1 one for which there is one."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((40, 32, 3, 3)), "v": rng.standard_normal((56, 40, 1, 1))}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Conv", ["b", "v"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 32, 36, 36))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 56, 36, 36))],
        [numpy_helper.from_array((w * 0.1).astype(np.float32), name) for name, w in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.fixture(scope="module")
def file(model: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tune") / "m.onnx"
    onnx.save(model, path)
    return str(path)


def chosen(compiled: onnxc.CompiledModel) -> dict[str, str]:
    return {k.choice.subject: k.choice.chosen for k in compiled.explain().kernels if k.choice}


def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, 32, 36, 36)).astype(np.float32)


def test_measures_every_candidate_and_compiles_take_the_best(file: str, tmp_path: Path) -> None:
    found = onnxc.tune(file, threads=1, cache=tmp_path)
    several = [each for each in found.times.values() if len(each) > 1]
    assert several and all(seconds > 0 for each in several for seconds in each.values())
    assert any("winograd" in name for each in several for name in each)
    text = json.loads(Path(found.path).read_text())
    assert text.pop("version") == tuned.VERSION
    (rows,) = text.values()
    assert {s: row["best"] for s, row in rows.items()} == found.best
    compiled = onnxc.compile(file, threads=1, cache=tmp_path, tuned=True)
    assert found.best.items() <= chosen(compiled).items()
    assert "choices measured" in str(found)


def test_decisions_decide_and_answers_agree(file: str) -> None:
    default = onnxc.compile(file)
    subject, choice = next((k.choice.subject, k.choice) for k in default.explain().kernels if k.choice)
    exact = None
    for name in choice.candidates:
        compiled = onnxc.compile(file, tuned={subject: name})
        assert chosen(compiled)[subject] == name
        (y,) = compiled.run(None, {"x": x()})
        exact = y if exact is None else exact
        np.testing.assert_allclose(y, exact, atol=1e-4 * np.abs(exact).max())
    assert chosen(onnxc.compile(file, tuned={subject: "no such algorithm"})) == chosen(default)


def test_strict_rules_winograd_out(file: str) -> None:
    kinds = [k.kind for k in onnxc.compile(file, accuracy="strict").explain().kernels]
    assert kinds and not any("winograd" in kind for kind in kinds)
    assert not any("winograd" in c for k in onnxc.compile(file, accuracy="strict").explain().kernels
                   if k.choice for c in k.choice.candidates)  # fmt: skip


def test_an_unknown_accuracy_is_an_error(file: str) -> None:
    with pytest.raises(InputError, match="'default' or 'strict', not 'loose'"):
        onnxc.compile(file, accuracy="loose")


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1}', "\0"])
def test_a_damaged_file_counts_as_empty(file: str, tmp_path: Path, text: str) -> None:
    cache = Cache(tmp_path)
    (cache.root / tuned.FILE).write_text(text)
    record = tuned.Record.of(cache, None)
    assert record is not None
    here, other = (tuned.cpu_place(level(), n) for n in (1, 2))
    assert record.best(here) == {}
    record.add(here, {"a": tuned.joined(None, {"x": 2e-6, "y": 1e-6}, (), "x", ("x", "y"))})
    assert record.best(here) == {"a": "y"} and record.best(other) == {}
    again = tuned.Record.of(cache, None)
    assert again is not None and again.rows(here) == record.rows(here)


def test_max_autotune_measures_once(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = onnxc.compile(file, threads=1, cache=tmp_path, mode="max-autotune")
    (choice,) = {k.choice for k in first.explain().kernels if k.choice and len(k.choice.candidates) > 1}
    assert choice.why == "measured"

    def never(*args: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("onnxc.autotune.Tuner.run", never)
    again = onnxc.compile(file, threads=1, cache=tmp_path, mode="max-autotune")
    assert chosen(again) == chosen(first) == chosen(onnxc.compile(file, threads=1, cache=tmp_path))
    with pytest.raises(InputError, match="max-autotune"):
        onnxc.compile(file, mode="fast")

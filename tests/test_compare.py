"""The comparison tool: random inputs that mean something, the rule of the verdict, the referees."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxc import random_inputs as random_inputs_module
from onnxc.errors import InputError, LimitError, RunError
from onnxc.frontends import onnx_file
from onnxc.passes.decompose import decompose
from onnxc.random_inputs import choose_dims, random_for_signature, random_inputs
from onnxc.tools.compare import compare, distance, onnxruntime_runner
from onnxc.tools.compare.bounds import Tolerances, gap
from onnxc.tools.compare.core import _worst
from onnxc.tools.compare.judge import Judge, flattened
from onnxc.tools.compare.results import OutputComparison
from onnxc.tools.compare.verdict import Verdict
from onnxc.tools.float64 import evaluate_float64, widen
from onnxc.tools.inputs import parse_dims, parse_shapes, read_inputs, write_arrays

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


LINEAR = parsed("g (float[N, 3] x) => (float[N, 3] y) { a = Mul(x, x)  y = Exp(a) }")


def fake(*outputs: np.ndarray) -> Callable[..., Any]:
    """A compiled model that always answers the same."""

    class Model:
        def __call__(self, *args: object) -> dict[str, np.ndarray]:
            return {f"o{k}": a for k, a in enumerate(outputs)}

    return Model()


def embedding(rows: int = 7) -> onnx.ModelProto:
    """ids and a mask, ids through a Cast and a Reshape into a table."""
    table = numpy_helper.from_array(np.arange(rows * 2, dtype=np.float32).reshape(rows, 2), "table")
    nodes = [
        helper.make_node("Cast", ["ids"], ["c"], to=TensorProto.INT32),
        helper.make_node("Unsqueeze", ["c", "axes"], ["u"]),
        helper.make_node("Gather", ["table", "u"], ["e"]),
        helper.make_node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["m"], ["total"], keepdims=0),
        helper.make_node("Mul", ["e", "total"], ["y"]),
    ]
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    ints = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "seq"]) for n in ("ids", "attention_mask")]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "embedding", ints, [out], [table, axes])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


# ---------------------------------------------------------------- inputs


def test_random_inputs_stay_inside_the_table() -> None:
    graph = decompose(onnx_file.load(embedding(rows=3)))
    for seed in range(5):
        ids = random_inputs(graph, seed=seed, dims={"batch": 4, "seq": 50})["ids"]
        assert ids.shape == (4, 50) and ids.dtype == np.int64
        assert ids.min() >= 0 and ids.max() == 2


def test_masks_are_ones_first_and_end_in_zeros_later() -> None:
    graph = decompose(onnx_file.load(embedding()))
    assert (random_inputs(graph)["attention_mask"] == 1).all()
    later = np.concatenate([random_inputs(graph, sample=k)["attention_mask"] for k in range(1, 6)])
    assert (np.diff(later, axis=1) <= 0).all() and (later[:, 0] == 1).all() and (later == 0).any()


def test_random_inputs_repeat_by_seed() -> None:
    graph = decompose(onnx_file.load(LINEAR))
    a, b, c = (random_inputs(graph, seed=s)["x"] for s in (1, 1, 2))
    assert (a == b).all() and (a != c).any()


def test_dims_by_name() -> None:
    graph = decompose(onnx_file.load(embedding()))
    assert sorted(choose_dims(graph, {"seq": 9}).values()) == [2, 9]
    with pytest.raises(InputError, match=r"no dynamic dim 'time'; its dynamic dims: batch, seq"):
        choose_dims(graph, {"time": 3})


def test_random_inputs_that_the_memory_left_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = decompose(onnx_file.load(embedding()))
    monkeypatch.setattr(random_inputs_module, "available_bytes", lambda: 1 << 20)
    assert random_inputs(graph, dims={"seq": 1 << 10})["ids"].shape == (2, 1 << 10)
    with pytest.raises(LimitError, match=r"'ids' of the shape \(2, 16777216\) takes 536870912 bytes to draw: 1048576"):
        random_inputs(graph, dims={"seq": 1 << 24})


@pytest.mark.parametrize("type_", ["float", "double", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"])
def test_random_for_a_signature(type_: str) -> None:
    signature: list[tuple[str, str, list[int | str | None]]] = [
        ("x", f"tensor({type_})", ["n", 3]),
        ("y", f"tensor({type_})", ["n", None]),
    ]
    made = random_for_signature(signature, dims={"n": 5})
    assert made["x"].shape == (5, 3) and made["y"].shape[0] == 5
    expected = {"float": "float32", "double": "float64"}.get(type_, type_)
    assert str(made["x"].dtype) == expected


def test_inputs_from_files(tmp_path: Path) -> None:
    x, y = np.arange(3, dtype=np.float32), np.ones((2, 2), np.int64)
    np.savez(tmp_path / "named.npz", y=y, x=x)
    np.savez(tmp_path / "numbered.npz", i0=x, i1=y)
    folder = tmp_path / "set"
    folder.mkdir()
    arrays: list[np.ndarray] = [x, y]
    for k, a in enumerate(arrays):
        (folder / f"input_{k}.pb").write_bytes(numpy_helper.from_array(a).SerializeToString())
    for place in (tmp_path / "named.npz", tmp_path / "numbered.npz", folder):
        found = read_inputs(place, ["x", "y"])
        assert list(found) == ["x", "y"] and (found["x"] == x).all() and (found["y"] == y).all()


def test_input_files_that_do_not_fit(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.ones(1))
    with pytest.raises(InputError, match="lacks the inputs 'x'; it has 'a'"):
        read_inputs(tmp_path / "a.npz", ["x"])
    with pytest.raises(InputError, match="there is no file"):
        read_inputs(tmp_path / "missing.npz", ["x"])
    (tmp_path / "bad.npz").write_bytes(b"not a zip")
    with pytest.raises(InputError, match=r"not an \.npz"):
        read_inputs(tmp_path / "bad.npz", ["x"])
    np.savez(tmp_path / "object.npz", x=np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"not an \.npz"):
        read_inputs(tmp_path / "object.npz", ["x"])
    head = repr({"descr": "<f4", "fortran_order": False, "shape": (2**60,)}).encode()
    for content in (b"no array", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head):
        with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
            archive.writestr("x.npy", content)
        with pytest.raises(InputError, match=r"not an \.npz"):
            read_inputs(tmp_path / "claims.npz", ["x"])
    outside = TensorProto(data_type=1, dims=[3], data_location=TensorProto.EXTERNAL)
    outside.external_data.add(key="location", value="/dev/zero")
    for tensor in (TensorProto(data_type=99, dims=[3], raw_data=b"12"), outside):
        (tmp_path / "input_0.pb").write_bytes(tensor.SerializeToString())
        with pytest.raises(InputError, match="is not a tensor"):
            read_inputs(tmp_path, ["x"])


def test_written_arrays_have_the_exact_name(tmp_path: Path) -> None:
    write_arrays(tmp_path / "out.bin", {"a/b": np.ones(2, ml_dtypes.bfloat16), "n": np.arange(3)})
    with np.load(tmp_path / "out.bin") as stored:
        assert stored["a/b"].dtype == np.float32 and (stored["n"] == np.arange(3)).all()


def test_what_numpy_cannot_store_comes_back(tmp_path: Path) -> None:
    """Texts without pickles; numbers of types that numpy lacks, as these again where they are such numbers."""
    own = (ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn)
    arrays = {f"x{k}": np.array([0, 1, 3]).astype(t) for k, t in enumerate(own)}
    texts = np.array([["a", ""], ["longer", "\u00fc"]], object)
    write_arrays(tmp_path / "a.npz", {"t": texts, **arrays})
    types = {"t": np.dtype(object), **{n: a.dtype for n, a in arrays.items()}}
    back = read_inputs(tmp_path / "a.npz", list(types), types=types)
    assert all(back[n].dtype == a.dtype and (back[n] == a).all() for n, a in arrays.items())
    assert (back["t"] == texts).all()
    with pytest.raises(InputError, match="NUL"):
        write_arrays(tmp_path / "b.npz", {"t": np.array(["a\0"], object)})
    np.savez(tmp_path / "c.npz", x=np.array([1.0, 1.001], np.float32))  # which is no bfloat16
    assert read_inputs(tmp_path / "c.npz", ["x"], types={"x": np.dtype(ml_dtypes.bfloat16)})["x"].dtype == np.float32


@pytest.mark.parametrize("text", ["x", "=1,2", "x=1,2=3x"])
def test_shapes_and_dims_on_the_command_line(text: str) -> None:
    assert parse_shapes(["a=b=1,?", "s="]) == {"a=b": (1, None), "s": ()}
    with pytest.raises(InputError):
        parse_dims([text])


# ---------------------------------------------------------------- verdicts


def test_a_model_agrees_and_prints() -> None:
    result = compare(LINEAR, samples=2, dims={"N": 4})
    assert result.agree and result and len(result.outputs) == 2
    assert result.outputs[0].shape == (4, 3) and "agrees with onnxruntime" in str(result)
    json.dumps(result.to_dict())


def test_given_inputs_by_order_and_name() -> None:
    x = np.ones((2, 3), np.float32)
    assert compare(LINEAR, [x]) and compare(LINEAR, {"x": x})
    assert compare(LINEAR, [x.astype(">f4")])
    with pytest.raises(InputError, match="'x' expects an array; a masked one"):
        compare(LINEAR, [np.ma.masked_array(x)])
    with pytest.raises(InputError, match="unknown: \\['z'\\]"):
        compare(LINEAR, {"z": x})
    with pytest.raises(InputError, match="1 inputs"):
        compare(LINEAR, [x, x])


@pytest.mark.parametrize("reference", ["onnx", "float64"])
def test_other_references(reference: str) -> None:
    assert compare(LINEAR, reference=reference).reference == reference


@pytest.mark.parametrize("size", [1, 5])
def test_float64_of_open_dims_of_which_one_is_1(size: int) -> None:
    model = parsed("g (float[n, 2, 3] x, float[m, 3, 4] w) => (y) { y = MatMul(x, w) }")
    given = {"x": np.ones((size, 2, 3), np.float32), "w": np.ones((5, 3, 4), np.float32)}
    assert compare(model, given, reference="float64")
    judge = Judge(model, None, Tolerances(), lambda stage: None)
    right = np.full((5, 2, 4), 3, np.float32)
    (row,) = judge.outputs(0, given, [right], [right * np.float32(1.01)])
    assert row.agrees and row.errors64 == (0, pytest.approx(0.03, rel=1e-3))


def test_unknown_reference() -> None:
    with pytest.raises(InputError, match="no reference 'torch'"):
        compare(LINEAR, reference="torch")


def test_a_wrong_answer_differs() -> None:
    x = np.ones((1, 3), np.float32)
    right = np.exp(x * x)
    assert compare(LINEAR, [x], compiled=fake(right))
    (row,) = compare(LINEAR, [x], compiled=fake(right * np.float32(1.01))).outputs
    assert not row.agrees and row.max_rel == pytest.approx(0.01, rel=1e-3)
    assert row.errors64 is not None and row.errors64[0] > 100 * row.errors64[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_nan_or_infinity_differs(value: float) -> None:
    x = np.ones((1, 3), np.float32)
    answer = np.exp(x * x)
    answer[0, 1] = value
    (row,) = compare(LINEAR, [x], compiled=fake(answer)).outputs
    assert not row.agrees and row.mismatches == 1


def test_a_nan_of_our_own_is_not_excused_by_our_own_graph() -> None:
    """float64 evaluates onnxc's graph: where an op's meaning is wrong, it is wrong there too."""
    model = parsed("g (float[N, 3] x) => (float[N, 3] y) { l = Log(x)  y = Exp(l) }")
    x = np.array([[1.0, -1.0, 2.0]], np.float32)
    judge = Judge(model, None, Tolerances(), lambda stage: None)
    theirs = [np.array([[1.0, 1.0, 2.0]], np.float32)]
    (row,) = judge.outputs(0, {"x": x}, [np.array([[1.0, np.nan, 2.0]], np.float32)], theirs)
    assert not row.agrees
    (row,) = judge.outputs(0, {"x": x}, [np.array([[1.5, np.nan, 2.0]], np.float32)], theirs)
    assert not row.agrees


def test_an_overflow_that_the_reference_has_too_agrees() -> None:
    x = np.array([[20.0, np.nan, 1.0]], np.float32)  # exp(400) is infinite in float32 and finite in float64
    assert compare(LINEAR, [x])


def test_a_wrong_shape_differs() -> None:
    x = np.ones((1, 3), np.float32)
    (row,) = compare(LINEAR, [x], compiled=fake(np.ones((3, 1), np.float32))).outputs
    assert not row.agrees and "float32[1, 3]" in row.note and math.isinf(row.max_abs)


def test_float64_decides_who_is_nearer() -> None:
    """Cancellation: both are far from each other, relative to the output; onnxc's is the better one."""
    model = parsed("g (float[4] x) => (float[1] y) { y = ReduceSum <keepdims = 1> (x) }")
    x = np.array([1.0, 1e8, 1.0, -1e8], np.float32)
    (ours,) = onnxruntime_runner(model)({"x": x})
    exact = np.array([2.0], np.float32)
    row = compare(model, [x], compiled=fake(exact)).outputs[0]
    assert row.agrees
    if not np.allclose(ours, exact):
        assert row.errors64 == (0.0, float(abs(ours - exact)[0]))


def test_integers_must_be_equal() -> None:
    model = parsed("g (int64[3] x) => (int64[3] y) { y = Mul(x, x) }")
    x = np.array([1, 2, 3])
    assert compare(model, [x])
    (row,) = compare(model, [x], compiled=fake(np.array([1, 4, 8]))).outputs
    assert not row.agrees and row.mismatches == 1 and row.max_abs == 1


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint64"])
def test_equal_integers_of_another_dtype_differ(dtype: str) -> None:
    model = parsed("g (int64[3] x, int64[3] y) => (int64[3] z, int64[3] u) { z = Mul(x, x)  u = Identity(y) }")
    x = np.array([0, 1, 1])
    found = compare(model, [x, x], compiled=fake(x.astype(dtype), x + 1)).outputs
    assert [o.agrees for o in found] == [False, False] and "int64[3]" in found[0].note


def test_integers_that_float64_cannot_tell_apart_differ() -> None:
    assert gap(np.array([2**60]), np.array([2**60 + 1])) == 1
    assert gap(np.array([3], np.uint8), np.array([5])) == 2 and gap(np.array([2**60]), np.array([2**60])) == 0


def test_the_worst_of_sequences_of_different_lengths() -> None:
    def row(name: str, sample: int, verdict: Verdict) -> OutputComparison:
        return OutputComparison(name, sample, "float32", (1,), 0.0, 0.0, 0, not verdict.fails, verdict=verdict)

    before = [row("s[0]", 0, Verdict.EQUAL), row("s[1]", 0, Verdict.WRONG)]
    found = _worst(before, [row("s[0]", 1, Verdict.ROUNDING), row("t", 1, Verdict.EQUAL)])
    assert [(o.name, o.sample, o.agrees) for o in found] == [("s[0]", 1, True), ("s[1]", 0, False), ("t", 1, True)]


def test_maps_are_compared_by_their_values() -> None:
    """What ZipMap gives: probabilities differ by rounding, and NaN is NaN."""
    ours, theirs = [{"a": 0.5, "b": math.nan}, {1: 2.0}], [{"b": math.nan, "a": 0.5 + 1e-9}, {2: 2.0}]
    names, a, b = flattened(["y"], [ours], [theirs])
    judge = Judge(parsed("g (float[1] x) => (float[1] y) { y = Neg(x) }"), None, Tolerances(), print)
    rows = [judge.compared(*row) for row in zip(names, [0, 0], a, b, strict=True)]
    assert [(row.name, row.agrees) for row in rows] == [("y[0]", True), ("y[1]", False)]


def test_saturating_integers_are_judged_by_the_reference_evaluator() -> None:
    """u8 x s8 with products that overflow 16 bits: right answers agree, whatever onnxruntime says."""
    model = parsed("g (uint8[1, 2] a, int8[2, 1] b) => (int32[1, 1] y) { y = MatMulInteger(a, b) }")
    a, b = np.full((1, 2), 255, np.uint8), np.full((2, 1), 127, np.int8)
    assert compare(model, [a, b], compiled=fake(np.array([[2 * 255 * 127]], np.int32)))
    assert not compare(model, [a, b], compiled=fake(np.array([[2 * 255 * 127 - 1]], np.int32)))


def test_a_reference_that_cannot_load_says_so() -> None:
    with pytest.raises(RunError, match="onnxruntime cannot load"):
        onnxruntime_runner(b"not a model")


def test_distance() -> None:
    a = np.array([1.0, np.nan, np.inf, np.inf, np.nan])
    b = np.array([1.5, np.nan, np.inf, -np.inf, 0.0])
    assert list(distance(a, b)) == [0.5, 0.0, 0.0, math.inf, math.inf]


# ---------------------------------------------------------------- float64


def test_the_float64_graph_is_wider_everywhere() -> None:
    graph = decompose(onnx_file.load(embedding()))
    wide = widen(graph)
    names = {v.dtype.name for v in wide.values()}
    assert "float32" not in names and "float64" in names
    assert {v.dtype.name for v in graph.values()} >= {"float32", "int64"}  # the graph itself is as it was


def test_float64_has_digits_that_float32_lacks() -> None:
    model = parsed("g (float[3] x) => (float[3] y) { a = Cast <to = 1> (x)  b = Exp(a)  y = Sqrt(b) }")
    x = np.array([0.1, 1.0, 2.0], np.float32)
    (y,) = evaluate_float64(decompose(onnx_file.load(model)), [x])
    assert y.dtype == np.float64 and np.allclose(y, np.exp(x.astype(np.float64) / 2), rtol=1e-15)


@pytest.mark.parametrize("name", ["m_gelu_ln_small", "mlp"])
def test_zoo(zoo: Any, name: str) -> None:
    model = zoo(name)
    assert compare(model.path, model.inputs())


def test_errors_that_grow_from_step_to_step_are_rounding() -> None:
    """Weights with which a state forgets nothing; by chance numpy's own error is small at the end."""
    rng = np.random.default_rng(50)
    model = parsed("g (float[24, 1, 4] x) => (float[24, 1, 1, 12] y) { y = RNN <hidden_size = 12> (x, w, r) }")
    for name, size in (("w", 4), ("r", 12)):
        weights = 2 * rng.standard_normal((1, 12, size), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    (row,) = compare(model, {"x": rng.standard_normal((24, 1, 4), np.float32)}, layers=True).layers
    assert row.verdict is Verdict.ROUNDING


def test_float64_runs_recurrent_ops() -> None:
    """Scans, in both directions, beside onnx's reference evaluator."""
    rng = np.random.default_rng(0)
    shapes = {"x": (5, 2, 3), "w": (2, 16, 3), "r": (2, 16, 4)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    node = helper.make_node("LSTM", list(shapes), ["y", "h", "c"], hidden_size=4, direction="bidirectional")
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("y", "h", "c")]
    graph = helper.make_graph([node], "lstm", infos, outs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    exact = evaluate_float64(decompose(onnx_file.load(model)), list(arrays.values()))
    for a, b in zip(exact, onnxruntime_runner(model)(arrays), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, atol=1e-6)

"""Compiled models: calls, what they accept, and what they refuse."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest

import onnxc
from onnxc import errors
from onnxc.planner.groups import FusionOptions
from onnxc.runtime import model as model_module
from onnxc.runtime.compiled_model import CompiledModel, Outputs
from tests.own_process import python
from tests.small_models import floats, parse, reference

TWO = """(float[2,3] a, float[3] b) => (float[2,3] sum, float[2,3] product)
{ sum = Add(a, b) product = Mul(a, b) }"""


@pytest.fixture(scope="module")
def two() -> CompiledModel:
    return onnxc.compile(parse(TWO))


A, B = floats(2, 3), floats(3)


# ---------------------------------------------------------------- results


def test_by_position_by_name_and_both(two: CompiledModel) -> None:
    for out in (two(A, B), two(a=A, b=B), two(b=B, a=A), two(A, b=B)):
        np.testing.assert_array_equal(out["sum"], A + B)
        np.testing.assert_array_equal(out["product"], A * B)


def test_outputs_are_dict_and_tuple(two: CompiledModel) -> None:
    out = two(A, B)
    total, product = out
    assert total is out[0] is out["sum"] and product is out[-1] is out["product"]
    assert out[:1] == (total,)
    assert len(out) == 2 and "sum" in out and "x" not in out
    assert list(out.keys()) == ["sum", "product"] and list(dict(out)) == ["sum", "product"]
    assert out.get("x") is None and out.get("sum") is total
    assert [name for name, _ in out.items()] == ["sum", "product"]
    assert len(out.values()) == 2
    assert "sum" in repr(out)
    with pytest.raises(KeyError, match="no output 'x'"):
        out["x"]
    with pytest.raises(IndexError):
        out[2]


def test_run_is_onnxruntimes(two: CompiledModel) -> None:
    feed = {"b": B, "a": A}
    total, product = two.run(None, feed)
    np.testing.assert_array_equal(total, A + B)
    assert [x.tolist() for x in two.run([], feed)] == [total.tolist(), product.tolist()]
    (only,) = two.run(["product"], feed, None)
    np.testing.assert_array_equal(only, product)
    with pytest.raises(errors.InputError, match="no output 'x'"):
        two.run(["x"], feed)
    for names in ("product", 5):
        with pytest.raises(errors.InputError, match="output_names is a list of names"):
            two.run(names, feed)  # type: ignore[arg-type]
    for other in (None, [A, B]):
        with pytest.raises(errors.InputError, match="as a dict by name"):
            two.run(None, other)  # type: ignore[arg-type]


def test_each_call_gives_new_arrays(two: CompiledModel) -> None:
    first = two(A, B)["sum"]
    kept = first.copy()
    second = two(A + 1, B)["sum"]
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    assert first.flags.writeable and first.flags.owndata


def test_described_as_onnxruntime_does() -> None:
    proto = parse("""(float[N,3] a, double[2] b, int64[M] c, bool[1] d)
    => (float[N,3] e, double[2] f, int64[M] g, bool[1] h) { e = Relu(a) f = Neg(b) g = Neg(c) h = Not(d) }""")
    import onnxruntime

    theirs = onnxruntime.InferenceSession(proto.SerializeToString())
    ours = onnxc.compile(proto)
    for mine, other in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
        assert [(t.name, t.type, t.shape) for t in mine] == [(t.name, t.type, t.shape) for t in other]


def test_unnamed_dim_is_none() -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 3])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    model = onnxc.compile(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]))
    assert model.get_inputs()[0].shape == [None, 3] == model.get_outputs()[0].shape
    np.testing.assert_array_equal(model(-np.ones((4, 3), np.float32))[0], np.zeros((4, 3)))


@pytest.mark.every_target
def test_no_inputs() -> None:
    model = onnxc.compile(parse("() => (float[2] y) { y = Constant<value_floats=[1.0, 2.0]>() }"))
    assert model()["y"].tolist() == [1, 2] == model.run(None, {})[0].tolist()


@pytest.mark.every_target
def test_outputs_that_are_inputs_and_constants() -> None:
    model = onnxc.compile(parse("(float[2] x) => (float[2] y, float[2] z) { y = Identity(x) z = Identity(x) }"))
    x = floats(2)
    y, z = model(x)
    np.testing.assert_array_equal(y, x)
    assert not np.shares_memory(y, x) and not np.shares_memory(y, z)


# ---------------------------------------------------------------- what inputs may be


@pytest.mark.every_target
@pytest.mark.parametrize(
    "change",
    [
        lambda x: np.asfortranarray(x),
        lambda x: x[::-1][::-1],
        lambda x: np.repeat(x, 2, axis=1)[:, ::2],
        lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        lambda x: x.astype(">f4"),
        lambda x: x.tolist(),
        lambda x: tuple(map(tuple, x)),
        lambda x: memoryview(x),
        lambda x: x.view(np.matrix),
        lambda x: np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view("<f4").reshape(x.shape),  # not aligned
    ],
    ids=[
        "fortran",
        "same",
        "strided",
        "negative strides",
        "swapped",
        "lists",
        "tuples",
        "buffer",
        "matrix",
        "unaligned",
    ],
)
def test_unusual_arrays(two: CompiledModel, change: Callable[[Any], Any]) -> None:
    np.testing.assert_array_equal(two(change(A), B)["sum"], A + B)


def test_read_only_and_mapped_arrays(two: CompiledModel, tmp_path: Path) -> None:
    frozen = A.copy()
    frozen.flags.writeable = False
    np.save(tmp_path / "a.npy", A)
    for x in (frozen, np.load(tmp_path / "a.npy", mmap_mode="r")):
        np.testing.assert_array_equal(two(x, B)["sum"], A + B)


@pytest.mark.every_target
def test_scalars_and_other_dtypes_that_fit() -> None:
    model = onnxc.compile(
        parse("(float x, int64 i, bool b) => (float y, int64 j, bool c) { y = Neg(x) j = Neg(i) c = Not(b) }")
    )
    for inputs in (
        (1.5, 3, True),
        (np.float32(1.5), np.int64(3), np.True_),
        (np.array(1.5, "f"), np.array(3), np.array(True)),
    ):
        y, j, c = model(*inputs)
        assert (y.shape, y.dtype, y.item(), j.item(), c.item()) == ((), np.float32, -1.5, -3, False)
    assert model(2, 3, False)["y"] == -2
    for inputs in (
        (1.5, 3.5, True),
        (np.float64(1.5), 3, True),
        (1.5, 3, 1),
        (1.5, 1 << 70, True),
        ("x", 3, True),
    ):
        with pytest.raises(errors.InputError):
            model(*inputs)


def test_equal_dtype_object_is_accepted(two: CompiledModel) -> None:
    # Its dtype is equal to float32 and another object: it carries metadata.
    x = A.view(np.dtype("f4", metadata={"unit": "m"}))
    np.testing.assert_array_equal(two(x, B)["sum"], A + B)


def test_arrays_of_other_libraries(two: CompiledModel) -> None:
    class Exchanged:  # what the array API asks of an array, and no more
        def __init__(self, array: np.ndarray[Any, Any]) -> None:
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    np.testing.assert_array_equal(two(Exchanged(A), B)["sum"], A + B)
    with pytest.raises(errors.InputError, match="float64"):
        two(Exchanged(A.astype(np.float64)), B)


@pytest.mark.every_target
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_empty_tensors(shape: tuple[int, int]) -> None:
    model = onnxc.compile(
        parse(
            """(float[N,M] x) => (float[N,M] y, float[N] s)
            { y = Exp(x) a = Constant<value_ints=[1]>() s = ReduceSum<keepdims=0>(x, a) }"""
        )
    )
    y, s = model(np.zeros(shape, np.float32))
    assert y.shape == shape and s.tolist() == [0.0] * shape[0]


@pytest.mark.every_target
def test_edge_values() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, -1e-45, 3e38], np.float32)
    proto = parse("(float[8] x) => (float[8] y, float[8] z) { y = Neg(x) z = Add(x, x) }")
    for got, want in zip(onnxc.compile(proto)(x), reference(proto, x), strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("inputs", "named", "words"),
    [
        ((A,), {}, ["missing input 'b': float32[3]"]),
        ((), {}, ["missing input 'a': float32[2, 3], 'b'"]),
        ((), {"a": A}, ["missing input 'b'"]),
        ((A, B, B), {}, ["3 inputs were given; the model has 2", "'a': float32[2, 3]"]),
        ((A, B), {"c": B}, ["no input 'c'"]),
        ((), {"a": A, "c": B}, ["no input 'c'", "its inputs are 'a'"]),
        ((A, B), {"b": B}, ["'b' is given both by position and by name"]),
        (
            (A.astype(np.float64), B),
            {},
            ["'a'", "expects dtype float32", "float64 was given; .astype('float32') converts"],
        ),
        ((A.astype(np.float16), B), {}, ["float16 was given"]),
        ((np.ma.masked_array(A), B), {}, ["'a'", "a masked one was given", ".filled"]),
        ((A.astype(np.int32), B), {}, ["int32 was given"]),
        ((A[0], B), {}, ["input 'a'", "rank 2", "shape [3] was given"]),
        ((A, B[:2]), {}, ["input 'b': float32[3] expects size 3 in dim 0", "shape [2] was given"]),
        ((A.T, B), {}, ["size 2 in dim 0", "shape [3, 2]"]),
        (([[1, 2, 3], [4, 5]], B), {}, ["input 'a'", "a list that is none"]),
        (([1, 2, 3], B), {}, ["rank 2"]),
        ((None, B), {}, ["input 'a'", "a NoneType was given"]),
        (("text", B), {}, ["input 'a'", "<U4 was given"]),
        ((A.astype(object), B), {}, ["input 'a'", "expects dtype float32"]),
    ],
)
def test_refused_inputs(two: CompiledModel, inputs: tuple[Any, ...], named: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(errors.InputError) as caught:
        two(*inputs, **named)
    for word in words:
        assert word in str(caught.value)
    if not inputs:
        with pytest.raises(errors.InputError):
            two.run(None, named)


@pytest.mark.parametrize("count", [0, -1, 257, 1.5, True, "2", np.float64(2)])
def test_threads_must_be_a_count(two: CompiledModel, count: Any) -> None:
    before = two.threads
    with pytest.raises(errors.InputError, match="threads"):
        two.threads = count
    assert two.threads == before


def test_threads_can_be_set() -> None:
    proto = parse("(float[N,64] x, float[64,64] w) => (float[N,64] z) { y = MatMul(x, w) z = Softmax(y) }")
    model = onnxc.compile(proto, threads=1)
    assert model.threads == 1
    x, w = floats(300, 64), floats(64, 64)
    one = model(x, w)["z"]
    model.threads = np.int64(2)  # type: ignore[assignment]
    assert type(model.threads) is int
    np.testing.assert_array_equal(model(x, w)["z"], one)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"target": "gpu"}, errors.InputError),
        ({"target": "cuda:90"}, errors.InputError),
        ({"precision": "double", "target": "cuda:sm_90"}, errors.InputError),
        ({"cpu": "z80"}, errors.CpuError),
        ({"threads": 0}, errors.InputError),
        ({"input_shapes": {"q": (1,)}}, errors.InputError),
        ({"keep_inputs": ["q"]}, errors.InputError),
    ],
)
def test_wrong_options(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        onnxc.compile(parse(TWO), **options)


# ---------------------------------------------------------------- failures of a run

GATHER = "(float[4,3] x, int64[2] i) => (float[2,3] y) { g = Gather(x, i) y = Relu(g) }"


def test_index_out_of_bounds_names_the_node() -> None:
    model = onnxc.compile(parse(GATHER))
    x = floats(4, 3)
    np.testing.assert_array_equal(model(x, np.array([3, -4]))["y"], np.maximum(x[[3, 0]], 0))
    for bad in (4, -5, 1 << 40):
        with pytest.raises(errors.RunError, match="out of bounds") as caught:
            model(x, np.array([0, bad]))
        assert str(bad) in str(caught.value) and caught.value.node == "n0 Gather"
        with pytest.raises(errors.RunError, match=f"{bad} is out of bounds"):  # of arrays that are converted first
            model(x[:, ::-1], np.array([0, 0, bad])[::2])
    np.testing.assert_array_equal(model(x, np.array([0, 1]))["y"], np.maximum(x[:2], 0))  # it still works


def test_division_by_zero_names_the_node() -> None:
    model = onnxc.compile(parse("(int32[3] a, int32[3] b) => (int32[3] y) { s = Add(a, b) y = Div(s, b) }"))
    assert model(np.array([4, 5, 6], "i4"), np.array([1, 2, 3], "i4"))["y"].tolist() == [5, 3, 3]
    with pytest.raises(errors.RunError, match="division by zero") as caught:
        model(np.array([4, 5, 6], "i4"), np.array([1, 0, 3], "i4"))
    assert caught.value.node == "n1 Div"


def test_memory_limit() -> None:
    text = """(float[N,64] x, float[64,64] w) => (float[N,64] y)
    { a = MatMul(x, w) b = Softmax(a) y = MatMul(b, w) }"""
    model = onnxc.compile(parse(text), memory_limit=8 << 20)
    model(floats(8, 64), floats(64, 64))
    with pytest.raises(errors.LimitError, match="more than its limit"):
        model(floats(60000, 64), floats(64, 64))


# ---------------------------------------------------------------- the two ways of a call


def test_quick_and_slow_way_agree(two: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two._quick, "this Python's objects are not as runtime.c reads them: calls are slow"
    monkeypatch.setattr(two, "_quick", False)
    np.testing.assert_array_equal(two(A, B)["sum"], A + B)
    with pytest.raises(errors.InputError):
        two(A, A)


def test_quick_way_takes_plain_arrays(two: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two, "_run_any", lambda args: pytest.fail("went the slow way"))
    two(A, B)
    two(b=B, a=A)
    two.run(None, {"a": A, "b": B})


def test_quick_way_is_left_for_all_else(two: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two, "_run_any", lambda args: ("slow", "slow"))
    odd = [
        A.T,
        A[:1],
        A.astype("f8"),
        A.astype(">f4"),
        np.asfortranarray(A),
        A.view(np.matrix),
        A.tolist(),
        None,
        A[None],
    ]
    assert all(two(x, B)["sum"] == "slow" for x in odd)
    assert two(A)["sum"] == "slow" and two(A, B, B)["sum"] == "slow"


def test_many_inputs_and_outputs() -> None:
    n = 520  # more than ox_call_arrays takes
    inputs = ", ".join(f"float[2] x{i}" for i in range(n))
    outputs = ", ".join(f"float[2] y{i}" for i in range(n))
    model = onnxc.compile(parse(f"({inputs}) => ({outputs}) {{ {' '.join(f'y{i} = Neg(x{i})' for i in range(n))} }}"))
    out = model(*(np.full(2, i, np.float32) for i in range(n)))
    assert [y[0] for y in out] == [-i for i in range(n)]


# ---------------------------------------------------------------- threads and processes

CHAIN = """(float[N,32] x, float[32,32] w) => (float[N,32] y)
{ a = MatMul(x, w) b = Softmax(a) c = MatMul(b, w) d = Tanh(c) y = MatMul(d, w) }"""


def test_called_from_many_threads() -> None:
    proto = parse(CHAIN)
    model = onnxc.compile(proto)
    w = floats(32, 32)
    cases = [(x := floats(n, 32, seed=n), reference(proto, x, w)[0]) for n in (1, 5, 33, 200)]
    wrong: list[object] = []

    def work(offset: int) -> None:
        for k in range(60):
            x, want = cases[(k + offset) % len(cases)]
            got = model(x, w)["y"]
            if not np.allclose(got, want, 1e-4, 1e-5):
                wrong.append((k, offset))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_works() -> None:
    model = onnxc.compile(parse(CHAIN))
    x, w = floats(400, 32), floats(32, 32)
    want = model(x, w)["y"]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def child() -> None:
        np.testing.assert_array_equal(model(x, w)["y"], want)
        np.testing.assert_array_equal(model(x[:7], w)["y"].shape, (7, 32))  # a shape not seen before
        results.put("good")

    process = context.Process(target=child)
    process.start()
    process.join(30)
    assert process.exitcode == 0 and results.get() == "good"
    np.testing.assert_array_equal(model(x, w)["y"], want)


def test_models_are_freed() -> None:
    import weakref

    model = onnxc.compile(parse(CHAIN))
    model(floats(3, 32), floats(32, 32))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_not_pickled(two: CompiledModel) -> None:
    import pickle

    with pytest.raises(TypeError, match="save"):
        pickle.dumps(two)


# ---------------------------------------------------------------- what may be compiled


def test_path_bytes_and_proto(tmp_path: Path) -> None:
    proto = parse(TWO)
    onnx.save(proto, tmp_path / "m.onnx")
    for model in (tmp_path / "m.onnx", str(tmp_path / "m.onnx"), proto.SerializeToString(), proto):
        np.testing.assert_array_equal(onnxc.compile(model)(A, B)["sum"], A + B)
    with pytest.raises(errors.ModelError):
        onnxc.compile(tmp_path / "none.onnx")
    with pytest.raises(errors.ModelError):
        onnxc.compile(b"not a model")


def test_imported_graph() -> None:
    from onnxc.frontends import onnx_file

    model = onnxc.compile(onnx_file.load(parse(TWO)))
    np.testing.assert_array_equal(model(A, B)["sum"], A + B)


@pytest.mark.parametrize("fusion", [True, False, FusionOptions(vertical=False)])
def test_fusion_can_be_switched(fusion: Any) -> None:
    proto = parse("(float[4,8] x) => (float[4,8] z) { a = Exp(x) b = Softmax(a) c = Relu(b) z = Add(c, x) }")
    model = onnxc.compile(proto, fusion=fusion)
    kernels = len(model.manifest["kernels"])
    assert kernels == 1 if fusion is True else kernels > 1
    np.testing.assert_allclose(model(floats(4, 8))["z"], reference(proto, floats(4, 8))[0], 1e-5, 1e-6)


def test_progress_tells_the_stages(fresh_cache: Path) -> None:
    seen: list[str] = []
    model = onnxc.compile(parse(TWO), progress=seen.append)
    assert seen[0] == "fingerprint" and {"import", "decompose", "plan", "generate", "c++", "weights"} <= set(seen)
    assert set(model.manifest["stages"]) <= set(seen)
    seen.clear()
    onnxc.compile(parse(TWO), progress=seen.append)
    assert seen == ["fingerprint", "load"]


def test_source_and_report(two: CompiledModel) -> None:
    assert "onnxc_run" in two.source
    report = two.explain()
    assert report.threads == two.threads
    assert {o.op_type for k in report.kernels for o in k.origins} == {"Add", "Mul"}
    assert report.source(0) in two.source
    json.dumps(dict(two.manifest))


def test_unsupported_ops_are_all_named() -> None:
    proto = parse("(float[2] x) => (float[2] z) { y = com.acme.Foo(x) z = com.acme.Bar(y) }")
    proto.opset_import.add(domain="com.acme", version=1)
    with pytest.raises(errors.UnsupportedOpError) as caught:
        onnxc.compile(proto)
    assert "Foo" in str(caught.value) and "Bar" in str(caught.value)


# ---------------------------------------------------------------- the face


def test_import_is_light() -> None:
    done = python(
        """
        import sys, onnxc
        assert "numpy" not in sys.modules and "onnx" not in sys.modules
        assert sorted(dir(onnxc)) == sorted(onnxc.__all__)
        onnxc.load, onnxc.CompiledModel, onnxc.errors.OnnxcError
        heavy = {"torch", "triton", "onnxruntime", "sympy"}
        assert not heavy & set(sys.modules)
        onnxc.compile
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        try:
            onnxc.nothing
        except AttributeError:
            pass
        """
    )
    assert done.returncode == 0, done.stderr


def test_outputs_of_other_things() -> None:
    out = Outputs(("a", "b"), (1, 2))
    assert repr(out) == "Outputs('a': 1, 'b': 2)"
    assert model_module.PROGRAM == "program.so"

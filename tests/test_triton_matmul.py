"""The GPU's matmul template: sizes, tiles, layouts, dtypes and epilogues, interpreted and as machine code."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from onnxc.codegen.triton.cubin import compile_program, load
from onnxc.codegen.triton.matmul_tiles import candidates
from onnxc.codegen.triton.product_tiles import Facts
from onnxc.ir import dtypes
from onnxc.ir.expr import Sym
from tests.product_models import KINDS, model
from tests.targets import needs_triton
from tests.test_triton_kernels import f32, parsed
from tests.triton_simulator import Answer, Request, Simulator, program_of

Array = np.ndarray[Any, Any]

pytestmark = needs_triton
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-22}
PLAIN = {"m": 32, "n": 64, "k": 16, "warps": 4, "stages": 3}
RESIDENT = {**PLAIN, "resident": 1}
rng = np.random.default_rng(11)


def numbers(kind: str, *shape: int) -> Array:
    return np.asarray(rng.standard_normal(shape) * 0.5).astype(KINDS[kind])


def near(found: Array, wanted: Array, kind: str, *sizes: int) -> None:
    """Equal up to the rounding of the result, and of a float32 sum of that many terms."""
    assert found.shape == wanted.shape
    scale = UNIT[kind] * 2 + max(sizes) * 2.0**-22
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=scale, atol=scale)


def product(simulator: Simulator, m: int, k: int, n: int, kind: str, way: str, dynamic: bool, **options: Any) -> Answer:
    """x @ w for one way in which w comes, beside float64."""
    x, w = numbers(kind, m, k), numbers(kind, k, n)
    rows: Any = "M" if dynamic else m
    given = [x]
    if way == "constant":
        built = model([helper.make_node("MatMul", ["x", "w"], ["y"])], kind, {"x": [rows, k]}, w=w)
    elif way == "transposed":
        node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
        built = model([node], kind, {"x": [rows, k]}, w=np.ascontiguousarray(w.T))
    else:
        built = model([helper.make_node("MatMul", ["x", "w"], ["y"])], kind, {"x": [rows, k], "w": [k, n]})
        given.append(w)
    answer = simulator.run(built.SerializeToString(), given, **options)
    assert answer.kinds == ["matmul"]
    near(answer.outputs[0], x.astype(np.float64) @ w.astype(np.float64), kind, k)
    return answer


SIZES = [(1, 1, 1), (7, 17, 5), (33, 16, 64), (64, 48, 130), (65, 31, 127), (128, 64, 8), (1, 96, 100), (97, 8, 1)]


def test_a_column_of_a_constant_whose_numbers_lie_apart(simulator: Simulator) -> None:
    x, w = numbers("float32", 5, 6), numbers("float32", 6, 7, 3)
    places = {name: np.array([k]) for name, k in {"first": 1, "end": 2, "axis": 2}.items()}
    nodes = [
        helper.make_node("Slice", ["w", "first", "end", "axis"], ["v"]),
        helper.make_node("Squeeze", ["v", "axis"], ["u"]),
        helper.make_node("MatMul", ["x", "u"], ["y"]),
    ]
    built = model(nodes, "float32", {"x": [5, 6]}, w=w, **places)
    answer = simulator.run(built.SerializeToString(), [x])
    assert answer.kinds == ["matmul"]
    near(answer.outputs[0], x.astype(np.float64) @ w[:, :, 1].astype(np.float64), "float32", 6)


@pytest.mark.parametrize("way", ["constant", "transposed", "given"])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_sizes(simulator: Simulator, m: int, k: int, n: int, way: str) -> None:
    for kind in KINDS:
        product(simulator, m, k, n, kind, way, dynamic=False)
    product(simulator, m, k, n, "float16", way, dynamic=True)


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("way", ["constant", "transposed", "given"])
@pytest.mark.parametrize(("m", "k", "n"), [(64, 32, 128), (97, 40, 136), (7, 64, 72), (130, 17, 165), (33, 128, 8)])
def test_programs_that_take_several_tiles(
    simulator: Simulator, m: int, k: int, n: int, way: str, descriptors: bool
) -> None:
    for kind in ("float16", "bfloat16"):
        for dynamic in (False, True):
            answer = product(simulator, m, k, n, kind, way, dynamic, blocks=RESIDENT, descriptors=descriptors)
    aligned = k % 8 == 0 and (n % 8 == 0 or way != "given")
    assert ("make_tensor_descriptor" in answer.source) == aligned


@pytest.mark.parametrize("blocks", [PLAIN, RESIDENT])
@pytest.mark.parametrize(("split", "way", "kind"), [(2, "constant", "float16"), (3, "given", "float32")])
def test_sums_in_parts(simulator: Simulator, blocks: dict[str, int], split: int, way: str, kind: str) -> None:
    """Each part has programs of its own; another kernel adds them up in order."""
    for descriptors in (False, True):
        more = {"blocks": {**blocks, "split": split}, "descriptors": descriptors, "wide": split == 2}
        answer = product(simulator, 40, 96, 72, kind, way, False, **more)
        assert "k1(" in answer.source


def test_what_has_no_descriptors_is_read_through_pointers(simulator: Simulator) -> None:
    """Batches, float32, and rows so short that there may be more than 32 bits count."""
    x, w = numbers("float16", 3, 40, 32), numbers("float16", 3, 32, 48)
    built = model([helper.make_node("MatMul", ["x", "w"], ["y"])], "float16", {"x": [3, 40, 32], "w": [3, 32, 48]})
    answer = simulator.run(built.SerializeToString(), [x, w], blocks=RESIDENT, descriptors=True)
    near(answer.outputs[0], x.astype(np.float64) @ w.astype(np.float64), "float16", 32)
    assert "descriptor" not in answer.source
    for kind, k in (("float32", 128), ("float16", 32)):
        answer = product(simulator, 40, k, 64, kind, "constant", False, blocks=RESIDENT, descriptors=True)
        assert "descriptor" not in answer.source


@pytest.mark.parametrize("n", [5, 17, 100, 257])
@pytest.mark.parametrize("turned", [False, True])
def test_constants_with_odd_rows_are_packed(simulator: Simulator, n: int, turned: bool) -> None:
    """Rows of a constant that begin anywhere are stored so that they begin at whole vectors."""
    k = 23 if turned else 24
    for blocks in (None, RESIDENT):
        way = "transposed" if turned else "constant"
        answer = product(simulator, 40, k, n, "float16", way, False, blocks=blocks, descriptors=True)
        width = {5: 16, 17: 32, 100: 128, 257: 512}[n]
        assert f"* {width}" in answer.source or f"[{width}, 1]" in answer.source


@pytest.mark.parametrize("blocks", [PLAIN, RESIDENT, {**PLAIN, "split": 4}])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_epilogues(simulator: Simulator, blocks: dict[str, int], kind: str) -> None:
    """A bias, a function, a residual, and a scale for each row."""
    m, k, n = 70, 64, 88
    x, w, b, r, s = (numbers(kind, *d) for d in ((m, k), (k, n), (n,), (m, n), (m, 1)))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "b"], ["u"]),
        helper.make_node("Gelu", ["u"], ["v"]), helper.make_node("Mul", ["v", "s"], ["z"]),
        helper.make_node("Add", ["z", "r"], ["y"]),
    ]  # fmt: skip
    built = model(nodes, kind, {"x": [m, k], "r": [m, n], "s": [m, 1]}, w=w, b=b)
    answer = simulator.run(built.SerializeToString(), [x, r, s], blocks=blocks, descriptors=True)
    assert answer.kinds == ["matmul"]
    x, w, b, r, s = (v.astype(np.float64) for v in (x, w, b, r, s))
    u = x @ w + b
    erf = np.vectorize(math.erf)
    wanted = (u * 0.5 * (1 + erf(u / np.sqrt(2)))) * s + r
    scale = 1 + float(np.abs(wanted).max())
    assert np.abs(answer.outputs[0].astype(np.float64) - wanted).max() <= 4 * scale * UNIT[kind] + 1e-5


def test_what_data_places_is_no_epilogue(simulator: Simulator) -> None:
    """Elements beside a product that are gathered, each from a place of its own, are read by another kernel; rows that
    are gathered (an embedding), or what is read at even steps, by the product's.
    """
    m, k, n = 40, 16, 24
    x, w, table = numbers("float32", m, k), numbers("float32", k, n), numbers("float32", m, 64)
    places, rows = rng.integers(-64, 64, (m, n)), rng.integers(0, m, m)
    product, last = helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "g"], ["y"])
    each = [product, helper.make_node("GatherElements", ["table", "i"], ["g"], axis=1), last]
    built = model(each, "float32", {"x": [m, k], "table": [m, 64]}, w=w, i=places)
    answer = simulator.run(built.SerializeToString(), [x, table])
    assert answer.kinds == ["matmul", "loops"]
    wanted = x.astype(np.float64) @ w
    near(answer.outputs[0], wanted + np.take_along_axis(table, places % 64, 1), "float32", k)
    for found in (rows, np.arange(m)[::-1]):
        whole = [product, helper.make_node("Gather", ["table", "i"], ["g"]), last]
        built = model(whole, "float32", {"x": [m, k], "table": [m, n]}, w=w, i=found)
        answer = simulator.run(built.SerializeToString(), [x, np.ascontiguousarray(table[:, :n])])
        assert answer.kinds == ["matmul"]
        near(answer.outputs[0], wanted + table[found, :n], "float32", k)
    two = helper.make_node("TopK", ["table", "i"], ["g", "at"])  # one of several results
    built = model([product, two, last], "float32", {"x": [m, k], "table": [m, n]}, w=w, i=np.array([n]))
    answer = simulator.run(built.SerializeToString(), [x, np.ascontiguousarray(table[:, :n])])
    assert answer.kinds == ["opaque", "matmul"]
    near(answer.outputs[0], wanted - np.sort(-table[:, :n], 1), "float32", k)


def test_erf_of_halves(simulator: Simulator) -> None:
    """Of every float16, and of bfloat16 also where it is tiny."""
    for kind in ("float16", "bfloat16"):
        x = np.arange(1 << 16, dtype=np.uint16).view(KINDS[kind])
        dtype = helper.np_dtype_to_tensor_dtype(np.dtype(KINDS[kind]))
        graph = helper.make_graph(
            [helper.make_node("Erf", ["x"], ["y"])], "g", [helper.make_tensor_value_info("x", dtype, [1 << 16])],
            [helper.make_tensor_value_info("y", dtype, [1 << 16])],
        )  # fmt: skip
        built = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        found = simulator.run(built.SerializeToString(), [x]).outputs[0].astype(np.float64)
        wanted = np.array([math.erf(v) for v in x.astype(np.float32)])
        finite = ~np.isnan(wanted)
        assert np.isnan(found[~finite]).all()
        np.testing.assert_array_equal(np.signbit(found[finite]), np.signbit(wanted[finite]))
        least = 2.0**-24 if kind == "float16" else 2.0**-126
        np.testing.assert_allclose(found[finite], wanted[finite], rtol=1.05 * UNIT[kind], atol=2.5 * least)


# ---------------------------------------------------------------- the choice


def facts(m: Any, n: Any, k: Any, kind: str = "float16", **more: Any) -> Facts:
    return Facts(m, n, k, 1, dtypes.BY_NAME[kind], kind == "float32", **more)


def test_candidates() -> None:
    for shape in ((1, 1, 1), (4096, 4096, 4096), (512, 32000, 2048), (128, 768, 768), (Sym("s0"), 768, Sym("s1"))):
        m, n, k = shape
        for kind in KINDS:
            found = candidates(facts(m, n, k, kind))
            assert 2 <= len(found) == len(set(found)) and not any(b.resident for b in found)
    large = facts(16384, 3072, 768)
    assert candidates(replace(large, described=True))[0].resident == 1
    assert candidates(large)[0].m * candidates(large)[0].n >= 128 * 128
    few = candidates(replace(facts(128, 768, 768), described=True))[0]
    assert few.m * few.n <= 64 * 64 and not few.resident
    assert any(b.m == 16 for b in candidates(facts(1, 4096, 4096)))
    assert all(b.k <= 32 for b in candidates(facts(64, 64, 20)))
    assert all(b.split == 1 for shape in ((512, 2048, 5632), (128, 768, 768)) for b in candidates(facts(*shape)))
    long = candidates(facts(512, 2048, 5632, described=True, divisible=True))  # few tiles, and a long sum
    assert long[0].split == 2 and any(b.split == 1 for b in long)
    for shape in ((512, 4096, 11008), (512, 2048, 2048), (128, 768, 3072), (64, 4096, 4096), (4096, 4096, 4096)):
        assert candidates(facts(*shape, described=True, divisible=True))[0].split == 1


# ---------------------------------------------------------------- machine code


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_machine_code(architecture: int) -> None:
    """Resident programs are for GPUs that have descriptors; elsewhere the same text has a program for each tile."""
    w, b = numbers("float16", 64, 512), numbers("float16", 512)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "b"], ["u"]),
        helper.make_node("Gelu", ["u"], ["y"]),
    ]  # fmt: skip
    built = model(nodes, "float16", {"x": ["M", 64]}, w=w, b=b)
    blocks = {"m": 128, "n": 128, "k": 64, "warps": 8, "stages": 3, "resident": 2}
    _, program = program_of(Request(built.SerializeToString(), [], blocks=blocks))
    (image,) = compile_program(program, architecture, 1)
    assert image.resident == (2 if architecture >= 90 else 0) and (image.scratch > 0) == (architecture >= 90)
    without = replace(program, functions=[replace(program.functions[0], loose=(0,))])
    (loose,) = compile_program(without, architecture, 1)
    assert loose.resident == 0 and loose.scratch == 0


def test_what_is_added_does_not_begin_the_sum() -> None:
    """As Triton has it where one turn makes the sum: digits would be lost beside a mask of -10000."""
    from triton import compile as compile_triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    nodes = [helper.make_node("MatMul", ["x", "w"], ["t"]), helper.make_node("Add", ["t", "z"], ["y"])]
    built = model(nodes, "float32", {"x": [3, 16], "w": [16, 20], "z": [3, 20]})
    _, program = program_of(Request(built.SerializeToString(), []))
    ((call, step),) = zip(program.calls, program.steps, strict=True)
    assert call.kind == "matmul"
    function = program.functions[step.kernel]
    source = ASTSource(load(program.source)[function.name], dict(function.parameters), {}, {})
    options = {"num_warps": function.warps, "enable_fp_fusion": True}
    text = compile_triton(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttir"]
    assert re.search(r"tt\.dot %\w+, %\w+, %cst", text) and "arith.addf" in text


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_run_chooses_a_tile(simulator: Simulator, dtype: Any) -> None:
    """Of a product of a number of rows that it knows: one kernel runs, with another tile for few rows than for many."""
    kind = "float" if dtype is np.float32 else "float16"
    text = f"g ({kind}[m,256] x, {kind}[256,900] w) => ({kind}[m,900] y) {{ y = MatMul(x, w) }}"
    found: dict[int, str] = {}
    for rows in (0, 1, 40, 513):
        x, w = (v.astype(dtype) for v in (f32(rows, 256), f32(256, 900) / 16))
        answer = simulator.run(parsed(text).SerializeToString(), [x, w])
        tolerance = 1e-5 if dtype is np.float32 else 1e-2
        wanted = x.astype(np.float64) @ w.astype(np.float64)
        np.testing.assert_allclose(answer.outputs[0], wanted, tolerance, tolerance)
        assert len(answer.launched) == (rows > 0)
        found[rows] = "".join(answer.launched)
    assert found[1] == found[40] != found[513]

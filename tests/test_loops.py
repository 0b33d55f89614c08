"""Loop kernels: every primitive that becomes a loop, through the planner and the C++ compiler, against numpy.

A case (`loop_cases_*.py`) is a function of a `Bench`, which builds a graph; most are compiled once for fixed sizes and
once for sizes known only at run time. Many cases share one compiler run.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxc.errors import RunError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.graph import Graph, Value
from onnxc.passes.prepare import prepare
from onnxc.runtime.cpu import level
from tests import loop_cases_pointwise as pointwise
from tests import loop_cases_sums as sums
from tests import loop_cases_views as views
from tests.compile_harness import UNFUSED, Compiled, check, compare, compile_graphs, generate
from tests.loop_cases import INTS, SIZES, Bench, Case, content

pytestmark = pytest.mark.every_target

PER_LIBRARY = 24
CASES = [*pointwise.TABLE.cases, *views.TABLE.cases, *sums.TABLE.cases]


# ---------------------------------------------------------------- running them


def _graph(one: Case) -> tuple[Bench, Graph]:
    bench = Bench(SIZES[one.at or 0], one.at is None)
    built = one.build(bench)
    return bench, bench.graph([built] if isinstance(built, Value) else built)


@functools.cache
def _libraries(k: int, cpu: str) -> dict[int, tuple[Bench, Compiled]]:
    """The library that the case k is in, and what else is in it, by its number."""
    own = next(numbers for numbers in _SETS[cpu] if k in numbers)
    at = own.index(k) // PER_LIBRARY * PER_LIBRARY
    return _library(own[at : at + PER_LIBRARY], cpu)


@functools.cache
def _library(numbers: tuple[int, ...], cpu: str) -> dict[int, tuple[Bench, Compiled]]:
    made = {k: _graph(CASES[k]) for k in numbers}
    found: dict[int, tuple[Bench, Compiled]] = {}
    for fused in (True, False):
        chosen = [k for k in numbers if CASES[k].fused is fused]
        if chosen:
            options = None if fused else UNFUSED
            compiled = compile_graphs([made[k][1] for k in chosen], options, level(cpu))
            found |= {k: (made[k][0], program) for k, program in zip(chosen, compiled, strict=True)}
    return found


def _is_plain(one: Case) -> bool:
    """Whether no op reads what another computes, or reduces what another does. Fused or not, loops are then those of
    single ops.
    """
    nodes = [n for n in prepare(_graph(one)[1]).nodes if n.op != "constant"]
    computed = {n.output.id for n in nodes}
    reduced = [n.operands[0].id for n in nodes if n.op.startswith("reduce_")]
    return len(reduced) == len({*reduced}) and not any(v.id in computed for n in nodes for v in n.operands)


def _of_case(one: Case) -> str:
    return one.name.rpartition("-")[0]


def _taken(numbers: list[int], turn: int) -> list[int]:
    """Which of the forms of a case has its turn."""
    first, second = (numbers[(turn + k) % len(numbers)] for k in range(2))
    return sorted({first, second}) if 0 in SIZES[CASES[first].at or 0] else [first]


def _sets() -> dict[str, list[tuple[int, ...]]]:
    """For each CPU: what is run every time, and the rest (`-m exhaustive`).

    Every case runs for this machine's vectors, in all its forms but those that only repeat another. For vectors of
    eight lanes every case runs in one of these forms, and they take turns: each form of kernels, each op and each dtype
    is met, but not each of one with each of the others. (Where it is that of no elements, in another one too.)
    """
    wanted = [k for k, one in enumerate(CASES) if one.fused or not _is_plain(one)]
    forms = [list(numbers) for _, numbers in itertools.groupby(wanted, lambda k: _of_case(CASES[k]))]
    in_turn = [k for turn, numbers in enumerate(forms) for k in _taken(numbers, turn)]
    chosen = {"native": wanted, "x86-64-v3": in_turn}
    every = range(len(CASES))
    return {cpu: [tuple(some), tuple(k for k in every if k not in set(some))] for cpu, some in chosen.items()}


_SETS = _sets()


def _run(k: int, cpu: str) -> None:
    bench, program = _libraries(k, cpu)[k]
    for sizes in SIZES if CASES[k].at is None else [(0, 0)]:
        bound = {"s0": sizes[0], "s1": sizes[1]}
        check(program, [content(bench, v, bound) for v in program.graph.inputs], CASES[k].rtol)


@pytest.mark.cpu_only("text of a CPU's kernels")
def test_what_is_not_run_unfused_has_the_loops_of_single_ops() -> None:
    rest = [CASES[k] for k in _SETS["native"][1]]
    for one in rest:
        graph = prepare(_graph(one)[1])
        apart, together = (generate(graph, options, level()).source for options in (UNFUSED, None))
        assert apart.count("const i64 rows = ") == together.count("const i64 rows = "), one.name
    assert rest


def _numbers(cpu: str) -> list[Any]:
    always, rest = _SETS[cpu]
    marked = [*((k, []) for k in always), *((k, [pytest.mark.exhaustive]) for k in rest)]
    return [pytest.param(k, id=CASES[k].name, marks=marks) for k, marks in marked]


@pytest.mark.parametrize("k", _numbers("native"))
def test_against_numpy(k: int) -> None:
    _run(k, "native")


@pytest.mark.cpu_only("vectors of another CPU")
@pytest.mark.slow
@pytest.mark.parametrize("k", _numbers("x86-64-v3"))
def test_eight_lanes(k: int) -> None:
    cpu = level("x86-64-v3") if level().machine == "x86_64" else None
    if cpu is None or not cpu.features <= level().features:
        pytest.skip("this machine does not run x86-64-v3 programs")
    _run(k, "x86-64-v3")


# ---------------------------------------------------------------- errors


def _divide_by_zero(b: Bench, dtype: DType) -> Value:
    return b.div(b.x(20, dtype=dtype), b.array(np.eye(20)[3].astype(dtype.numpy)))


def _failing() -> list[tuple[str, Callable[[Bench], Value], str]]:
    index = np.array([0, 3, -4, 1])
    return [
        ("gather", lambda b: b.gather(b.x(3, 5), b.array(index), 0), "index"),
        ("gather_innermost", lambda b: b.gather(b.x(5, 3), b.array(index), 1), "index"),
        ("gather_turned", lambda b: b.transpose(b.gather(b.x(3, 40), b.array(index), 0), (1, 0)), "index"),
        (
            "gather_elements",
            lambda b: b.one("gather_elements", b.x(3, 4), b.array(index[None]), axis=0),
            "index",
        ),
        (
            "gather_nd",
            lambda b: b.one("gather_nd", b.x(3, 4), b.array(index[:, None]), batch_dims=0),
            "index",
        ),
        *((f"divide-{t}", lambda b, t=t: _divide_by_zero(b, t), "division") for t in INTS),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "message"), _failing(), ids=[n for n, *_ in _failing()])
def test_errors_at_run_time(name: str, build: Callable[[Bench], Value], message: str) -> None:
    bench = Bench((3, 4), False)
    (program,) = compile_graphs([bench.graph([build(bench)])])
    with pytest.raises(RunError, match=message):
        program(*(content(bench, v, {}) for v in program.graph.inputs))


# ---------------------------------------------------------------- onnxruntime's word on what C leaves open

_TARGETS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]


def test_casts_out_of_range_are_onnxruntimes() -> None:
    """NaN and numbers too large for the target."""
    numbers = [
        np.nan,
        np.inf,
        -np.inf,
        1e10,
        -1e10,
        3e9,
        -3e9,
        300,
        -300,
        -1,
        2.7,
        -2.7,
        7e4,
        -7e4,
        1e19,
        -1e19,
        1.9e19,
        2.0**31,
        2.0**32,
        2.0**63,
        128,
        4e4,
    ]
    for source, number in ((dtypes.float32, "FLOAT"), (dtypes.float64, "DOUBLE")):
        x = np.array(numbers, source.numpy)
        bench = Bench((1, 1), False)
        value = bench.array(x)
        (program,) = compile_graphs([bench.graph([bench.cast(value, dtypes.BY_NAME[t]) for t in _TARGETS])])
        for target, actual in zip(_TARGETS, program(x), strict=True):
            compare(actual, _ort_cast(x, number, target), 0, 0, f"{source} to {target}")


def _ort_cast(x: np.ndarray, source: str, target: str) -> np.ndarray:
    to = getattr(TensorProto, target.upper())
    node = helper.make_node("Cast", ["x"], ["y"], to=to)
    inputs = [helper.make_tensor_value_info("x", getattr(TensorProto, source), x.shape)]
    graph = helper.make_graph([node], "cast", inputs, [helper.make_tensor_value_info("y", to, x.shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    (y,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return np.asarray(y)


def test_results_do_not_depend_on_threads() -> None:
    bench = Bench((1, 1), False)
    x = bench.x(300, 700)
    outputs = [bench.reduce("sum", x, [0, 1]), bench.reduce("sum", x, [0]), bench.softmax(x, 1)]
    (program,) = compile_graphs([bench.graph(outputs)])
    array = np.random.default_rng(zlib.crc32(b"threads")).standard_normal((300, 700)).astype(np.float32)
    for a, b in zip(program(array, threads=1), program(array, threads=2), strict=True):
        np.testing.assert_array_equal(a, b)

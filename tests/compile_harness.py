"""Compiles graphs of primitives through the planner and the code generator, and compares them with the
interpreter.

One compiler run costs much more than one small kernel, so `compile_graphs` puts many programs into one
library:

    (program,) = compile_graphs([graph])
    outputs = program(x, y)
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.cpp.program import ENTRY, Program, ProgramWriter
from onnxc.compiler import stages
from onnxc.compiler.machine_code import MachineCode
from onnxc.ir.expr import evaluate
from onnxc.ir.graph import Graph, Value
from onnxc.passes.prepare import prepare
from onnxc.passes.simplify import eliminate_dead
from onnxc.planner.fusion import plan
from onnxc.planner.groups import FusionOptions
from onnxc.planner.layout import assign
from onnxc.planner.offsets import assign_offsets
from onnxc.planner.templates import ENABLED
from onnxc.primitives.interpret import bind_sizes, interpret
from onnxc.runtime.cache import Cache
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.cpu import Level, has_byte_products, has_matrix_products, level
from onnxc.runtime.library import NativeModel, call_exception, load_runtime
from onnxc.runtime.package import load_library
from tests.targets import compiled_as_it_is, is_gpu

UNFUSED = FusionOptions(vertical=False, epilogue=False, horizontal=False, chains=False, split=False)
_MARGIN = 64  # bytes before every output that must stay as they are
_MARK = 0xA5
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass
class Compiled:
    """A compiled graph, called with arrays in the order of its inputs."""

    graph: Graph
    program: Program
    model: NativeModel
    weights: np.ndarray
    _keep: list[object] = field(default_factory=list)

    def __call__(self, *arrays: np.ndarray, threads: int = 2) -> list[np.ndarray]:
        """The outputs. Raises the RunError that the program reports; asserts that nothing beside them is
        written.
        """
        sizes = bind_sizes(self.graph.inputs, arrays)
        own = [_fenced(a) for a in arrays]
        blocks, outputs = zip(*(_output(v, sizes) for v in self.graph.outputs), strict=True)
        pointers = [a.ctypes.data for a in (*own, *outputs)]
        dims = [sizes[s] for s in self.program.symbols]
        if self.program.offsets is None:
            nbytes = [evaluate(b.nbytes, sizes) for b in self.program.buffers]
            places, total = assign_offsets(nbytes, [(b.first, b.last) for b in self.program.buffers])
            dims += [total, *places]
        error = self.model.call(
            threads,
            (ctypes.c_void_p * len(pointers))(*pointers),
            (ctypes.c_longlong * (len(dims) + 1))(*dims),
        )
        if error is not None:
            raise call_exception(error)
        for block, out in zip(blocks, outputs, strict=True):
            assert (block[: block.size - out.nbytes] == _MARK).all(), "wrote before the start of an output"
        return [out.copy() for out in outputs]


@dataclass
class CompiledForGpu:
    """A graph that a GPU runs, called as a `Compiled`."""

    graph: Graph
    model: CompiledModel

    def __call__(self, *arrays: np.ndarray, threads: int = 2) -> list[np.ndarray]:
        return list(self.model(*arrays).values())


def _fence(nbytes: int) -> np.ndarray:
    """A block of bytes that ends where an inaccessible page begins: what reads or writes past it crashes. Where it
    takes whole pages, so does what goes before it.
    """
    page = mmap.PAGESIZE
    usable = -(-max(nbytes, 1) // page) * page
    pages = mmap.mmap(-1, usable + 2 * page)
    block = np.frombuffer(pages, np.uint8)  # keeps the mapping alive
    for fence in (0, usable + page):
        if _libc.mprotect(block.ctypes.data + fence, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    return block[usable + page - nbytes : usable + page]


def _fenced(array: np.ndarray) -> np.ndarray:
    block = _fence(array.nbytes)
    block[:] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    return block.view(array.dtype).reshape(array.shape) if array.size else block


def _output(value: Value, sizes: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """The fenced block of an output, and the output in it."""
    shape = [evaluate(d, sizes) for d in value.shape]
    dtype = value.dtype.numpy
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    block = _fence(nbytes + _MARGIN)
    block[:] = _MARK
    return block, block[_MARGIN:].view(dtype).reshape(shape)


def compile_graphs(
    graphs: Sequence[Graph],
    options: FusionOptions | None = None,
    cpu: Level | None = None,
    poison: bool = True,
    exact: bool = False,
) -> list[Compiled] | list[CompiledForGpu]:
    """Plans, generates and compiles graphs of primitives as one library; for a GPU each on its own. `exact`: with the
    same bits in every plan, as training steps on a CPU.
    """
    prepared = [prepare(eliminate_dead(g)) for g in graphs]
    if is_gpu():
        return [CompiledForGpu(g, compiled_as_it_is(g, options)) for g in prepared]
    cpu = cpu or level()
    programs = [generate(g, options, cpu, exact=exact) for g in prepared]
    library = load_library(MachineCode(Cache()).library([join(programs)], cpu))
    runtime = load_runtime(Cache())
    out = []
    for k, (g, p) in enumerate(zip(prepared, programs, strict=True)):
        weights = stages.weights_block(p, g)
        model = NativeModel(runtime, library, f"run_{k}", [weights.ctypes.data], poison=poison)
        out.append(Compiled(g, p, model, weights))
    return out


def generate(graph: Graph, options: FusionOptions | None, cpu: Level, *, exact: bool = False) -> Program:
    """The program of one prepared graph."""
    kernels, made = (
        KernelOptions(vnni=has_byte_products(cpu), matrices=has_matrix_products(cpu)),
        plan(graph, assign(graph, ENABLED), options, exact=exact),
    )
    return ProgramWriter(made, cpu.vector_length, kernels).write()


def join(programs: Sequence[Program]) -> str:
    """One source of several programs: what they include once, then each program in a namespace of its own."""
    included, text = dict[str, None](), list[str]()
    for k, p in enumerate(programs):
        lines = [line for unit in p.sources for line in unit.split("\n")]
        included |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        text += [f"namespace program_{k} {{", body.replace(f"{ENTRY}(", f"run_{k}("), "}"]
    return "\n".join([*included, *text])


def check(
    program: Compiled | CompiledForGpu, arrays: Sequence[np.ndarray], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Runs the program and the interpreter and compares all outputs, dtypes, NaN and infinities included."""
    expected = interpret(program.graph, arrays)
    actual = program(*arrays)
    for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
        compare(a, e, rtol, atol * _scale(e), f"output {k}: {program.graph.outputs[k].type}")


def _scale(e: np.ndarray) -> float:
    """The greatest finite magnitude, at least 1: what rounding errors of sums are relative to."""
    if e.dtype.kind in "iub":
        return 1.0
    x = np.abs(e.astype(np.float64))
    return float(max(1.0, x[np.isfinite(x) & (x < 1e20)].max(initial=1.0)))


def compare(a: np.ndarray, e: np.ndarray, rtol: float, atol: float, what: str = "") -> None:
    """Equal, within the tolerances where the dtype is a float."""
    assert a.dtype == e.dtype and a.shape == e.shape, (what, a.dtype, e.dtype, a.shape, e.shape)
    if a.dtype.kind in "iub":
        np.testing.assert_array_equal(a, e, what)
        return
    if a.dtype.itemsize == 2:
        rtol, atol = max(rtol, 2e-2), max(atol, 2e-2)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(a.astype(np.float64), e.astype(np.float64), rtol, atol, err_msg=what)

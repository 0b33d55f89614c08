"""Runs generated GPU programs on a CPU: their kernels in Triton's interpreter, their steps one after the other.

    simulator = Simulator()  # in tests: the fixture `simulator`
    answer = simulator.run(model.SerializeToString(), [x])  # answer.outputs, answer.error, answer.kinds
    found = simulator.call(function, x)  # any function of a module: function(interpreter, x)

Triton decides when it is imported whether it interprets kernels or compiles them, so the interpreter runs in a process
of its own (this file as a script), which is fed through pipes. It is stricter than a GPU: an address that lies in no
buffer of the program raises, buffers begin full of NaN, and programs run from the last to the first.
"""

from __future__ import annotations

import importlib
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from tests.triton_quick import quicken

Array = np.ndarray[Any, Any]
MULTIPROCESSORS = 2
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Request:
    """A model and its inputs. `wide` makes all kernels index with 64 bits; `fusion` are fields of FusionOptions."""

    model: bytes
    inputs: Sequence[Array]
    wide: bool = False
    fusion: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(
        default_factory=dict
    )  # of modules of onnxc.codegen.triton, and of onnxc.planner.relay, made smaller than they are
    tile: dict[str, int] | None = None  # of every loop nest with reductions
    dtype: str | None = None  # as of onnxc.compile
    descriptors: bool = False  # whether tiles are read through descriptors, as on later GPUs
    blocks: dict[str, int] | None = None  # of every matmul
    candidate: int = 0  # which of the candidates every choice takes: its number, modulo how many there are
    imports: Sequence[str] = ()  # modules that define operators
    architecture: int | None = None  # whose own candidates count; those of none are interpreted


@dataclass(frozen=True)
class Call:
    """A function of a module, which the worker gives its interpreter."""

    module: str
    name: str
    arguments: Sequence[Any]


@dataclass
class Answer:
    """What a program computed; the words that it wrote to say what was out of bounds; its kernels, and
    the texts of those that ran, as often as they did.
    """

    outputs: list[Array]
    error: list[int]
    kinds: list[str]
    source: str
    launched: list[str]

    def ran(self, text: str) -> int:
        """How often kernels ran in which this stands."""
        return sum(text in kernel for kernel in self.launched)


class Failed(Exception):
    """An exception of the worker: its type's name and text."""


class Simulator:
    """The worker process, started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, model: bytes, inputs: Sequence[Array], **options: Any) -> Answer:
        """Compiles a model for the GPU and interprets its kernels.

        Raises:
            Failed: the compiler or a kernel raised.
        """
        found = self._asked(Request(model, list(inputs), **options))
        assert isinstance(found, Answer)
        return found

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of a module returns, called in the worker with its `Interpreter` and these arguments.

        Raises:
            Failed: it raised.
        """
        return self._asked(Call(function.__module__, function.__name__, arguments))

    def _asked(self, request: Request | Call) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        _send(stdin, request)
        found = _receive(stdout)
        if isinstance(found, str):
            raise Failed(found)
        return found

    def close(self) -> None:
        """Ends the worker."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.triton_simulator"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT)


def _send(pipe: IO[bytes], message: object) -> None:
    data = pickle.dumps(message)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> object:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError("the other side has ended")
    return pickle.loads(pipe.read(*struct.unpack("<q", head)))


# ---------------------------------------------------------------- the worker


def main() -> None:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not get between answers
    interpreter = Interpreter()
    while True:
        try:
            request = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if isinstance(request, Call):
                function = getattr(importlib.import_module(request.module), request.name)
                found: object = function(interpreter, *request.arguments)
            else:
                assert isinstance(request, Request)
                found = interpreter.answer(request)
        except Exception as error:  # whatever it is, the test that asked is to see it
            cause = error
            while cause.__cause__ is not None:
                cause = cause.__cause__  # type: ignore[assignment]
            found = f"{type(error).__name__}: {error}" + (
                "" if cause is error else f" [{type(cause).__name__}: {cause}]"
            )
        _send(answers, found)


class Memory:
    """Buffers that a program may touch: bytes at an address that is a multiple of 64, with nothing beyond."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._sorted: tuple[Array, Array] | None = None
        self._kept: list[Array] = []

    def place(self, nbytes: int, content: Array | None = None) -> Array:
        """A new buffer; full of NaN where no content is given."""
        block = np.full(nbytes + 128, 0xFF, np.uint8)
        skip = -block.ctypes.data % 64
        found = block[skip : skip + nbytes]
        if content is not None:
            found[...] = content
        self._kept.append(block)
        self.starts.append(found.ctypes.data)
        self.ends.append(found.ctypes.data + nbytes)
        self._sorted = None
        return found

    def check(self, addresses: Array, width: int, mask: Array) -> None:
        """Raises where an address that counts lies in no buffer."""
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        used = np.broadcast_to(addresses, shape)[np.broadcast_to(mask, shape)]
        if not used.size:
            return
        if self._sorted is None:
            order = np.argsort(self.starts)
            self._sorted = np.array(self.starts, np.uint64)[order], np.array(self.ends, np.uint64)[order]
        starts, ends = self._sorted
        at = np.searchsorted(starts, used, side="right").astype(np.int64) - 1
        bad = (at < 0) | (used + np.uint64(width) > ends[at])
        if bad.any():
            raise IndexError(f"{int(bad.sum())} addresses of {used.size} lie in no buffer")


class Interpreter:
    """Triton's interpreter, with numpy in the place of libdevice, and reductions as trees as on a GPU."""

    def __init__(self) -> None:
        from triton.runtime import interpreter

        self.interpreter = interpreter
        self.memory = Memory()
        quicken(interpreter)
        self._patch_builder()
        self._patch_reductions()
        self.library = self._library()

    # ------------------------------------------------------------ Triton's interpreter, put right

    def _patch_builder(self) -> None:
        builder = self.interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def checked_load(own: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            self.memory.check(ptrs.data, _width(ptrs), mask.data)
            return load(own, ptrs, mask, *rest, **more)

        def checked_store(own: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.memory.check(ptrs.data, _width(ptrs), mask.data)
            return store(own, ptrs, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
        binary = builder.binary_op

        def typed_binary(own: Any, a: Any, b: Any, op: Any) -> Any:
            """The interpreter calls what a comparison gives by the dtype of what is compared."""
            from triton import language as tl

            found = binary(own, a, b, op)
            return self.interpreter.TensorHandle(found.data, tl.int1) if found.data.dtype == bool else found

        builder.binary_op = typed_binary
        dot = builder.create_dot

        def widened_dot(own: Any, a: Any, b: Any, *rest: Any) -> Any:
            """The interpreter multiplies the bits of a bfloat16."""
            from triton import language as tl

            a, b = (own.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
            return dot(own, a, b, *rest)

        builder.create_dot = widened_dot
        cast = builder.cast_impl

        def exact_cast(own: Any, x: Any, target: Any) -> Any:
            """The interpreter takes the formats that numpy lacks for integers."""
            source, target = x.dtype.scalar, target.scalar
            odd = {str(t) for t in (source, target)} & {"bf16", "fp8e5", "fp8e4nv"}
            if not odd:
                return cast(own, x, target)
            from triton import language as tl

            if not source.is_floating():
                x, source = cast(own, x, tl.float32), tl.float32
            if target.is_floating():
                return own.create_fp_to_fp(x, target, None)
            return cast(own, own.create_fp_to_fp(x, tl.float32, None), target)

        builder.cast_impl = exact_cast
        self.interpreter._convert_float = _convert_float

    def _patch_reductions(self) -> None:
        """Reductions and scans of whole slices, in the order of a tree. Its own loop over single elements."""

        def reduced(own: Any, inputs: Any) -> list[Any]:
            parts = list(inputs)
            while parts[0].shape[own.axis] > 1:
                half = parts[0].shape[own.axis] // 2
                low = [self._slice(own, p, slice(None, half)) for p in parts]
                high = [self._slice(own, p, slice(half, None)) for p in parts]
                parts = _tuple(own.combine_fn.fn(*low, *high))
            if not own.keep_dims:
                parts = [own.to_tensor(p.handle.data.squeeze(own.axis), p.dtype) for p in parts]
            return parts

        def scanned(own: Any, inputs: Any) -> list[Any]:
            def turned(parts: Any) -> list[Any]:
                if not own.reverse:
                    return list(parts)
                return [own.to_tensor(np.ascontiguousarray(np.flip(p.handle.data, own.axis)), p.dtype) for p in parts]

            parts = turned(inputs)
            step = 1
            lanes = np.arange(parts[0].handle.data.shape[own.axis])
            while step < lanes.size:
                before = [own.to_tensor(np.roll(p.handle.data, step, own.axis), p.dtype) for p in parts]
                joined = _tuple(own.combine_fn.fn(*before, *parts))
                alone = (lanes < step).reshape([-1 if a == own.axis else 1 for a in range(parts[0].handle.data.ndim)])
                pairs = zip(parts, joined, strict=True)
                parts = [own.to_tensor(np.where(alone, p.handle.data, j.handle.data), p.dtype) for p, j in pairs]
                step *= 2
            return turned(parts)

        self.interpreter.ReduceOps.apply_impl = reduced
        self.interpreter.ScanOps.apply_impl = scanned

    @staticmethod
    def _slice(own: Any, x: Any, part: slice) -> Any:
        where = (slice(None),) * own.axis + (part,)
        return own.to_tensor(x.handle.data[where], x.dtype)

    def _library(self) -> dict[str, Any]:
        from onnxc.codegen.triton.cubin import load
        from onnxc.codegen.triton.program import library

        namespace = load(library() + "\n")
        for function in (namespace["ox_add"], namespace["tl"].zeros):  # they see triton.language, and its core
            self.interpreter._patch_lang(function.fn)

        class Scope:
            def restore(self) -> None:
                """All stays as it is."""

        self.interpreter._patch_lang = lambda fn: Scope()
        namespace["libdevice"] = Libdevice(self.interpreter)
        namespace["ox_tanh_half"] = namespace["libdevice"].tanh  # written in PTX
        namespace["ox_exp2_half"] = namespace["libdevice"].exp2
        namespace["ox_rcp_half"] = lambda x: 1.0 / x
        namespace["ox_read"] = namespace["tl"].load
        namespace["ox_again"] = lambda x: x
        namespace["ox_codes"] = _codes
        return namespace

    # ------------------------------------------------------------ programs

    def answer(self, request: Request) -> Answer:
        """Compiles and runs."""
        graph, program = program_of(request)
        values = _symbols(graph, request.inputs)
        with np.errstate(all="ignore"):
            return Run(self, program, graph, values, request.descriptors).answer(request.inputs)

    def launch(
        self, function: Callable[..., None], types: Sequence[str], words: Sequence[int], programs: int, waits: bool
    ) -> None:
        """Runs all programs of a kernel, the last one first, unless some wait for others. Each argument is a word: a
        number or an address.
        """
        from triton import language as tl

        integers = {"i32": np.int32, "i64": np.int64}
        arguments = []
        for kind, word in zip(types, words, strict=True):
            bits = np.array([word]).astype(integers.get(kind, np.uint64))
            handle = self.interpreter.TensorHandle(bits, tl.str_to_ty(kind, None))
            arguments.append(tl.tensor(handle, handle.dtype))
        builder = self.interpreter.interpreter_builder
        builder.set_grid_dim(programs, 1, 1)
        for turn in range(programs) if waits else reversed(range(programs)):
            builder.set_grid_idx(turn, 0, 0)
            function(*arguments)

    def functions(self, program: Any, descriptors: bool) -> dict[str, Callable[..., None]]:
        """The kernels of a program as Python functions."""
        import linecache

        from triton import language as tl

        from onnxc.codegen.triton.user import users_library

        found: dict[str, Callable[..., None]] = {}
        for name, text in program.kernels.items():
            users = "\n\n".join(users_library([text]))
            source = f"import triton\n\n\n{users}\n\n\n@triton.jit\ndef {name}{text}\n"
            file = f"<simulated {hash(source)}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            namespace = {**self.library, "__name__": "simulated", "ox_descriptors": tl.constexpr(descriptors)}
            exec(compile(source, file, "exec"), namespace)
            found[name] = namespace[name].rewrite()
        return found


def program_of(request: Request) -> tuple[Any, Any]:
    """The graph and the generated program of a model."""
    import onnx

    from onnxc import gpu
    from onnxc.choices import Choice, Decisions
    from onnxc.codegen.triton import (
        kernel,
        matmul,
        product_tiles,
        recurrence,
        recurrence_alone,
        scatter,
        scatter_sorted,
        tiles,
        walk,
    )
    from onnxc.codegen.triton.options import Options
    from onnxc.codegen.triton.product_tiles import Blocks
    from onnxc.codegen.triton.program import ProgramWriter
    from onnxc.compiler.options import CompileOptions
    from onnxc.compiler.stages import Stages, prepared
    from onnxc.frontends import onnx_file
    from onnxc.planner import operands, recurrences, relay
    from onnxc.planner.groups import FusionOptions

    class Numbered(Decisions):
        def choose(self, subject: str, names: Sequence[str], library: Sequence[str] = ()) -> Choice:
            return Choice(subject, names[request.candidate % len(names)], tuple(names), "as asked")

    for module in request.imports:
        importlib.import_module(module)
    graph = onnx_file.load(onnx.ModelProto.FromString(request.model))
    passes = CompileOptions(target="cuda", dtype=request.dtype).passes
    graph = prepared(graph, passes, Stages())
    changed: dict[tuple[Any, str], Any] = {(kernel, "WIDE"): 1} if request.wide else {}
    if request.blocks is not None:
        blocks = Blocks(**request.blocks)
        changed[matmul, "candidates"] = lambda facts: [blocks]
    places = (
        tiles, walk, matmul, relay, kernel, recurrence_alone, recurrence, recurrences, scatter, scatter_sorted,
        product_tiles, operands,
    )  # fmt: skip
    changed |= {(next(p for p in places if hasattr(p, k)), k): v for k, v in request.limits.items()}
    if request.tile is not None:
        own, ranked = tiles.Tile(**request.tile), tiles.ranked
        changed[tiles, "ranked"] = lambda f: iter([own]) if f.kind in ("rows", "columns") else ranked(f)
    before = {(module, name): getattr(module, name) for module, name in changed}
    try:
        for (module, name), value in changed.items():
            setattr(module, name, value)
        fused = gpu.planned(graph, FusionOptions(**request.fusion))
        return fused.graph, ProgramWriter(fused, Options(), Numbered(architecture=request.architecture)).write()
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def waits(kernel: str) -> bool:
    """Whether programs of a kernel wait for those before them."""
    return any(f"{function}(" in kernel for function in ("ox_await", "ox_unwritten"))


def _symbols(graph: Any, inputs: Sequence[Array]) -> dict[str, int]:
    """The dynamic dims, from the shapes of the inputs."""
    found: dict[str, int] = {}
    for v, x in zip(graph.inputs, inputs, strict=True):
        assert v.dtype.numpy == x.dtype, f"{v} is given {x.dtype}"
        found |= {str(d): n for d, n in zip(v.shape, x.shape, strict=True) if not isinstance(d, int)}
    return found


class Run:
    """One run of a program."""

    def __init__(
        self, interpreter: Interpreter, program: Any, graph: Any, values: dict[str, int], descriptors: bool
    ) -> None:
        self.owner, self.program, self.graph, self.values = interpreter, program, graph, values
        self.functions = interpreter.functions(program, descriptors)
        self.launched: list[str] = []
        self.memory = interpreter.memory = Memory()

    def answer(self, inputs: Sequence[Array]) -> Answer:
        """Allocates, runs all steps, and gives the outputs."""
        place = self.memory.place
        weights = np.zeros(self.program.weights.nbytes, np.uint8)
        self.program.weights.fill(weights)
        self.buffers = {("weights", 0): place(weights.size, weights)}
        for k, x in enumerate(inputs):
            self.buffers["input", k] = place(x.nbytes, np.ascontiguousarray(x).reshape(-1).view(np.uint8))
        for k, b in enumerate(self.program.buffers):
            self.buffers["arena", k] = place(self.size(b.nbytes))
        shapes = [tuple(map(self.size, v.shape)) for v in self.graph.outputs]
        for k, (v, shape) in enumerate(zip(self.graph.outputs, shapes, strict=True)):
            self.buffers["output", k] = place(int(np.prod(shape, dtype=np.int64)) * v.dtype.itemsize)
        self.error = place(32, np.zeros(32, np.uint8)).view(np.int64)
        self.steps(self.program.steps)
        outputs = [
            self.buffers["output", k].view(v.dtype.numpy).reshape(shape).copy()
            for k, (v, shape) in enumerate(zip(self.graph.outputs, shapes, strict=True))
        ]
        kinds = [c.kind for c in self.program.calls]
        source = "\n".join(f"{k}{t}" for k, t in self.program.kernels.items())
        return Answer(outputs, self.error.tolist(), kinds, source, self.launched)

    def size(self, d: Any) -> int:
        """A dim's number."""
        from onnxc.runtime.sizes import encode, evaluate

        return evaluate(encode(d), self.values)

    def at(self, place: Any) -> Array:
        """The bytes from a place on."""
        return self.buffers[place.kind, place.number][self.size(place.offset) :]

    def steps(self, steps: Sequence[Any]) -> None:
        """Runs some steps."""
        from onnxc.codegen.triton import program

        for step in steps:
            if isinstance(step, program.Launch):
                self.launch(step)
            elif isinstance(step, program.Copy):
                n = self.size(step.nbytes)
                self.at(step.to)[:n] = self.at(step.source)[:n].copy()
            elif isinstance(step, program.Fill):
                self.at(step.to)[: self.size(step.nbytes)] = 0
            else:
                for turn in range(self.size(step.trip)):
                    self.values[step.counter] = turn
                    self.steps(step.steps)

    def launch(self, step: Any) -> None:
        """Runs all programs of a kernel."""
        function = self.program.functions[step.kernel]
        words = [self._word(a) for a in step.arguments]
        types = [t for _, t in function.parameters]
        programs = self.size(step.programs)
        if function.resident:
            programs = min(programs, MULTIPROCESSORS * function.resident)
        own = self.functions[function.name]
        if programs:
            self.launched.append(self.program.kernels[function.name])
        self.owner.launch(own, types, words, programs, waits(self.program.kernels[function.name]))

    def _word(self, argument: Any) -> int:
        from onnxc.codegen.triton.program import Size

        if isinstance(argument, Size):
            return self.size(argument.value)
        return int((self.error if argument is None else self.at(argument)).ctypes.data)


def _tuple(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple) else [x]


def _width(pointers: Any) -> int:
    return max(1, int(pointers.get_element_ty().primitive_bitwidth) // 8)


def _convert_float(x: Array, source: Any, target: Any, rounding: Any) -> Array:
    """Floats between formats, to the nearest; as raw bits, which is what the interpreter wants."""
    import ml_dtypes

    kinds: dict[str, Any] = {
        "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "fp64": np.float64,
        "fp8e5": ml_dtypes.float8_e5m2, "fp8e4nv": ml_dtypes.float8_e4m3fn,
    }  # fmt: skip
    bits = getattr(np, f"uint{target.primitive_bitwidth}")
    return np.ascontiguousarray(x).view(kinds[str(source)]).astype(kinds[str(target)]).view(bits).reshape(x.shape)


def _codes(x: Any, shift: int, swapped: bool, bits: int, asm: str) -> Any:
    """`ox_codes`: its instructions, on pairs of words."""
    from triton import language as tl

    words = np.ascontiguousarray(x.handle.data)
    made = x + 0  # a tensor of its own
    made.handle.data = _executed(asm, {"$1": words.reshape(-1).view(np.uint32)}).view(np.int16).reshape(words.shape)
    return made.to(tl.float16, bitcast=True)


def _executed(asm: str, registers: dict[str, Array]) -> Array:
    """What PTX leaves in register $0. Of its instructions those that select bytes, and bits by three words."""
    for line in asm.strip("{} ").split(";"):
        op, _, rest = line.strip().partition(" ")
        if op not in ("prmt.b32", "lop3.b32"):
            assert op in ("", ".reg"), line
            continue
        to, *names = rest.split(", ")
        *words, how = (registers[name] if name in registers else np.uint32(int(name, 0)) for name in names)
        registers[to] = _selected(*words, int(how)) if op == "prmt.b32" else _combined(*words, int(how))
    return registers["$0"]


def _selected(a: Any, b: Any, order: int) -> Any:
    """The bytes of a (0 to 3) and b (4 to 7) that the nibbles of a number name, from the lowest on."""
    parts = [(x >> np.uint32(8 * k)) & np.uint32(0xFF) for x in (a, b) for k in range(4)]
    return sum(parts[order >> 4 * k & 7] << np.uint32(8 * k) for k in range(4))


def _combined(a: Any, b: Any, c: Any, table: int) -> Any:
    """Bit by bit what a table says of the bits of three words."""
    cases = [(a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c) for k in range(8) if table >> k & 1]
    return np.bitwise_or.reduce(np.broadcast_arrays(*cases))


class Libdevice:
    """NVIDIA's functions of numbers, by numpy."""

    def __init__(self, interpreter: Any) -> None:
        import math

        self._interpreter = interpreter
        same = "exp exp2 log sin cos tan sinh cosh tanh floor ceil rint fmod copysign"
        self._functions: dict[str, Callable[..., Array]] = {
            **{name: getattr(np, name) for name in same.split()},
            "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
            "atanh": np.arctanh, "pow": np.power, "sqrt_rn": np.sqrt, "mul_rn": np.multiply, "add_rn": np.add,
            "erf": np.vectorize(math.erf, otypes=[np.float64]),
        }  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from triton import language as tl

        function = self._functions[name]

        def call(*args: Any) -> Any:
            first = next(a for a in args if hasattr(a, "handle"))
            given = [a.handle.data if hasattr(a, "handle") else first.handle.data.dtype.type(a) for a in args]
            result = np.asarray(function(*given)).astype(given[0].dtype)
            handle = self._interpreter.TensorHandle(result, first.handle.dtype)
            is_block = any(a.type.is_block() for a in args if hasattr(a, "type"))
            return tl.core.tensor(handle, tl.block_type(first.dtype, list(result.shape)) if is_block else first.type)

        return call


if __name__ == "__main__":
    from tests import triton_simulator

    triton_simulator.main()

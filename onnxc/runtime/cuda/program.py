"""The program of a model: what its manifest says under "cuda", and the steps that it becomes for one set of sizes.

A step names a buffer by what it is part of (an input, an output, the arena, the weights, the error words) and an
offset. All of these parts are *bases* here, with a number each: their addresses are known at a call, and may change
with it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from onnxc.errors import CudaError, LimitError, PackageError
from onnxc.planner.offsets import assign_offsets
from onnxc.runtime.cuda.cublaslt import MOST_RANK, VECTOR, Algorithm, Factor, Product
from onnxc.runtime.signature import MOST_BYTES, Tensor
from onnxc.runtime.sizes import Size, evaluate

ALIGN = 256  # of buffers in the arena and in staging blocks
_MOST_STEPS = 1 << 18
_MOST_COPIED = 1 << 30  # bytes of one copy: a node of a graph has a pitch, which the driver limits
_MOST_SCRATCH = 64 << 20  # bytes that launches have side by side
_MOST_GRID = (2**31 - 1, 65535, 65535)
_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)")


@dataclass(frozen=True)
class Image:
    """The machine code of one kernel, and what it is launched with.

    Where `resident` is not 0, programs go on to the work of others: so many for each multiprocessor are enough.
    """

    name: str
    at: int
    size: int
    shared: int
    threads: int
    scratch: int = 0
    cluster: int = 1
    resident: int = 0

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> Image:
        """From a manifest."""
        numbers = {key: int(row[key]) for key in ("at", "size", "shared", "threads")}
        image = Image(
            str(row["name"]), **numbers, scratch=int(row.get("scratch", 0)), cluster=int(row.get("cluster", 1)),
            resident=int(row.get("resident", 0)),
        )  # fmt: skip
        least = min(image.at, image.size, image.shared, image.scratch, image.resident)
        if least < 0 or min(image.threads, image.cluster) < 1:
            raise ValueError(f"{image.name!r} has a negative number")
        return image


class Pointer(NamedTuple):
    """A place: the number of a base, and bytes from its start."""

    base: int
    offset: int


class Span(NamedTuple):
    """Bytes that a step reads or writes: in which base, from where, up to where."""

    base: int
    start: int
    end: int
    written: bool


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, once."""

    kernel: int
    call: int
    grid: tuple[int, int, int]
    arguments: tuple[Pointer | int, ...]
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes from one place to another."""

    call: int
    to: Pointer
    source: Pointer
    nbytes: int

    @property
    def spans(self) -> tuple[Span, ...]:
        return _span(self.to, self.nbytes, True), _span(self.source, self.nbytes, False)


@dataclass(frozen=True, slots=True)
class Fill:
    """Zeros."""

    call: int
    to: Pointer
    nbytes: int

    @property
    def spans(self) -> tuple[Span, ...]:
        return (_span(self.to, self.nbytes, True),)


def _span(at: Pointer, nbytes: int, written: bool) -> Span:
    return Span(at.base, at.offset, at.offset + nbytes, written)


@dataclass(frozen=True, slots=True)
class Multiply:
    """A product by a library: what it is told, the algorithm, and where the matrices are, by name."""

    call: int
    product: Product
    algorithm: Algorithm
    at: Mapping[str, Pointer]
    spans: tuple[Span, ...] = ()


Step = Launch | Multiply | Copy | Fill


class Chooses(Protocol):
    """A library that products may be given to."""

    def choose(self, product: Product, rank: int) -> Algorithm | None:
        """The algorithm for a product; None where there is none."""


@dataclass(frozen=True)
class Bases:
    """The numbers of the bases: inputs, outputs, arena, weights, error words, in this order."""

    inputs: int
    outputs: int

    @property
    def arena(self) -> int:
        return self.inputs + self.outputs

    @property
    def weights(self) -> int:
        return self.arena + 1

    @property
    def errors(self) -> int:
        return self.arena + 2


class Program:
    """What a manifest says of the program.

    Args:
        manifest: of a model whose target is "cuda".

    Raises:
        PackageError: it is damaged.
    """

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        try:
            cuda, arena = manifest["cuda"], manifest["arena"]
            self.bases = Bases(len(manifest["inputs"]), len(manifest["outputs"]))
            self.tensors = {"input": list(manifest["inputs"]), "output": list(manifest["outputs"])}
            self.images = {str(k): [Image.from_json(i) for i in images] for k, images in cuda["images"].items()}
            self._steps: list[Mapping[str, Any]] = list(cuda["steps"])
            # Of architectures whose kernels are others than the rest's.
            self._own = {str(k): list(steps) for k, steps in dict(cuda.get("own_steps") or {}).items()}
            self.branches = cuda.get("branches") is True  # whether steps may run side by side
            self._sizes: list[Size] = list(arena["sizes"])
            self._which: list[int] = list(arena["which"])
            self._spans = list(zip(arena["first"], arena["last"], strict=True))
            if len(self._spans) != len(self._which):
                raise ValueError("the arena's lists differ in length")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error

    def architecture(self, capability: tuple[int, int], device: object) -> str:
        """The architecture whose images fit a GPU.

        Machine code for sm_80 runs on sm_86 too, but not on sm_90. The suffix `a` binds it to one architecture, `f` to
        the later ones of the same family.

        Raises:
            CudaError: there is none; it names those that there are.
        """
        major, minor = capability
        best: tuple[int, int, str] | None = None
        for name in self.images:
            found = _ARCHITECTURE.fullmatch(name)
            if found is None or int(found[1]) != major or int(found[2]) > minor:
                continue
            if found[3] == "a" and int(found[2]) != minor:
                continue
            best = max(best or (-1, 0, ""), (int(found[2]), len(found[3]), name))
        if best is None:
            raise CudaError(
                f"the model was compiled for {', '.join(self.images) or 'no GPU'}, and this GPU is {device}: compile "
                f'it with target="cuda:sm_{major}{minor}"'
            )
        return best[2]

    def wants_library(self, architecture: str) -> bool:
        """Whether there is any product by a library."""
        return _has_product(self._own.get(architecture, self._steps))

    def at(
        self, values: Mapping[str, int], architecture: str, multiprocessors: int, library: Chooses | None = None,
        weights: int = 0,
    ) -> Flat:  # fmt: skip
        """The steps for these values of the dynamic dims, on a GPU with so many multiprocessors.

        Args:
            library: which products are given to, where it takes them; others are kernels.
            weights: bytes that there are of them.

        Raises:
            LimitError: the arena, a grid or the number of steps would be absurdly large.
            PackageError: the manifest is damaged.
        """
        try:
            steps = self._own.get(architecture, self._steps)
            images = self.images[architecture]
            return _Flattening(self, dict(values), images, multiprocessors, library, weights).run(steps)
        except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            raise PackageError(f"the manifest is damaged: {error!r}", cause=error) from error

    def layout(self, values: Mapping[str, int]) -> tuple[list[int], int, list[int]]:
        """The offset of each buffer, the arena's bytes, and those of each buffer."""
        exact = [evaluate(s, values) for s in self._sizes]
        nbytes = [exact[k] for k in self._which]
        if sum(nbytes) > MOST_BYTES:
            raise LimitError(f"the intermediates would have {sum(nbytes)} bytes")
        return *assign_offsets(nbytes, self._spans, ALIGN), nbytes


@dataclass(frozen=True)
class Flat:
    """A program for one set of sizes: no loops, no sizes any more.

    Attributes:
        steps: in order.
        arena: bytes.
        instead: calls of products that the library was to do, and kernels do.
        branches: whether steps that do not need each other may run side by side.
    """

    steps: list[Step]
    arena: int
    branches: bool = False
    instead: frozenset[int] = frozenset()


def _has_product(steps: Any) -> bool:
    inner = [s for s in steps if isinstance(s, Mapping)] if isinstance(steps, list) else []
    return any("product" in s or _has_product(s.get("steps")) for s in inner)


class _Flattening:
    """The state of :meth:`Program.at`."""

    def __init__(
        self, program: Program, values: dict[str, int], images: Sequence[Image], multiprocessors: int,
        library: Chooses | None, weights: int,
    ) -> None:  # fmt: skip
        self._program, self._values, self._images, self._weights = program, values, images, weights
        self._multiprocessors, self._library = multiprocessors, library
        self._offsets, self._arena, self._nbytes = program.layout(values)
        self._scratch = 0  # bytes behind the arena's buffers that launches need
        self._free = 0  # of these, where the next launch's begin
        self._found: list[Step] = []
        self._instead: set[int] = set()
        self._call = 0  # of the last launch: copies count as its

    def run(self, steps: Sequence[Mapping[str, Any]]) -> Flat:
        self._walk(steps)
        return Flat(self._found, self._arena + self._scratch, self._program.branches, frozenset(self._instead))

    def _walk(self, steps: Sequence[Mapping[str, Any]]) -> None:
        for step in steps:
            if "launch" in step:
                self._launch(step)
            elif "product" in step:
                self._product(step)
            elif "copy" in step:
                to, source, nbytes = step["copy"]
                self._copy(self._pointer(to), self._pointer(source), self._natural(nbytes))
            elif "fill" in step:
                to, nbytes = step["fill"]
                if n := self._natural(nbytes):
                    self._add(Fill(self._call, self._pointer(to), n))
            else:
                self._loop(step)

    def _copy(self, to: Pointer, source: Pointer, nbytes: int) -> None:
        for at in range(0, nbytes, _MOST_COPIED):
            n = min(_MOST_COPIED, nbytes - at)
            self._add(Copy(self._call, Pointer(to.base, to.offset + at), Pointer(source.base, source.offset + at), n))

    def _loop(self, step: Mapping[str, Any]) -> None:
        counter, trip = step["loop"], self._natural(step["trip"])
        if trip * len(step["steps"]) > _MOST_STEPS:
            raise LimitError(f"a run would have more than {_MOST_STEPS} steps")
        for turn in range(trip):
            self._values[counter] = turn
            self._walk(step["steps"])
        self._values.pop(counter, None)

    def _launch(self, step: Mapping[str, Any]) -> None:
        kernel, self._call = int(step["launch"]), int(step["call"])
        x, y, z = (self._natural(n) for n in step["grid"])
        image = self._images[kernel]
        if image.resident:
            x = min(x, image.resident * self._multiprocessors)
        x *= image.cluster
        if not x * y * z:
            return
        if any(n > most for n, most in zip((x, y, z), _MOST_GRID, strict=True)):
            raise LimitError(f"a kernel would have a grid of {x} x {y} x {z} blocks")
        arguments = [self._argument(a) for a in step["args"]]
        scratch: Pointer | int = 0
        if image.scratch:
            scratch = Pointer(self._program.bases.arena, self._arena + self._taken(image.scratch * x * y * z))
        written = set(step.get("writes", range(len(arguments))))
        spans = [self._whole(a, k in written) for k, a in enumerate(step["args"])]
        own = (_span(scratch, image.scratch * x * y * z, True),) if isinstance(scratch, Pointer) else ()
        self._add(Launch(kernel, self._call, (x, y, z), (*arguments, scratch, 0), (*own, *(s for s in spans if s))))

    def _product(self, step: Mapping[str, Any]) -> None:
        """A product by the library, or what there is instead of it."""
        self._call = int(step["call"])
        m, n, k, count = (self._natural(size) for size in step["product"])
        if not m * n * count:
            return
        product = self._described(step, (m, n, k, count))
        places = {name: step[name][0] for name in "abcd" if step[name]}
        places |= {"bias": step["bias"]} if product.bias else {}
        at = {name: self._pointer(place) for name, place in places.items()}
        algorithm = None
        if self._library is not None and product.fits():
            for name, nbytes in product.extents().items():
                self._check(places[name], nbytes)
            if not product.bias or at["bias"].offset % VECTOR == 0:
                algorithm = self._library.choose(product, min(max(1, int(step["rank"])), MOST_RANK))
        if algorithm is None:
            self._instead.add(self._call)
            for launch in step["instead"]:
                self._launch(launch)
            return
        spans = (self._whole(place, name == "d") for name, place in places.items())
        self._add(Multiply(self._call, product, algorithm, at, tuple(s for s in spans if s)))

    def _described(self, step: Mapping[str, Any], sizes: tuple[int, int, int, int]) -> Product:
        """What the library would be told. ValueError where it cannot be told that."""

        def factor(name: str) -> Factor:
            _, apart, batch, turned = step[name]
            return Factor(self._number(apart), self._number(batch), bool(turned))

        product = Product(
            *sizes, factor("a"), factor("b"), factor("d"), factor("c") if step["c"] else None,
            bool(step["bias"]), str(step["epilogue"]), str(step["dtype"]), str(step["precision"]),
        )  # fmt: skip
        product.check()
        a, b, c, d = (self._aligned(step[x], product.itemsize) if step[x] else VECTOR for x in "abcd")
        return replace(product, aligned=(a, b, c, d))

    def _aligned(self, matrix: Sequence[Any], itemsize: int) -> int:
        """Bytes that the addresses of all rows of a matrix are multiples of: bases are of 16 and more."""
        place, apart, batch, _ = matrix
        offset = self._pointer(place).offset
        return math.gcd(VECTOR, offset, self._number(apart) * itemsize, self._number(batch) * itemsize)

    def _check(self, place: Sequence[Any], nbytes: int) -> None:
        """ValueError where so many bytes from a place on are not all of its buffer's."""
        kind, number, offset = place
        if kind == "arena":
            most = self._nbytes[number]
        elif kind == "weights":
            most = self._weights
        else:
            tensor = Tensor.from_json(self._program.tensors[kind][number])
            most = math.prod(self._natural(size) for size in tensor.sizes) * tensor.dtype.itemsize
        if self._natural(offset) + nbytes > most:
            raise ValueError(f"{nbytes} bytes of {kind} {number} are beyond its end")

    def _taken(self, nbytes: int) -> int:
        """Where a launch has so many bytes of scratch memory: the same as others, but for those that run beside it."""
        if not self._program.branches or self._free + nbytes > _MOST_SCRATCH:
            self._free = 0
        at = self._free
        self._free = at + -(-nbytes // ALIGN) * ALIGN
        self._scratch = max(self._scratch, self._free)
        return at

    def _whole(self, argument: Sequence[Any], written: bool) -> Span | None:
        """What an argument may read or write: all of its buffer."""
        kind = argument[0]
        if kind in ("size", "weights"):
            return None
        at = self._pointer(argument)
        if kind == "error":
            return Span(at.base, 0, 1, True)
        if kind == "arena":
            start = self._offsets[argument[1]]
            return Span(at.base, start, start + self._nbytes[argument[1]], written)
        return Span(at.base, 0, MOST_BYTES, written)

    def _add(self, step: Step) -> None:
        if len(self._found) >= _MOST_STEPS:
            raise LimitError(f"a run would have more than {_MOST_STEPS} steps")
        self._found.append(step)

    def _argument(self, argument: Sequence[Any]) -> Pointer | int:
        return self._number(argument[1]) if argument[0] == "size" else self._pointer(argument)

    def _pointer(self, argument: Sequence[Any]) -> Pointer:
        bases = self._program.bases
        if argument[0] == "error":
            return Pointer(bases.errors, 0)
        kind, number, size = argument
        offset = self._natural(size)
        if kind == "arena":
            return Pointer(bases.arena, self._offsets[number] + offset)
        if kind == "weights":
            return Pointer(bases.weights, offset)
        count, first = {"input": (bases.inputs, 0), "output": (bases.outputs, bases.inputs)}[kind]
        if not 0 <= number < count:
            raise ValueError(f"there is no {kind} {number}")
        return Pointer(first + number, offset)

    def _natural(self, size: Size) -> int:
        return max(0, self._number(size))

    def _number(self, size: Size) -> int:
        return operator.index(evaluate(size, self._values))

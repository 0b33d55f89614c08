"""Kernels of users: C++ or Triton source that an operator's definition calls, as it calls primitives.

    SCALE = Kernel("scale_rows", cpp='''
    void scale_rows(const f32 *x, const f32 *w, f32 *y, i64 columns, i64 first, i64 last) {
      for (i64 row = first; row < last; row++)
        for (i64 c = 0; c < columns; c++) y[row * columns + c] = x[row * columns + c] * w[row];
    }''')

    @op("ScaleRows", 1, domain="com.example")
    def scale_rows(b: Builder, x: Value, w: Value) -> Value:
        rows, columns = x.shape
        return SCALE.call(b, [x, w], x.t, sizes=[columns], items=rows, equal=[(w.shape[0], rows)])

docs/custom-operators.md is the page for users.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.errors import InputError, InternalError, ShapeError
from onnxc.ir.dtypes import BY_NAME
from onnxc.ir.expr import Dim, Expr, never_equal
from onnxc.ir.graph import Attrs, Node, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.base import Kind, Primitive, register

if TYPE_CHECKING:
    from onnxc.primitives.builder import Builder

USER = "user_kernel"
Scalar = int | float | np.integer[Any] | np.floating[Any]
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
    "uint64", "bool",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_HEADER = re.compile(r"[A-Za-z0-9_+./-]{1,128}")
_INCLUDE = re.compile(r"^\s*#\s*include\b", re.MULTILINE)
_WARPS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Kernel:
    """A function in C++, in Triton, or in both (for the CPU and for GPUs).

    The function takes pointers to the inputs and to the outputs, all of them row-major without gaps, then the sizes
    (``i64``) and the scalars (``double`` or ``i64``) of the call. In C++ then follow, where the call says `items`,
    ``i64 first, i64 last`` (the items of this piece of the work; other threads do others) and, where it says
    `workspace`, a ``char *``. A function that returns an ``int`` other than 0 fails the run.

    Args:
        name: of the function.
        cpp: C++17 that defines it. What else it defines is no one else's: it stands in a namespace of its own.
        triton: Triton source, whose functions have ``@triton.jit`` (`triton` and `tl` are there).
        headers: standard headers that the C++ needs: ``("cmath",)``.
        warps: of a Triton program.

    Raises:
        InputError: there is neither source, or a name is not one.
    """

    name: str
    cpp: str = ""
    triton: str = ""
    headers: tuple[str, ...] = ()
    warps: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "headers", tuple(self.headers))
        if not _NAME.fullmatch(self.name):
            raise InputError(f"{self.name!r} is not the name of a function (letters, digits, underscores)")
        if not self.cpp and not self.triton:
            raise InputError(f"the kernel {self.name} has neither C++ nor Triton source")
        wrong = [h for h in self.headers if not _HEADER.fullmatch(h) or ".." in h]
        if wrong:
            raise InputError(
                f"the kernel {self.name} names the header {wrong[0]!r}: names are as in headers=('cmath',)"
            )
        if _INCLUDE.search(self.cpp):
            raise InputError(f"the kernel {self.name} has an #include: name standard headers in headers=('cmath',)")
        if self.warps not in _WARPS:
            raise InputError(f"the kernel {self.name} wants {self.warps!r} warps: they are one of {_WARPS}")
        _KERNELS[self.key] = self

    @property
    def key(self) -> str:
        """The digest of all of it: what a graph knows it by."""
        parts = [self.name, self.cpp, self.triton, self.headers, self.warps]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def call(self, b: Builder, inputs: Sequence[Value], output: TensorType, **options: Any) -> Value:
        """As `call_many`, of a function with one output."""
        return self.call_many(b, inputs, [output], **options)[0]

    def call_many(
        self,
        b: Builder,
        inputs: Sequence[Value],
        outputs: Sequence[TensorType],
        *,
        sizes: Sequence[Dim] = (),
        scalars: Sequence[Scalar] = (),
        items: Dim | None = None,
        programs: Dim = 1,
        workspace: Dim = 0,
        equal: Sequence[tuple[Dim, Dim]] = (),
        constants: Mapping[str, int] | None = None,
    ) -> list[Value]:
        """Adds a call of the function.

        Args:
            b: the builder that the operator's definition was given.
            inputs: tensors.
            outputs: the types of the results.
            sizes: numbers that follow from shapes.
            scalars: numbers that are known now, such as attributes.
            items: how many pieces the work can be divided into, for the C++ function; None: it is called once.
            programs: how many programs run the Triton function.
            workspace: bytes that each thread's call of the C++ function may use, from an address of 64 bytes.
            equal: pairs of sizes that must be equal: checked here, or at each run with new sizes.
            constants: values of the Triton function's ``tl.constexpr`` parameters.

        Raises:
            ShapeError: sizes of `equal` differ. InputError: an argument is not of its type.
        """
        types, named = list(outputs), dict(constants or {})
        work = [1 if items is None else items, programs, workspace]
        self._check([v.t for v in inputs], types, [*sizes, *work], scalars, named)
        for one, other in equal:
            if never_equal(one, other):
                raise ShapeError(f"the kernel {self.name} wants the sizes {one} and {other} to be equal")
        attrs = {
            "kernel": self.key,
            "name": self.name,
            "dtypes": tuple(t.dtype.name for t in types),
            "ranks": tuple(t.rank for t in types),
            "dims": tuple(d for t in types for d in t.shape),
            "sizes": tuple(sizes),
            "scalars": tuple(_plain(x) for x in scalars),
            "divided": items is not None,
            "items": 1 if items is None else items,
            "programs": programs,
            "workspace": workspace,
            "equal": tuple(d for pair in equal for d in pair),
            "constants": tuple(named),
            "values": tuple(named.values()),
        }
        return list(b.emit(USER, list(inputs), attrs))

    def _check(
        self, inputs: Sequence[TensorType], outputs: Sequence[TensorType], sizes: Sequence[object],
        scalars: Sequence[Scalar], constants: Mapping[str, int],
    ) -> None:  # fmt: skip
        for what, types in (("input", inputs), ("output", outputs)):
            for k, t in enumerate(types):
                if t.dtype.name not in DTYPES:
                    raise InputError(f"{what} {k} of the kernel {self.name} cannot be {t.dtype}: cast it")
        if not outputs:
            raise InputError(f"the kernel {self.name} has no output")
        wrong = [d for d in sizes if not isinstance(d, (int, Expr)) or isinstance(d, bool)]
        if wrong:
            raise InputError(f"sizes of the kernel {self.name} are ints or dims, not {wrong[0]!r}")
        if not all(isinstance(x, (int, float, np.integer, np.floating)) for x in scalars):
            raise InputError(f"scalars of the kernel {self.name} are numbers, not {list(scalars)!r}")
        if not all(_NAME.fullmatch(k) and isinstance(v, int) for k, v in constants.items()):
            raise InputError(f"constants of the kernel {self.name} are ints by name, not {dict(constants)!r}")


def _plain(x: Scalar) -> int | float:
    if isinstance(x, (float, np.floating)):
        return float(x)
    if not -(1 << 63) <= int(x) < 1 << 63:
        raise InputError(f"the scalar {x} does not fit 64 bits")
    return int(x)


_KERNELS: dict[str, Kernel] = {}


def by_key(key: str) -> Kernel:
    """The kernel that a graph names by its key."""
    found = _KERNELS.get(key)
    if found is None:
        raise InternalError(f"a graph names the kernel {key}, which is not defined in this process")
    return found


def kernel_of(node: Node) -> Kernel:
    """The kernel that a node calls."""
    return by_key(node.attrs["kernel"])


def output_types(node_attrs: Attrs) -> tuple[TensorType, ...]:
    """The types that a call says."""
    dims, found = list(node_attrs["dims"]), []
    for name, rank in zip(node_attrs["dtypes"], node_attrs["ranks"], strict=True):
        found.append(TensorType(BY_NAME[name], tuple(dims[:rank])))
        del dims[:rank]
    return tuple(found)


register(Primitive(USER, Kind.OPAQUE, lambda types, attrs: output_types(attrs), None))

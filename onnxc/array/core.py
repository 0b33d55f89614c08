"""The array that Python functions compute with, and `call`, by which every function of `onnxc.array_api` is made.

    def _scaled(b: Builder, x: Value, *, factor: float) -> Value:     # a rule: primitives out of values
        return b.mul(x, factor)

    def scaled(x: Array, factor: float) -> Array:
        return call(_scaled, x, name="scaled", factor=factor)

In a trace `call` emits what the rule builds; outside of one it compiles that for the shapes and dtypes at hand, keeps
the program, and runs it. A rule is a function of a module (no lambda or closure: the program is kept by the rule),
is given everything else that decides as `static` arguments (numbers, strings, None, dtypes, slices, and tuples, lists
and dicts of these), and may look at shapes (dims are ints, or `onnxc.ir.expr.Expr` in a trace with dynamic dims) and at
`b.known(value)`. It raises errors of `onnxc.errors`; the user's line is added to them here.

- `asarray(x)`: what is concrete (numpy's arrays and numbers) as an `Array`; an Array as it is; a dynamic size too.
- `known(x)`: the content as a numpy array, where it is known now: of concrete arrays, and of constants in a trace.
- `content(x, what, instead)`: as `known`, and a TraceError with the user's line where it is not: for functions whose
  results have shapes that depend on data (`nonzero`, `unique_values`).

A number of Python that is given to a jitted function becomes a traced array with `x.weak`, of int64, float64, bool or
complex128: in promotion it stands for a number of Python, so the other operand's dtype wins
(`array_api.add(float32_array, weak_float64)` is float32, as with a number of Python). What operators make of such
numbers alone is one too, and a dynamic size (`x.shape[0]`) beside an array.

Dtypes are numpy's (`np.dtype("float32")`); the device is `"cpu"`. Operators and methods of Array look their functions
up in `onnxc.array_api` by the names of the standard (`x + 1` is `array_api.add(x, 1)`); indexing is
`array_api.indexing.getitem(x, key)` and `array_api.indexing.setitem(x, key, value) -> Array`, which returns the new
array: `x[key] = value` puts it into the place of x.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from onnxc.array.eager import run_eagerly
from onnxc.array.sizes import Size, computed_of_sizes, sized, unsized, unsized_key
from onnxc.errors import InputError, TraceError
from onnxc.frontends.trace import Trace, current, user_line
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Expr, prod
from onnxc.ir.graph import Value
from onnxc.primitives.builder import constant_of
from onnxc.primitives.pairs import Complex, Number, known_pair, opened, pair

Rule = Callable[..., "Number | Sequence[Number]"]
_UFUNCS = {  # numpy's names of functions that the standard calls otherwise
    "power": "pow", "absolute": "abs", "invert": "bitwise_invert", "left_shift": "bitwise_left_shift",
    "right_shift": "bitwise_right_shift", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "conjugate": "conj",
}  # fmt: skip
_NUMBERS = (int, float, complex, np.ndarray, np.generic)
_SCALARS = (bool, int, float, complex, Expr, Size)


class Array:
    """An array: concrete, with elements (a numpy array), or traced, a value of the graph that is being made.

    Made by :func:`asarray` and the functions of `onnxc.array_api`. An array of a trace is of use as long as its trace
    is: elsewhere it is an error.
    """

    __slots__ = ("__weakref__", "_data", "_trace", "_value", "weak")
    __hash__ = None  # type: ignore[assignment]  # as == compares element by element

    _data: np.ndarray[Any, Any] | None
    _value: Value | None
    _trace: Trace | None
    weak: bool

    def __init__(self, *_: object, **__: object) -> None:
        raise InputError("arrays are made by onnxc.array_api.asarray, zeros, and so on")

    # ------------------------------------------------------------ facts

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""
        found: np.dtype[Any] = self._data.dtype if self._value is None else self._value.dtype.numpy  # type: ignore[union-attr]
        return found

    @property
    def shape(self) -> tuple[Any, ...]:
        """The sizes; dynamic ones in a trace are each an `onnxc.array.sizes.Size`, which stands for all calls'."""
        if self._trace is None:
            return self.dims
        return tuple([sized(d, self._trace) for d in self.dims])

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The sizes as the compiler has them: ints and, in a trace with dynamic dims, expressions."""
        found: tuple[Dim, ...] = self._data.shape if self._value is None else self._value.shape  # type: ignore[union-attr]
        return found

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.dims)

    @property
    def size(self) -> Any:
        """The number of elements."""
        return self._data.size if self._data is not None else sized(prod(self.dims), self._trace)  # type: ignore[arg-type]

    @property
    def device(self) -> str:
        """Where it is."""
        return "cpu"

    @property
    def is_traced(self) -> bool:
        """Whether it is a value of a graph that is being made."""
        return self._data is None

    @property
    def T(self) -> Array:
        """A matrix with its axes exchanged."""
        if self.ndim != 2:
            raise InputError(f"T is of arrays with two axes, not of {self.ndim}: use mT or permute_dims")
        return self.mT

    @property
    def mT(self) -> Array:
        """The last two axes exchanged."""
        return _api().matrix_transpose(self)  # type: ignore[no-any-return]

    def to_device(self, device: str, /, *, stream: None = None) -> Array:
        """Itself: there is one device."""
        if device != "cpu" or stream is not None:
            raise InputError(f"the only device is 'cpu', not {device!r}, and it has no streams")
        return self

    def astype(self, dtype: Any, /) -> Array:
        """Converted to another dtype."""
        return _api().astype(self, dtype)  # type: ignore[no-any-return]

    def reshape(self, *shape: Any) -> Array:
        """The same elements in another shape, given as a tuple or as several numbers."""
        whole = len(shape) == 1 and isinstance(shape[0], (tuple, list))
        return _api().reshape(self, tuple(shape[0]) if whole else shape)  # type: ignore[no-any-return]

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        return _api()._namespace(api_version)

    def __repr__(self) -> str:
        if self._data is None:
            return f"Array(traced {self._value.type if self._value is not None else '?'})"
        text = np.array2string(self._data, separator=", ", prefix="Array(")
        return f"Array({text}, dtype={self.dtype})"

    def __format__(self, spec: str) -> str:
        """As numpy: of an array without axes its number."""
        return format(self._scalar("a format", "return the array, and write it outside"), spec) if spec else str(self)

    # ------------------------------------------------------------ content

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements, as an array that is not to be written to."""
        return content(self, "numpy()", "compute with functions of onnxc.array_api")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        found = content(self, "a numpy function", "call functions of onnxc.array_api in the place of numpy's")
        return np.array(found, dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy's functions of elements, and its operators, are those of `onnxc.array_api`, where there are such."""
        name = _UFUNCS.get(ufunc.__name__, ufunc.__name__)
        function = getattr(_api(), name, None)
        if method != "__call__" or options or function is None:
            what = f"numpy's {ufunc.__name__}" + (f".{method}" if method != "__call__" else "")
            raise TypeError(f"{user_line()}: {what} of an onnxc array; compute with functions of onnxc.array_api")
        return function(*inputs)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[Any, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        data = content(self, "DLPack", "exchange arrays outside of the traced function")
        return data.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> Any:
        return content(self, "DLPack", "exchange arrays outside of the traced function").__dlpack_device__()

    def __bool__(self) -> bool:
        return bool(self._scalar("bool()", "use onnxc.cond (for `if`), onnxc.while_loop (for `while`) or where"))

    def __int__(self) -> int:
        return int(self._scalar("int()", "use astype, or make the number a static argument (static_argnums)"))

    def __float__(self) -> float:
        return float(self._scalar("float()", "use astype, or make the number a static argument (static_argnums)"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex()", "use astype, or make the number a static argument (static_argnums)"))

    def __index__(self) -> int:
        found = self._scalar("a Python index", "use onnxc.fori_loop (for `range`), or array_api.take (to index)")
        return operator.index(found)

    def __round__(self, digits: int | None = None) -> Any:
        return round(float(self), digits)

    def item(self) -> Any:
        """The only element, as a number of Python."""
        return self._scalar("item()", "compute with the array, or make the number a static argument").item()

    def _scalar(self, what: str, instead: str) -> np.ndarray[Any, Any]:
        found = content(self, what, instead)
        if found.ndim or found.size != 1:
            raise TypeError(f"{what} is of arrays without axes, not of the shape {found.shape}")
        return found

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of an array without axes")
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Array]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, key: Any, /) -> Array:
        return _indexing().getitem(self, unsized_key(key))  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any, /) -> None:
        self._become(_indexing().setitem(self, unsized_key(key), unsized(value)))

    def _become(self, new: Array) -> Array:
        """Takes the place of this array: of its own trace, or of none."""
        trace = current()
        if (self._trace if self.is_traced else None) is not trace:
            raise TraceError(
                f"{user_line()}: an array is written to that was made outside of the function that is being traced "
                f"(or of the body of a loop or a branch); return the new array instead"
            )
        if new.dims != self.dims or new.dtype != self.dtype:
            raise InputError(
                f"an array of {self.dtype} and shape {self.dims} cannot become {new.dtype}, {new.dims}, in place"
            )
        self._data, self._value, self._trace, self.weak = new._data, new._value, new._trace, new.weak
        return self


def _api() -> Any:
    return importlib.import_module("onnxc.array_api")


def _indexing() -> Any:
    return importlib.import_module("onnxc.array_api.indexing")


def _add_operators() -> None:
    """The operators, by the functions of the standard."""
    binary = {
        "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide",
        "mod": "remainder", "pow": "pow", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or",
        "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
    }  # fmt: skip
    compared = {
        "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal",
    }  # fmt: skip
    for name, function in (binary | compared).items():
        setattr(Array, f"__{name}__", _binary(f"__{name}__", function))
    for name, function in binary.items():
        setattr(Array, f"__r{name}__", _reflected(f"__r{name}__", function))
        setattr(Array, f"__i{name}__", _in_place(f"__i{name}__", function))
    for name, function in {"neg": "negative", "pos": "positive", "abs": "abs", "invert": "bitwise_invert"}.items():
        setattr(Array, f"__{name}__", _unary(f"__{name}__", function))


def _binary(name: str, function: str) -> Callable[[Array, Any], Any]:
    def method(self: Array, other: Any, /) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return _weak_of(getattr(_api(), function)(self, other), self, other)

    method.__name__ = name
    return method


def _reflected(name: str, function: str) -> Callable[[Array, Any], Any]:
    def method(self: Array, other: Any, /) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return _weak_of(getattr(_api(), function)(other, self), self, other)

    method.__name__ = name
    return method


def _in_place(name: str, function: str) -> Callable[[Array, Any], Any]:
    def method(self: Array, other: Any, /) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        found = _weak_of(getattr(_api(), function)(self, other), self, other)
        return found if self.weak else self._become(found)  # a number of Python does not change

    method.__name__ = name
    return method


def _unary(name: str, function: str) -> Callable[[Array], Any]:
    def method(self: Array, /) -> Any:
        return _weak_of(getattr(_api(), function)(self), self)

    method.__name__ = name
    return method


_OPERANDS = (Array, Expr, Size, *_NUMBERS)


def _weak_of(found: Array, *operands: Any) -> Array:
    """A result that counts as little as its operands, where all are numbers of Python, or sizes."""
    if operands[0].weak and all(x.weak if isinstance(x, Array) else type(x) in _SCALARS for x in operands):
        found.weak = True
    return found


_add_operators()


# ---------------------------------------------------------------- making arrays


def concrete(data: np.ndarray[Any, Any]) -> Array:
    """An array with these elements, which are not copied."""
    self = object.__new__(Array)
    self._data, self._value, self._trace, self.weak = data, None, None, False
    return self


def traced(value: Value, trace: Trace, weak: bool = False) -> Array:
    """An array that stands for a value of a trace; `weak`: it was given as a number of Python."""
    self = object.__new__(Array)
    self._data, self._value, self._trace, self.weak = None, value, trace, weak
    return self


def size(x: Expr, weak: bool = False) -> Array:
    """A dynamic size as an array of int64, without axes."""
    trace = current()
    if trace is None:
        raise TraceError(f"{user_line()}: a dynamic size ({x}) is used outside of the function that is traced")
    with trace.source("shape"):
        return traced(trace.builder.size_as(x, dtypes.int64), trace, weak)


def asarray(x: Any) -> Array:
    """An Array as it is; numpy's arrays and numbers, and Python's, as an Array of numpy's dtype for them; sizes.

    Raises:
        InputError: for elements of a dtype that ONNX does not have.
    """
    if isinstance(x, Array):
        return x
    if isinstance(x, (Size, Expr)):
        return size(unsized(x))
    data = elements(x)
    try:
        found = dtypes.from_numpy(data.dtype)
    except KeyError:
        raise InputError(f"an array of the dtype {data.dtype} cannot be computed with") from None
    if found is dtypes.string:
        what = "objects, or of integers that no dtype holds," if data.dtype == object else "strings"
        raise InputError(f"arrays of {what} cannot be computed with")
    return concrete(data if data.dtype.isnative else data.astype(data.dtype.newbyteorder("=")))


def elements(x: Any) -> np.ndarray[Any, Any]:
    """numpy's array of what is no Array. InputError for masked ones, whose mask numpy would drop without a word."""
    if isinstance(x, np.ma.MaskedArray):
        raise InputError("a masked array cannot be computed with; fill it (.filled), or pass .data and .mask")
    return np.asarray(x)


def known(x: Array) -> np.ndarray[Any, Any] | None:
    """The content, where it is known now: of concrete arrays, and of constants in a trace."""
    if x._data is not None:
        return x._data
    checked(x)
    assert x._value is not None
    if x.dtype.kind == "c":
        return known_pair(x._value)
    data = constant_of(x._value)
    if data is None and x._value.data is not None and x._value.data.dtype != object:
        data = x._value.data.astype(x.dtype)
    return data


def content(x: Array, what: str, instead: str) -> np.ndarray[Any, Any]:
    """The content. TraceError where it is not known yet.

    Args:
        what: what asks for it: `bool()`, `nonzero`.
        instead: what to do: "use onnxc.cond".
    """
    found = known(x)
    if found is None:
        value = x._value
        assert value is not None
        found = computed_of_sizes(value) if not value.rank else None
    if found is None:
        assert x._value is not None
        raise TraceError(
            f"{user_line()}: {what} asks for the content of a traced array ({x._value.type}), which is computed later; "
            f"{instead}"
        )
    return found


def checked(x: Array) -> Array:
    """A traced array that can be used here. TraceError where its trace has ended, or is another thread's."""
    trace = x._trace
    if trace is not None and (trace.ended or not trace.encloses(current())):
        assert x._value is not None
        raise TraceError(
            f"{user_line()}: a traced array ({x._value.type}{_made_at(x._value)}) is used outside of the function "
            f"(or the body of a loop, a branch) that it was traced in; return it from there instead"
        )
    return x


def _made_at(value: Value) -> str:
    if value.node is None or not value.node.origin:
        return ""
    source = value.node.origin[0]
    return f", made by {source.op_type} in {source.line}"


def value_of(x: Array, trace: Trace) -> Value:
    """The value of an array in a trace: of a concrete one a constant."""
    if x._data is not None:
        return trace.constant(x._data)
    checked(x)
    assert x._value is not None
    return x._value


# ---------------------------------------------------------------- calls


def call(rule: Rule, *arrays: Any, name: str = "", **static: Any) -> Any:
    """What a rule makes of arrays: an Array, or a tuple of Arrays where the rule returns several values.

    Args:
        rule: `rule(b: Builder, *values: Value, **static) -> Value | Sequence[Value]`: a function of a module. A complex
            array comes as a `Complex` of two values, and may be returned as such.
        arrays: Arrays, or what :func:`asarray` makes into such.
        name: what the user called, for errors and reports; default: the rule's name.
        static: what else decides; part of the key of the programs that are kept.

    Raises:
        TraceError: one of the arrays is of another trace.
        OnnxcError: what the rule raises, with the user's line.
    """
    given = [x if type(x) is Array else asarray(x) for x in arrays]
    name = name or rule.__name__.strip("_")
    trace = current()
    if trace is None:
        results = run_eagerly(rule, [_concrete(x) for x in given], name, static)
        return tuple(map(concrete, results)) if isinstance(results, tuple) else concrete(results)
    with trace.source(name):
        found = rule(trace.builder, *(opened(value_of(x, trace)) for x in given), **static)
    if isinstance(found, (Value, Complex)):
        return traced(pair(found), trace)
    return tuple(traced(pair(v), trace) for v in found)


def call_one(rule: Rule, *arrays: Any, name: str = "", **static: Any) -> Array:
    """As :func:`call`, of a rule that returns one value."""
    found = call(rule, *arrays, name=name, **static)
    assert isinstance(found, Array)
    return found


def _concrete(x: Array) -> np.ndarray[Any, Any]:
    if x._data is None:
        checked(x)
    assert x._data is not None
    return x._data

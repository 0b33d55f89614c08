"""The sizes that a traced function sees.

    @onnxc.jit(dynamic=True)
    def half(x):
        n = x.shape[0]                # a Size: it stands for the size in every call
        return x[: n // 2] if n % 2 == 0 else x

What integers make of it is a size again, and what floats make of it is a number that is computed later. A comparison,
and what needs a number of Python (`int(n)`, `range(n)`, `math.sqrt(n)`), is decided by the call that the function is
traced for, and noted (`onnxc.frontends.decisions`): other calls use the program only if they decide alike.

- `Size`: the class.
- `sized(dim, trace)`: one of a size as the compiler has it. `unsized(x)`: the latter, in what a user gives.
"""

from __future__ import annotations

import importlib
import math
import operator
import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np

from onnxc.errors import InputError, TraceError
from onnxc.frontends.decisions import IS_NEGATIVE, IS_ZERO, VALUE, answer
from onnxc.frontends.trace import Trace, current, user_line
from onnxc.ir.expr import Dim, Expr, Sym, floordiv, maximum, mod
from onnxc.ir.graph import Node, Value
from onnxc.primitives.base import Kind, lookup
from onnxc.primitives.interpret import evaluate_node

_MOST_FACTORS = 8  # of a power that is still a size
_MOST_STEPS = 256  # from sizes to a number that Python asks for
_STEPS = (Kind.POINTWISE, Kind.VIEW)
_OPERATORS = {  # of numpy's functions those that operators are: the methods of the left number and of the right one
    "add": ("__add__", "__radd__"), "subtract": ("__sub__", "__rsub__"), "multiply": ("__mul__", "__rmul__"),
    "divide": ("__truediv__", "__rtruediv__"), "floor_divide": ("__floordiv__", "__rfloordiv__"),
    "remainder": ("__mod__", "__rmod__"), "power": ("__pow__", "__rpow__"), "less": ("__lt__", "__gt__"),
    "less_equal": ("__le__", "__ge__"), "greater": ("__gt__", "__lt__"), "greater_equal": ("__ge__", "__le__"),
    "equal": ("__eq__", "__eq__"), "not_equal": ("__ne__", "__ne__"),
}  # fmt: skip
_FORMAT = re.compile(r"(.?[<>=^])?[-+ ]?z?#?0?(\d*)[,_]?(\.\d+)?[,_]?[bcdeEfFgGnosxX%]?")  # of a number


class Size:
    """A dynamic size in a trace: an integer that is 0 at least, or what was computed of such.

    Raises:
        TraceError: it is used outside of its trace; or asked for what only a run tells, as are sizes that depend on
            data, and all sizes of a model that is written for any of them (`onnxc.to_onnx`).
    """

    __slots__ = ("_trace", "expr")
    expr: Expr

    def __init__(self, expr: Expr, trace: Trace) -> None:
        self.expr, self._trace = expr, trace.root

    def __repr__(self) -> str:
        return repr(self.expr)

    def __format__(self, spec: str) -> str:
        """As text, whatever a number would be written like: as wide as it."""
        found = _FORMAT.fullmatch(spec)
        return format(repr(self), spec if found is None else f"{found[1] or ''}{found[2]}".replace("=", ">"))

    def __deepcopy__(self, memo: Any) -> Size:
        return self

    # ------------------------------------------------------------ what the call decides

    def _asked(self, question: str, of: Dim, what: str) -> int:
        self._check()
        try:
            return self._trace.decisions.ask(question, of, user_line())
        except KeyError:
            raise TraceError(
                f"{user_line()}: {what} asks for a dynamic size ({self}) that is not known while the function is "
                f"traced; use onnxc.cond (for `if`), onnxc.fori_loop (for `range`) or array_api.where, or leave its "
                f"axis out of dynamic"
            ) from None
        except ZeroDivisionError as error:
            raise InputError(f"{user_line()}: {of} divides by zero in this call", cause=error) from error

    def _check(self) -> None:
        here = current()
        if self._trace.ended or here is None or here.root is not self._trace:
            raise TraceError(
                f"{user_line()}: a dynamic size ({self}) is used outside of the function that is traced; return it "
                f"from there instead"
            )

    def __index__(self) -> int:
        return self._asked(VALUE, self.expr, "a number of Python")

    def __int__(self) -> int:
        return operator.index(self)

    __trunc__ = __floor__ = __ceil__ = __int__

    def __float__(self) -> float:
        return float(operator.index(self))

    def __complex__(self) -> complex:
        return complex(operator.index(self))

    def __hash__(self) -> int:
        return hash(operator.index(self))  # equal numbers have equal ones

    def __bool__(self) -> bool:
        return not self._asked(IS_ZERO, self.expr, "bool()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(operator.index(self), dtype)

    # ------------------------------------------------------------ comparisons

    def __eq__(self, other: object) -> Any:
        found = _plain(other)
        if found is None:
            return self._of_arrays("equal", self, other)
        if isinstance(found, float):
            if not found.is_integer():  # NaN and infinities too
                return False
            found = int(found)
        return bool(self._asked(IS_ZERO, self.expr - found, "a comparison"))

    def __ne__(self, other: object) -> Any:
        found = self.__eq__(other) if _plain(other) is not None else self._of_arrays("not_equal", self, other)
        return not found if isinstance(found, bool) else found

    def __lt__(self, other: Any) -> Any:
        return self._compared("less", other, lambda a, b: self._is_less(a, b))

    def __ge__(self, other: Any) -> Any:
        return self._compared("greater_equal", other, lambda a, b: b == b and not self._is_less(a, b))

    def __gt__(self, other: Any) -> Any:
        return self._compared("greater", other, lambda a, b: self._is_less(b, a))

    def __le__(self, other: Any) -> Any:
        return self._compared("less_equal", other, lambda a, b: b == b and not self._is_less(b, a))

    def _compared(self, name: str, other: Any, how: Callable[[Any, Any], bool]) -> Any:
        found = _plain(other)
        return self._of_arrays(name, self, other) if found is None else how(self.expr, found)

    def _is_less(self, a: Any, b: Any) -> bool:
        """a < b, of which one may be a float."""
        if isinstance(a, float) or isinstance(b, float):
            if not math.isfinite(a if isinstance(a, float) else b):
                return bool((a if isinstance(a, float) else 0) < (b if isinstance(b, float) else 0))
            a, b = (math.floor(a) if isinstance(a, float) else a), (math.ceil(b) if isinstance(b, float) else b)
        return bool(self._asked(IS_NEGATIVE, a - b, "a comparison"))

    # ------------------------------------------------------------ arithmetic

    def _made(self, name: str, how: Callable[[Any, Any], Dim], left: Any, right: Any) -> Any:
        """A size where both are integers, else what the function of this name makes of arrays."""
        a, b = _plain(left), _plain(right)
        if a is None or b is None or isinstance(a, float) or isinstance(b, float):
            return self._of_arrays(name, left, right)
        return sized(how(a, b), self._trace)

    def _of_arrays(self, name: str, left: Any, right: Any) -> Any:
        """What a function of `onnxc.array_api` makes of it: a number that counts as one of Python beside such."""
        other = right if left is self else left
        core = importlib.import_module("onnxc.array.core")
        if not isinstance(other, (core.Array, Size, int, float, complex, np.ndarray, np.generic)):
            return NotImplemented
        self._check()
        pair = [core.size(x.expr, weak=True) if isinstance(x, Size) else x for x in (left, right)]
        found = getattr(importlib.import_module("onnxc.array_api"), name)(*pair)
        found.weak = type(other) in (Size, bool, int, float, complex) or (isinstance(other, core.Array) and other.weak)
        return found

    def __divmod__(self, other: Any) -> Any:
        return operator.floordiv(self, other), operator.mod(self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return operator.floordiv(other, self), operator.mod(other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._of_arrays("divide", self, _as_divided(other))

    def __rtruediv__(self, other: Any) -> Any:
        return self._of_arrays("divide", _as_divided(other), self)

    def __pow__(self, other: Any) -> Any:
        if type(other) is int and 0 <= other <= _MOST_FACTORS:
            return sized(math.prod([self.expr] * other), self._trace)
        return self._of_arrays("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._of_arrays("pow", other, self)

    def __neg__(self) -> Any:
        return sized(-self.expr, self._trace)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return sized(maximum(self.expr, -self.expr), self._trace)

    def __round__(self, digits: int | None = None) -> Any:
        return self if digits is None or digits >= 0 else round(int(self), digits)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """numpy's operators of integers are those of sizes; other functions get the number that it is in this call."""
        core = importlib.import_module("onnxc.array.core")
        inputs = tuple([x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in inputs])
        if any(isinstance(x, (core.Array, np.ndarray)) for x in inputs):
            given = [core.size(x.expr, weak=True) if isinstance(x, Size) else x for x in inputs]
            first = next(x for x in given if isinstance(x, core.Array))
            return first.__array_ufunc__(ufunc, method, *given, **options)
        methods = _OPERATORS.get(ufunc.__name__) if method == "__call__" and not options else None
        if methods is not None:
            left, right = inputs
            own = left if isinstance(left, Size) else right
            found = getattr(own, methods[own is not left])(right if own is left else left)
            if found is not NotImplemented:
                return found
        given = [operator.index(x) if isinstance(x, Size) else x for x in inputs]
        return getattr(ufunc, method)(*given, **options)


def _add_operators() -> None:
    """Those of integers, by what they are called and the function of the standard that is the same of arrays; and those
    of bits, which are of the number that the size is in the call, and so not open.
    """
    of_integers: dict[str, tuple[str, Callable[[Any, Any], Dim]]] = {
        "add": ("add", operator.add),
        "sub": ("subtract", operator.sub),
        "mul": ("multiply", operator.mul),
        "floordiv": ("floor_divide", lambda a, b: floordiv(a, _divisor(b))),
        "mod": ("remainder", lambda a, b: mod(a, _divisor(b))),
    }
    for name, (function, how) in of_integers.items():
        setattr(Size, f"__{name}__", _operator(function, how, False))
        setattr(Size, f"__r{name}__", _operator(function, how, True))
    for name in ("lshift", "rshift", "and", "or", "xor"):
        for method in (f"__{name}__", f"__r{name}__"):
            setattr(Size, method, _of_bits(method))


def _operator(function: str, how: Callable[[Any, Any], Dim], reflected: bool) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any, /) -> Any:
        return self._made(function, how, *((other, self) if reflected else (self, other)))

    return method


def _of_bits(name: str) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any, /) -> Any:
        return getattr(int(self), name)(other)

    return method


def _divisor(d: Dim) -> Dim:
    """A size that is divided by: not 0 in this call. Where only a run tells, the run divides."""
    if is_zero(d, "a division", unknown=False):
        raise ZeroDivisionError("division by zero")
    return d


_add_operators()


def _plain(x: object) -> Any:
    """A number as sizes are compared and computed with: an expression, an int or a float of Python; None for others."""
    if isinstance(x, Size):
        return x.expr
    if isinstance(x, (Expr, int)):
        return x
    if isinstance(x, Integral):
        return int(x)
    return float(x) if isinstance(x, Real) else None


def computed_of_sizes(value: Value) -> np.ndarray[Any, Any] | None:
    """The content of a number that is computed of dynamic sizes alone (`n * 0.5`): the call decides. None of others."""
    trace, nodes = current(), _between(value)
    if trace is None or nodes is None:
        return None
    asked, found = _Asked(trace), dict[int, np.ndarray[Any, Any]]()
    try:
        for node in nodes:
            results = evaluate_node(node, [found[v.id] for v in node.operands], asked)
            found |= {v.id: r for v, r in zip(node.outputs, results, strict=True)}
    except KeyError:  # only a run tells
        return None
    return found[value.id]


def _as_divided(x: Any) -> Any:
    """An operand of a quotient: numpy's integers are floats there."""
    return np.float64(x) if isinstance(x, np.integer) else x


class _Asked(dict[str, int]):
    """The sizes that symbols stand for, by name: the call decides when one is looked at."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __missing__(self, name: str) -> int:
        return self._trace.decisions.ask(VALUE, Sym(name), user_line())


def _between(value: Value) -> list[Node] | None:
    """The nodes that make a number out of constants and sizes, in their order; None where there is more behind it."""
    found: dict[int, Node] = {}
    rest = [value]
    while rest:
        node = rest.pop().node
        if node is None or node.regions or len(found) > _MOST_STEPS or lookup(node.op).kind not in _STEPS:
            return None
        if id(node) not in found:
            found[id(node)] = node
            rest += node.operands
    return sorted(found.values(), key=lambda node: node.outputs[0].id)  # values are numbered as they are made


def is_equal(a: Dim, b: Dim, what: str) -> bool:
    """Whether sizes are equal: if they may be or not, the call decides. TraceError where that is not known."""
    return is_zero(a - b, what)


def is_zero(d: Dim, what: str, unknown: bool | None = None) -> bool:
    """Whether a size is 0: as :func:`is_negative` is of whether it is negative."""
    return bool(_decided(IS_ZERO, d, what, unknown))


def is_negative(d: Dim, what: str, unknown: bool | None = None) -> bool:
    """Whether a size is negative: if it may be either, the call decides. Where that is not known, what is said for it,
    or a TraceError.
    """
    return bool(_decided(IS_NEGATIVE, d, what, unknown))


def value_of_size(d: Dim, what: str) -> int:
    """A size as a number, for what has to be known when it is traced: the call decides."""
    return _decided(VALUE, d, what)


def _decided(question: str, d: Dim, what: str, unknown: bool | None = None) -> int:
    if not isinstance(d, Expr):
        return answer(question, operator.index(d))
    trace = current()
    if unknown is None:
        assert trace is not None
        return Size(d, trace)._asked(question, d, what)
    try:
        return unknown if trace is None else trace.decisions.ask(question, d, user_line())
    except KeyError:
        return unknown


def sized(d: Dim, trace: Trace) -> int | Size:
    """A size as the user of a trace sees it: an int, or a Size."""
    return Size(d, trace) if isinstance(d, Expr) else d


def unsized(x: Any) -> Any:
    """What a user gives to a function, with sizes as the compiler has them: inside of tuples, lists and slices too."""
    kind = type(x)
    if kind is Size:
        x._check()
        return x.expr
    if kind is tuple or kind is list:
        return kind([unsized(v) for v in x])
    if kind is slice and any(type(v) is Size for v in (x.start, x.stop, x.step)):
        return slice(unsized(x.start), unsized(x.stop), unsized(x.step))
    return x


def unsized_key(key: Any) -> Any:
    """As :func:`unsized`, for an index. Its lists become arrays of numpy, for which the call decides."""
    parts = [x if type(x) is list else unsized(x) for x in (key if type(key) is tuple else (key,))]
    return tuple(parts) if type(key) is tuple else parts[0]

"""PyTorch's symbolic sizes (sympy) as expressions of the graph IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import sympy
import torch

from onnxc.errors import UnsupportedError
from onnxc.frontends.torch_fx_table import dtype_of
from onnxc.host.registry import NO_SIZE
from onnxc.ir import dtypes
from onnxc.ir.expr import Dim, Expr, Symbol, ceildiv, floordiv, is_nonnegative, maximum, minimum, mod, of, prod, symbols
from onnxc.ir.graph import Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import RunTime

_MOST = 1 << 40  # a bound beyond which is none
_FINEST = 1 << 10  # the greatest denominator of a factor of sizes
_FLOATS = {"IntTrueDiv": "div", "FloatTrueDiv": "div", "FloatPow": "pow", "PowByNatural": "pow"}
_WHOLE = {"Add": "add", "Mul": "mul", "PowByNatural": "pow", "Pow": "pow", "Max": "max", "Min": "min", "Abs": "abs"}
_ROUNDED = ("TruncToInt", "FloorToInt", "CeilToInt")

_BINARY: dict[str, Callable[[Dim, Dim], Dim]] = {
    "FloorDiv": floordiv, "CleanDiv": floordiv, "Mod": mod, "PythonMod": mod, "CeilDiv": ceildiv,
    "Max": maximum, "Min": minimum,
}  # fmt: skip


class Sizes:
    """One symbol here for each of PyTorch's, with the range that PyTorch knows.

    Attributes:
        symbols: ours by PyTorch's.
        parts: of each of PyTorch's that no op here gives out: its sign, and our symbol for what it is with that sign,
            or zero. One that may be negative (an argument of the function) has two, and is their difference.
        decided: those of ours that steps on the host give out.
        numbers: symbols that are no sizes: numbers that data decides.
    """

    def __init__(self, run_time: RunTime | None = None) -> None:
        self.run_time = RunTime() if run_time is None else run_time
        self.symbols: dict[sympy.Symbol, Dim] = {}
        self.parts: list[tuple[sympy.Symbol, int, Expr]] = []
        self.decided: set[Expr] = set()
        self.numbers: dict[sympy.Symbol, Value] = {}

    def bind(self, b: Builder, expected: Sequence[Any], found: Sequence[Any]) -> None:
        """Takes PyTorch's symbols in the sizes of results for what these are here; a number for one that is read.

        The body of a loop may be built more than once: then each time.
        """
        bound: dict[sympy.Symbol, Dim] = {}
        for fake, value in zip(expected, found, strict=True):
            if isinstance(fake, torch.Tensor) and value is not None:
                for size, dim in zip(fake.shape, value.shape, strict=True):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        bound.setdefault(size.node.expr, dim)
            elif isinstance(fake, torch.SymInt) and _range(fake.node.expr, fake.node.shape_env)[0] is not None:
                low, high = _range(fake.node.expr, fake.node.shape_env)
                bound[fake.node.expr] = _checked_size(b, value, low, high)
            elif isinstance(fake, torch.SymInt | torch.SymFloat):
                to = dtypes.int64 if isinstance(fake, torch.SymInt) else dtypes.float64
                self.numbers[fake.node.expr] = b.cast(b.reshape(value, ()), to)
        self.symbols.update(bound)
        self.decided.update(dim for dim in bound.values() if isinstance(dim, Expr))

    def dim(self, size: int | torch.SymInt) -> Dim:
        """A size. UnsupportedError for one that is no polynomial with divisions, or that data decides."""
        if isinstance(size, int):
            return size
        return self._convert(size.node.expr, size.node.shape_env)

    def number(self, b: Builder, x: torch.SymInt | torch.SymFloat) -> Value:
        """A number that sizes decide: int64, or float64, in which Python computes. UnsupportedError for other functions
        than `_whole` and `_number` have.
        """
        convert = self._whole if isinstance(x, torch.SymInt) else self._number
        return convert(b, x.node.expr, x.node.shape_env)

    def type(self, tensor: torch.Tensor) -> TensorType:
        """The type of a (fake) tensor on the CPU. UnsupportedError for one that has none here."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedError(
                f"a tensor of {tensor.layout} on {tensor.device}: dense ones on the CPU are supported"
            )
        return TensorType(dtype_of(tensor.dtype), tuple(self.dim(d) for d in tensor.shape))

    def symbol(self, key: str) -> sympy.Symbol:
        """PyTorch's symbol behind one of ours."""
        return next(s for s, d in self.symbols.items() if key in {found.key for found in symbols(d)})

    def _convert(self, e: Any, env: Any) -> Dim:
        if e.is_Integer:
            return int(e)
        if e.is_Symbol:
            return self._symbol(e, env)
        name = type(e).__name__
        if name in _ROUNDED:
            return self._rounded(name, e.args[0], env)
        args = [self._convert(a, env) for a in e.args] if not e.is_Pow else []
        if e.is_Add:
            total: Dim = 0
            for a in args:
                total = total + a
            return total
        if e.is_Mul:
            return prod(args)
        if e.is_Pow and e.exp.is_Integer and 0 < int(e.exp) <= 8:
            return prod([self._convert(e.base, env)] * int(e.exp))
        if name == "ModularIndexing":
            x, by, modulus = args
            return mod(floordiv(x, by), modulus)
        if name in _BINARY and args:
            result = args[0]
            for a in args[1:]:
                result = _BINARY[name](result, a)
            return result
        raise UnsupportedError(f"a size {e}")

    def _number(self, b: Builder, e: Any, env: Any) -> Value:
        if e.is_number:
            return b.scalar(float(e), dtypes.float64)
        if e in self.numbers:
            return b.cast(self.numbers[e], dtypes.float64)
        name = type(e).__name__
        if name == "ToFloat" or e.is_integer:
            return b.cast(self._whole(b, e.args[0] if name == "ToFloat" else e, env), dtypes.float64)
        if name in _FLOATS or e.is_Add or e.is_Mul:
            result, *rest = (self._number(b, a, env) for a in e.args)
            for a in rest:
                result = b.binary("add" if e.is_Add else "mul" if e.is_Mul else _FLOATS[name], result, a)
            return result
        if name == "OpaqueUnaryFn_sqrt":
            return b.sqrt(self._number(b, e.args[0], env))
        raise UnsupportedError(f"a number {e} that sizes decide")

    def _whole(self, b: Builder, e: Any, env: Any) -> Value:
        """A whole number, computed from sizes where it is none that a size can be."""
        if e in self.numbers:
            return b.cast(self.numbers[e], dtypes.int64)
        name = type(e).__name__
        try:
            return b.size_as(self._convert(e, env), dtypes.int64)
        except UnsupportedError:
            if name not in (*_WHOLE, *_ROUNDED):
                raise
        if name in _ROUNDED:
            x = self._number(b, e.args[0], env)
            if name == "FloorToInt":
                x = b.floor(x)
            elif name == "CeilToInt":
                x = b.neg(b.floor(b.neg(x)))
            return b.cast(x, dtypes.int64)
        if name == "Abs":
            return b.abs(self._whole(b, e.args[0], env))
        result, *rest = (self._whole(b, a, env) for a in e.args)
        for a in rest:
            result = b.binary(_WHOLE[name], result, a)
        return result

    def _rounded(self, name: str, e: Any, env: Any) -> Dim:
        """A number rounded to a size, as of an image that grows by 1.5."""
        above, below = self._ratio(e, env)
        if name == "TruncToInt" and not (isinstance(above, int) or is_nonnegative(above)):
            raise UnsupportedError(f"a size {name}({e}), whose sign is not known")
        return ceildiv(above, below) if name == "CeilToInt" else floordiv(above, below)

    def _ratio(self, e: Any, env: Any) -> tuple[Dim, int]:
        """A float as a quotient, where PyTorch computes it without rounding: sizes times eighths, say."""
        if type(e).__name__ == "ToFloat":
            return self._convert(e.args[0], env), 1
        if e.is_Integer or e.is_Float:
            exact = Fraction(float(e))
            if exact.denominator <= _FINEST and abs(exact.numerator) < _MOST:
                return exact.numerator, exact.denominator
        if e.is_Mul or e.is_Add:
            above, below = self._ratio(e.args[0], env)
            for a in e.args[1:]:
                n, d = self._ratio(a, env)
                above, below = (above * n if e.is_Mul else above * d + n * below), below * d
            if below <= _FINEST:
                return above, below
        raise UnsupportedError(f"a size of {e}, which is rounded")

    def _symbol(self, s: sympy.Symbol, env: Any) -> Dim:
        if s not in self.symbols:
            low, high = _range(s, env)
            if low is None:
                raise UnsupportedError(f"a number {s} that data decides, and that may be negative")
            least, _ = _ends(s, env)
            found: Dim = 0
            if high is None or high > 0 or low == high == 0:
                found = found + self._part(s, 1, low, high)
            if least is None or least < 0:
                most = None if least is None else -least
                found = found - self._part(s, -1, 0 if high is None else max(-high, 0), most)
            self.symbols[s] = found
        return self.symbols[s]

    def _part(self, s: sympy.Symbol, sign: int, low: int, high: int | None) -> Expr:
        taken = self.run_time.symbols
        taken.append(Symbol(f"s{self.run_time.first + len(taken)}", low, high))
        self.parts.append((s, sign, of(taken[-1])))
        return self.parts[-1][2]


def _range(s: sympy.Symbol, env: Any) -> tuple[int | None, int | None]:
    """The least and the greatest value of a size (None: no greatest); no least one of what may be negative."""
    low, high = _ends(s, env)
    if (low is None or low < 0) and (s not in env.var_to_range or str(s).startswith("u")):
        return None, None
    return max(low or 0, 0), high


def _ends(s: sympy.Symbol, env: Any) -> tuple[int | None, int | None]:
    """The range that PyTorch knows of a number; None: no bound."""
    found = env.var_to_range.get(s)
    return (None, None) if found is None else (_bound(found.lower), _bound(found.upper))


def _checked_size(b: Builder, value: Value, low: int | None, high: int | None) -> Dim:
    """A size that data decides, read at run time; an error of the run where it is not in the range that the module's
    code asked for.
    """
    value = b.cast(b.reshape(value, (1,)), dtypes.int64)
    fits = b.and_(b.le(low or 0, value), b.le(value, _MOST if high is None else high))
    return b.extents(b.where(fits, value, NO_SIZE), "a number that is a size", "it is not in its range")[0]


def _bound(v: Any) -> int | None:
    try:
        n = int(v)
    except (TypeError, ValueError, OverflowError, AttributeError):  # infinities of PyTorch's own
        return None
    return n if abs(n) < _MOST else None

"""Integer expressions: the sizes of dims and the indices of loops.

An expression is a polynomial with integer coefficients over *atoms*: symbols (a dynamic dim, a loop variable, an
index read from a tensor) and the non-polynomial operations `//`, `%`, `max` and `min` of two expressions. It is kept
in a canonical form, so that equal polynomials are equal objects, and it is simplified with the known range of each
symbol: `(64*i + j) // 64` is `i` where `0 <= j < 64`. Constants are plain Python ints, so a static graph never
meets this class.

>>> s, i, j = Sym("s"), index("i", 12), index("j", 64)
>>> (s * 64 + 128) // 64
s + 2
>>> (i * 64 + j) // 64, (i * 64 + j) % 64
(i, j)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from numbers import Integral
from typing import Union

from onnxc.errors import LimitError

Dim = Union[int, "Expr"]
Monomial = tuple["Atom", ...]

# An expression may not grow beyond these: a model can multiply a size by itself again and again.
MAX_TEXT, MAX_TERMS, MAX_DEGREE, MAX_COEFFICIENT = 4000, 512, 48, 1 << 62


class Atom:
    """A symbol or a non-polynomial operation; compared by its text, which is unique."""

    __slots__ = ("key",)
    key: str

    def __init__(self, key: str) -> None:
        self.key = key

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Atom) and self.key == other.key

    def __lt__(self, other: Atom) -> bool:
        return self.key < other.key

    def __repr__(self) -> str:
        return self.key


class Symbol(Atom):
    """An unknown integer, at least `lo` and, where `hi` is given, at most `hi`."""

    __slots__ = ("hi", "lo")

    def __init__(self, name: str, lo: int = 0, hi: Dim | None = None) -> None:
        super().__init__(name)
        self.lo = lo
        self.hi = hi


class Call(Atom):
    """`floordiv`, `mod`, `max` or `min` of two expressions."""

    __slots__ = ("args", "ceiling", "excess", "op", "range")

    def __init__(self, op: str, a: Dim, b: Dim) -> None:
        sign = {"floordiv": "//", "mod": "%"}.get(op)
        # Once they have been asked for: of calls inside calls they would be computed again and again.
        self.range: tuple[int | None, int | None] | None = None
        self.ceiling: tuple[Dim | None] | None = None
        self.excess: tuple[Dim, int, Dim] | None = None
        super().__init__(f"({_wrap(a)} {sign} {_wrap(b)})" if sign else f"{op}({a}, {b})")
        if len(self.key) > MAX_TEXT:
            raise LimitError(f"a size is too complicated an expression: {self.key[:80]}...")
        self.op = op
        self.args = (a, b)


def _wrap(d: Dim) -> str:
    if isinstance(d, int) or (len(d.terms) == 1 and d.terms[0][1] == 1 and len(d.terms[0][0]) == 1):
        return repr(d)
    return f"({d!r})"


class Expr:
    """A polynomial over atoms that is not a constant. Immutable."""

    __slots__ = ("_hash", "_symbols", "terms")
    terms: tuple[tuple[Monomial, int], ...]

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)
        self._symbols: frozenset[Symbol] | None = None  # once they have been asked for

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Expr):
            return NotImplemented  # an array knows what to do
        return self._hash == other._hash and self.terms == other.terms

    # An operand of another library's: it may know what to do.
    def __add__(self, other: Dim) -> Dim:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        acc = dict(self.terms)
        for mono, coef in _terms(other):
            acc[mono] = acc.get(mono, 0) + coef
        return _make(acc)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return Expr(tuple((m, -c) for m, c in self.terms))

    def __sub__(self, other: Dim) -> Dim:
        return self + (-other)

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            return Expr(tuple((m, c * other) for m, c in self.terms)) if other else 0
        if not isinstance(other, Expr):
            return NotImplemented
        acc: dict[Monomial, int] = {}
        for ma, ca in self.terms:
            for mb, cb in other.terms:
                mono = tuple(sorted(ma + mb))
                acc[mono] = acc.get(mono, 0) + ca * cb
        return _make(acc)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return floordiv(self, other)

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return mod(self, other)

    def __rmod__(self, other: Dim) -> Dim:
        return mod(other, self)

    def __repr__(self) -> str:
        parts = []
        for mono, coef in self.terms:
            factors = [repr(a) for a in mono]
            if abs(coef) != 1 or not mono:
                factors.insert(0, str(abs(coef)))
            parts.append(("- " if coef < 0 else "+ ") + "*".join(factors))
        text = " ".join(parts)
        return text[2:] if text.startswith("+ ") else "-" + text[2:]

    def atoms(self) -> tuple[Atom, ...]:
        """The atoms that stand in the polynomial itself (not those inside a Call), in its order."""
        return tuple(dict.fromkeys(a for mono, _ in self.terms for a in mono))

    def symbols(self) -> frozenset[Symbol]:
        """Every symbol, also inside calls."""
        if self._symbols is None:
            found: set[Symbol] = set()
            for mono, _ in self.terms:
                for atom in mono:
                    if isinstance(atom, Symbol):
                        found.add(atom)
                    elif isinstance(atom, Call):
                        for arg in atom.args:
                            found |= symbols(arg)
            self._symbols = frozenset(found)
        return self._symbols


_OPERANDS = (int, Expr, Integral)  # numpy's integers are such


def _key(item: tuple[Monomial, int]) -> tuple[int, tuple[str, ...]]:
    return (-len(item[0]), tuple(a.key for a in item[0]))


def _make(acc: Mapping[Monomial, int]) -> Dim:
    items = [(m, c) for m, c in acc.items() if c]
    if len(items) > MAX_TERMS or any(len(m) > MAX_DEGREE for m, _ in items):
        raise LimitError(f"a size is too complicated an expression: of {len(items)} terms, or of a high degree")
    if any(abs(c) > MAX_COEFFICIENT for m, c in items if m):
        raise LimitError("a size is an expression with a factor beyond 2**62")
    if not items:
        return 0
    if len(items) == 1 and not items[0][0]:
        return items[0][1]
    if len(items) > 1:
        items.sort(key=_key)
        return _with_one_excess(items)
    return Expr(tuple(items))


def _with_one_excess(items: list[tuple[Monomial, int]]) -> Dim:
    """A sum of sorted terms, in which calls that differ by a polynomial are one: `max(x, 0) - max(-x, 0)` is x.

    Padding that may be negative is spelled so: the padding, less what is cut off.
    """
    found: dict[tuple[Monomial, Dim], tuple[Call, Monomial, int]] = {}
    for mono, coef in items:
        call = next((a for a in mono if isinstance(a, Call) and a.op in ("max", "min")), None)
        if call is None:
            continue
        rest = _cancel(mono, (call,)) or ()
        other, *_ = place = found.setdefault((rest, _excess(call)[2]), (call, mono, coef))
        if other is not call:  # the longer one becomes the other, which it may hold
            long, short = ((call, mono, coef), other) if len(call.key) >= len(other.key) else (place, call)
            base, sign, _ = _excess(long[0])
            short_base, short_sign, _ = _excess(short)
            same = base + sign * short_sign * (of(short) - short_base)
            return _make({m: c for m, c in items if m != long[1]}) + _make({rest: long[2]}) * same
    return Expr(tuple(items))


def _excess(call: Call) -> tuple[Dim, int, Dim]:
    """A `max` or `min` as base + sign * max(over, 0), where the first term of `over` is positive."""
    if call.excess is None:
        a, b = call.args
        over = a - b
        turned = isinstance(over, Expr) and over.terms[0][1] < 0
        base = b if (call.op == "max") != turned else a
        call.excess = base, 1 if call.op == "max" else -1, -over if turned else over
    return call.excess


def _terms(d: Dim) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(d, Expr):
        return d.terms
    return (((), int(d)),) if d else ()


def of(atom: Atom) -> Expr:
    """The expression that is just this atom."""
    return Expr((((atom,), 1),))


def Sym(name: str, lo: int = 0, hi: Dim | None = None) -> Expr:
    """A symbol as an expression: a dynamic dim is at least 0."""
    return of(Symbol(name, lo, hi))


def index(name: str, extent: Dim) -> Expr:
    """A loop variable that runs from 0 to extent - 1."""
    return of(Symbol(name, 0, extent - 1))


_NO_SYMBOLS: frozenset[Symbol] = frozenset()


def symbols(d: Dim) -> frozenset[Symbol]:
    """Every symbol of an expression; none for an int."""
    return d.symbols() if isinstance(d, Expr) else _NO_SYMBOLS


def prod(dims: Iterable[Dim]) -> Dim:
    """The product; 1 for no dims."""
    one: Dim = 1
    return reduce(lambda a, b: a * b, dims, one)


def substitute(d: Dim, values: Mapping[Symbol, Dim]) -> Dim:
    """The expression with symbols replaced, simplified again."""
    if isinstance(d, int) or not (d.symbols() & values.keys()):
        return d
    total: Dim = 0
    for mono, coef in d.terms:
        term: Dim = coef
        for atom in mono:
            term = term * _substitute_atom(atom, values)
        total = total + term
    return total


_APPLY = {}


def _substitute_atom(atom: Atom, values: Mapping[Symbol, Dim]) -> Dim:
    if isinstance(atom, Symbol):
        return values.get(atom, of(atom))
    assert isinstance(atom, Call)
    a, b = (substitute(x, values) for x in atom.args)
    result: Dim = _APPLY[atom.op](a, b)
    return result


def evaluate(d: Dim, values: Mapping[str, int]) -> int:
    """The number that the expression has where each symbol (by name) has the given value."""
    if isinstance(d, int):
        return d
    known = {s: values[s.key] for s in d.symbols()}
    result = substitute(d, known)
    assert isinstance(result, int), f"{d} did not evaluate"
    return result


def coefficient(e: Dim, s: Symbol) -> Dim | None:
    """The factor of a symbol in an expression that is linear in it; None where it is not."""
    if isinstance(e, int):
        return 0
    total: Dim = 0
    for mono, coef in e.terms:
        found = [a for a in mono if s in symbols(of(a))]
        if not found:
            continue
        if found != [s]:
            return None
        rest: Dim = coef
        for a in mono:
            if a != s:
                rest = rest * of(a)
        total = total + rest
    return total


# ---------------------------------------------------------------- ranges


def bounds(d: Dim) -> tuple[int | None, int | None]:
    """Least and greatest value, as far as the symbols' own ranges tell; None is unknown."""
    if isinstance(d, int):
        return d, d
    lo: int | None = 0
    hi: int | None = 0
    for mono, coef in d.terms:
        tl, th = _mono_bounds(mono)
        if coef < 0:
            tl, th = th, tl
        lo = None if lo is None or tl is None else lo + coef * tl
        hi = None if hi is None or th is None else hi + coef * th
    return lo, hi


def _mono_bounds(mono: Monomial) -> tuple[int | None, int | None]:
    lo: int | None = 1
    hi: int | None = 1
    for atom in mono:
        al, ah = _atom_bounds(atom)
        if al is None or al < 0 or lo is None:  # signs unknown: give up on this product unless it is a single atom
            return (al, ah) if len(mono) == 1 else (None, None)
        lo, hi = lo * al, None if hi is None or ah is None else hi * ah
    return lo, hi


def _atom_bounds(atom: Atom) -> tuple[int | None, int | None]:
    if isinstance(atom, Symbol):
        return atom.lo, bounds(atom.hi)[1] if atom.hi is not None else None
    assert isinstance(atom, Call)
    if atom.range is None:
        atom.range = _call_bounds(atom)
    return atom.range


def _call_bounds(atom: Call) -> tuple[int | None, int | None]:
    (al, ah), (bl, bh) = (bounds(x) for x in atom.args)
    if atom.op == "mod":
        return 0, bh - 1 if bh is not None else None
    if atom.op == "floordiv":
        if bl is None or bl <= 0:
            return (0 if al is not None and al >= 0 else None), None
        low = None if al is None else (al // bl if al < 0 else (al // bh if bh else 0))
        return low, None if ah is None else (ah // bl if ah >= 0 else -1)
    if atom.op == "max":
        lows = [x for x in (al, bl) if x is not None]
        return max(lows) if lows else None, None if ah is None or bh is None else max(ah, bh)
    highs = [x for x in (ah, bh) if x is not None]
    return None if al is None or bl is None else min(al, bl), min(highs) if highs else None


def upper(d: Dim) -> Dim | None:
    """An upper bound free of loop variables: each symbol that has a `hi` is replaced by it. None where unknown."""
    if isinstance(d, int):
        return d
    total: Dim = 0
    for mono, coef in d.terms:
        if len(mono) > 1 and not all(_is_nonnegative_atom(a) for a in mono):
            return None  # a greater factor need not make a greater product
        term: Dim = coef
        for atom in mono:
            bound = _upper_atom(atom) if coef > 0 else _lower_atom(atom)
            if bound is None:
                return None
            term = term * bound
        total = total + term
    return total


def _is_nonnegative_atom(atom: Atom) -> bool:
    lo, _ = _atom_bounds(atom)
    return lo is not None and lo >= 0


def _upper_atom(atom: Atom) -> Dim | None:
    if isinstance(atom, Symbol):
        return of(atom) if atom.hi is None else upper(atom.hi)
    assert isinstance(atom, Call)
    if atom.ceiling is None:
        atom.ceiling = (_call_ceiling(atom),)
    return atom.ceiling[0]


def _call_ceiling(atom: Call) -> Dim | None:
    a, b = atom.args
    if atom.op == "floordiv" and isinstance(b, int) and b > 0:
        top = upper(a)
        return None if top is None else floordiv(top, b)
    return _atom_bounds(atom)[1]


def _lower_atom(atom: Atom) -> Dim | None:
    if isinstance(atom, Symbol):
        return of(atom) if atom.hi is None else atom.lo
    return _atom_bounds(atom)[0]


def is_nonnegative(d: Dim) -> bool:
    """True where d >= 0 is certain."""
    try:
        return _is_nonnegative(d, 3)
    except LimitError:  # what would follow from has factors that are too large
        return False


def _is_nonnegative(d: Dim, depth: int) -> bool:
    lo, _ = bounds(d)
    return (lo is not None and lo >= 0) or (depth > 0 and isinstance(d, Expr) and _relaxed(d, depth - 1))


def _relaxed(d: Expr, depth: int) -> bool:
    """Whether d >= 0 follows from x - (n - 1) <= n * (x // n) <= x, as in `s - s // 2`, from min(x, y) <= x, as in
    `s - min(s, 2)`, or from what max(x, y) and min(x, y) may be, as in `s + 1 - max(s, 1)`.
    """
    for mono, coef in d.terms:
        call = mono[0] if len(mono) == 1 else None
        if not isinstance(call, Call):
            continue
        x, n = call.args
        if call.op in ("max", "min"):
            cases = (_is_nonnegative(d + coef * (bound - of(call)), depth) for bound in (x, n))
            return any(cases) if call.op == ("min" if coef < 0 else "max") else all(cases)
        if call.op == "floordiv" and isinstance(n, int):
            rest = (d - coef * of(call)) * n + coef * (x if coef < 0 else x - (n - 1))
            return _is_nonnegative(rest + (n - 1), depth)  # n * d >= rest, and d is whole
    return False


def is_less(a: Dim, b: Dim) -> bool:
    """True where a < b is certain."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    if is_nonnegative(b - a - 1):
        return True
    top = upper(a)
    return top is not None and is_nonnegative(b - top - 1)


def always_equal(a: Dim, b: Dim) -> bool:
    """True where a == b for every value of the symbols."""
    return a == b or ((isinstance(a, Expr) or isinstance(b, Expr)) and a - b == 0)


def never_equal(a: Dim, b: Dim) -> bool:
    """True where a != b for every value of the symbols."""
    lo, hi = bounds(a - b)
    return (lo is not None and lo > 0) or (hi is not None and hi < 0)


# ---------------------------------------------------------------- division


def _divide(d: Dim, by: Dim) -> tuple[Dim, Dim]:
    """Polynomial division: d = q * by + r, with as much as possible in q."""
    if isinstance(by, int):
        q: dict[Monomial, int] = {}
        r: dict[Monomial, int] = {}
        for mono, coef in _terms(d):
            if coef % by == 0:
                q[mono] = coef // by
            elif not mono:
                q[mono], r[mono] = coef // by, coef % by
            else:
                r[mono] = coef
        return _make(q), _make(r)
    quotient: Dim = 0
    rest = dict(_terms(d))
    lead, lead_coef = by.terms[0]
    remainder: dict[Monomial, int] = {}
    while rest:
        mono, coef = min(rest.items(), key=_key)
        factor = _cancel(mono, lead)
        if factor is None or coef % lead_coef:
            remainder[mono] = rest.pop(mono)
            continue
        step = _make({factor: coef // lead_coef})
        quotient = quotient + step
        for m, c in _terms(step * by):
            rest[m] = rest.get(m, 0) - c
            if not rest[m]:
                del rest[m]
    return quotient, _make(remainder)


def _cancel(mono: Monomial, by: Monomial) -> Monomial | None:
    left = list(mono)
    for atom in by:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, rounded down. b is taken to be positive where it is symbolic."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if isinstance(b, int) and b <= 0:
        if b == 0:
            raise ZeroDivisionError(f"{a} // 0")
        return floordiv(-a, -b)
    if b == 1:
        return a
    quotient, rest = _divide(a, b)
    if isinstance(rest, int) and rest == 0:
        return quotient
    if is_nonnegative(rest) and is_less(rest, b):
        return quotient
    split = _coarse(rest, b)
    if split is not None:
        whole, _, unit = split
        return quotient + floordiv(whole, floordiv(b, unit))
    if isinstance(b, int):
        near = _nearest(rest, b)
        if near is not None:
            return quotient + near[0]
        inner = _divided_once(rest)
        if inner is not None:  # (x // m + y) // n
            x, m, y = inner
            return quotient + floordiv(x + y * m, m * b)
    return quotient + of(Call("floordiv", rest, b))


def mod(a: Dim, b: Dim) -> Dim:
    """a % b, with the sign of b. b is taken to be positive where it is symbolic."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if isinstance(b, int) and b <= 0:
        if b == 0:
            raise ZeroDivisionError(f"{a} % 0")
        return -mod(-a, -b)
    if b == 1:
        return 0
    _, rest = _divide(a, b)
    if isinstance(rest, int) and rest == 0:
        return 0
    if is_nonnegative(rest) and is_less(rest, b):
        return rest
    split = _coarse(rest, b)
    if split is not None:
        whole, fine, unit = split
        return mod(whole, floordiv(b, unit)) * unit + fine
    near = _nearest(rest, b) if isinstance(b, int) else None
    if near is not None:
        return near[1]
    inner = _single_call(rest, "mod")
    if inner is not None and isinstance(b, int) and isinstance(inner.args[1], int) and inner.args[1] % b == 0:
        return mod(inner.args[0], b)
    return of(Call("mod", rest, b))


def _nearest(d: Dim, by: int) -> tuple[Dim, Dim] | None:
    """Quotient and remainder where factors are close to multiples: 97*i + j + 49 by 98 is i, for i and j below 49."""
    quotient = _make({mono: (2 * coef + by) // (2 * by) for mono, coef in _terms(d) if mono})
    if isinstance(quotient, int):
        return None
    rest = d - quotient * by
    lo, hi = bounds(rest)
    if lo is None or hi is None or lo // by != hi // by:
        return None
    return quotient + lo // by, rest - lo // by * by


def _divided_once(d: Dim) -> tuple[Dim, int, Dim] | None:
    """x, m and y where an expression is x // m + y, with nothing else that is divided."""
    calls = [a for a in d.atoms() if isinstance(a, Call)] if isinstance(d, Expr) else []
    if len(calls) != 1 or calls[0].op != "floordiv" or not isinstance(calls[0].args[1], int):
        return None
    rest = d - of(calls[0])
    return None if _has_calls(rest) else (calls[0].args[0], calls[0].args[1], rest)


def _has_calls(d: Dim) -> bool:
    return isinstance(d, Expr) and any(isinstance(a, Call) for a in d.atoms())


def _coarse(d: Dim, by: Dim) -> tuple[Dim, Dim, Dim] | None:
    """d = whole * unit + fine with 0 <= fine < unit and unit a proper divisor of `by`: 4096*c + r by 24576."""
    if not isinstance(d, Expr):
        return None
    units: list[Dim] = []
    for mono, coef in d.terms:
        sizes = tuple(a for a in mono if isinstance(by, Expr) and a in by.atoms())
        units.append(_make({sizes: abs(coef)}))
    for unit in sorted(set(units), key=lambda u: -u if isinstance(u, int) else -(1 << 62)):
        if unit == 1 or always_equal(unit, by):
            continue
        if not always_equal(_divide(by, unit)[1], 0):
            continue
        whole, fine = _divide(d, unit)
        if is_nonnegative(fine) and is_less(fine, unit) and not (isinstance(whole, int) and whole == 0):
            return whole, fine, unit
    return None


def recombine(d: Dim) -> Dim:
    """Undoes `k*n*(x // n) + k*(x % n)` to `k*x`, as addresses of merged dims need.

    Likewise `k*n*(x % m // n) + k*(x % n)` to `k*(x % m)`, where n divides m, and `k*n*(x // n % m) + k*(x % n)` to
    `k*(x % (n*m))`.
    """
    changed = True
    while changed and isinstance(d, Expr):
        changed = False
        for mono, coef in d.terms:
            found = next((a for a in mono if isinstance(a, Call) and a.op == "mod"), None)
            if found is None:
                continue
            x, n = found.args
            rest = _make({_cancel(mono, (found,)) or (): coef})
            wholes = ((whole, rest * n * floordiv(whole, n)) for whole in (x, *_moduli(d, x, n)))
            digits = ((mod(y, n * a.args[1]), rest * n * of(a)) for y, a in _digits(d, x, n))
            fitting = ((whole, other) for whole, other in (*wholes, *digits) if _has_terms(d, other))
            whole, other = next(fitting, (None, None))
            if whole is not None and other is not None:
                d = d - other - _make({mono: coef}) + rest * whole
                changed = True
                break
    return d


def _has_terms(d: Expr, part: Dim) -> bool:
    return isinstance(part, Expr) and all(term in d.terms for term in part.terms)


def _moduli(d: Expr, x: Dim, n: Dim) -> list[Dim]:
    """The `x % m` that `d` divides by n, where n divides m."""
    calls = [a for mono, _ in d.terms for a in mono if isinstance(a, Call) and a.op == "floordiv" and a.args[1] == n]
    inner = (_single_call(a.args[0], "mod") for a in calls)
    return [of(m) for m in inner if m is not None and m.args[0] == x and mod(m.args[1], n) == 0]


def _digits(d: Expr, x: Dim, n: Dim) -> list[tuple[Dim, Call]]:
    """The `y // n % m` of an expression, of any m, for a y of the remainder of x; each after its y."""
    digits = [a for mono, _ in d.terms for a in mono if isinstance(a, Call) and a.op == "mod" and a.args != (x, n)]
    if not digits:
        return []
    high = floordiv(x, n)
    return [(x + n * (a.args[0] - high), a) for a in digits if not _has_calls(a.args[0] - high)]


def _single_call(d: Dim, op: str) -> Call | None:
    if isinstance(d, Expr) and len(d.terms) == 1 and d.terms[0][1] == 1 and len(d.terms[0][0]) == 1:
        atom = d.terms[0][0][0]
        if isinstance(atom, Call) and atom.op == op:
            return atom
    return None


def ceildiv(a: Dim, b: Dim) -> Dim:
    """a / b, rounded up; b is positive."""
    return floordiv(a + b - 1, b)


def maximum(a: Dim, b: Dim) -> Dim:
    """The greater one, decided now where the ranges tell."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if is_nonnegative(a - b):
        return a
    if is_nonnegative(b - a):
        return b
    if isinstance(b, int) and isinstance(a, Expr):
        return _flat_maximum(a, b)
    return of(Call("max", a, b))


def _flat_maximum(a: Expr, b: int) -> Dim:
    """max(max(x, m) + c, b) is max(x + c, b) where m + c <= b: what one slice after another makes."""
    rest = a.terms[-1][1] if not a.terms[-1][0] else 0
    call = _single_call(a - rest, "max")
    if call is not None and isinstance(call.args[1], int) and call.args[1] + rest <= b:
        return maximum(call.args[0] + rest, b)
    return of(Call("max", a, b))


def minimum(a: Dim, b: Dim) -> Dim:
    """The lesser one, decided now where the ranges tell."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if is_nonnegative(a - b):
        return b
    if is_nonnegative(b - a):
        return a
    return of(Call("min", a, b))


def exceeds(n: Dim, most: int) -> Dim:
    """1 where a size is more than `most`, 0 where it is not; a number if that is known."""
    low, high = bounds(n)
    if high is not None and high <= most:
        return 0
    return 1 if low is not None and low > most else minimum(floordiv(n, most + 1), 1)


_APPLY.update({"floordiv": floordiv, "mod": mod, "max": maximum, "min": minimum})

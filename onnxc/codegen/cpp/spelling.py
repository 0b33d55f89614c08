"""How C++ spells dtypes, index expressions, constants and pointwise primitives.

Every term of a kernel is a vector of VL lanes. A bool is a mask of int32 lanes (0 or -1); floats of 16 bits and
fewer are computed as float, integers of 4 and 2 bits as bytes.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Call, Dim, Symbol, of, symbols
from onnxc.ir.graph import Graph
from onnxc.ir.types import TensorType

# Elements that are wider in lanes than in memory, and their types in narrow.h.
NARROW = {
    "float16": "ox_half", "bfloat16": "ox_bf16", "float8e4m3fn": "ox_e4m3fn", "float8e4m3fnuz": "ox_e4m3fnuz",
    "float8e5m2": "ox_e5m2", "float8e5m2fnuz": "ox_e5m2fnuz", "float8e8m0": "ox_e8m0", "float6e2m3": "ox_e2m3",
    "float6e3m2": "ox_e3m2", "float4e2m1": "ox_e2m1", "int4": "ox_int4", "uint4": "ox_uint4", "int2": "ox_int2",
    "uint2": "ox_uint2",
}  # fmt: skip
STORAGE = {
    "float32": "f32", "float64": "f64", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "u8", "complex64": "i64", **NARROW,
}  # fmt: skip
_LANES = {**STORAGE, **dict.fromkeys(NARROW, "f32"), "bool": "i32"}
_LANES |= {"int4": "i8", "uint4": "u8", "int2": "i8", "uint2": "u8"}


def storage_type(dtype: DType) -> str:
    """The C++ type of an element in memory."""
    try:
        return STORAGE[dtype.name]
    except KeyError:
        raise UnsupportedError(f"kernels for {dtype} are not supported yet") from None


def lane_type(dtype: DType) -> str:
    """The C++ element type of a vector of values of this dtype."""
    storage_type(dtype)
    return _LANES[dtype.name]


def is_narrow(dtype: DType) -> bool:
    """Whether elements are wider in lanes than in memory; loads and stores of such are those of narrow.h."""
    return dtype.name in NARROW


def uses_narrow(text: str) -> bool:
    """Whether a kernel needs narrow.h."""
    return any(name in text for name in NARROW.values())


def index(d: Dim, names: Mapping[Symbol, str]) -> str:
    """An index expression in i64 arithmetic. Every symbol must have a name."""
    if isinstance(d, int):
        return f"{d}LL" if abs(d) >= 1 << 31 else str(d)
    parts = []
    for mono, coef in d.terms:
        factors = [_atom(a, names) for a in mono]
        if coef != 1 or not factors:
            factors.insert(0, f"{coef}LL" if abs(coef) >= 1 << 31 else f"{coef}")
        parts.append("*".join(factors) if len(factors) > 1 else factors[0])
    text = " + ".join(parts)
    return f"({text})" if len(parts) > 1 or "*" in text else text


def _atom(atom: object, names: Mapping[Symbol, str]) -> str:
    if isinstance(atom, Symbol):
        return names[atom]
    assert isinstance(atom, Call)
    if all(s.key[0] == "s" for s in symbols(of(atom))):
        return derived_size(atom)
    return operation(atom, names)


def operation(atom: Call, names: Mapping[Symbol, str]) -> str:
    """`//`, `%`, max or min of two expressions."""
    a, b = (index(x, names) for x in atom.args)
    return {
        "floordiv": f"ox_div({a}, {b})", "mod": f"ox_mod({a}, {b})",
        "max": f"ox_max({a}, {b})", "min": f"ox_min({a}, {b})",
    }[atom.op]  # fmt: skip


# Sizes that follow from others have names of their own, by content, so that a kernel computes each once.
_DERIVED: dict[str, Call] = {}


def derived_size(atom: Call) -> str:
    """The C++ name of an operation on sizes alone. `derived_in` gives the statements that define it."""
    name = "e_" + hashlib.sha256(atom.key.encode()).hexdigest()[:10]
    _DERIVED[name] = atom
    return name


def derived_in(text: str) -> list[tuple[str, str]]:
    """Name and value of every derived size that a text uses, each after those that it is made of."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        if name not in found:
            atom = _DERIVED[name]
            value = operation(atom, {s: s.key for s in symbols(of(atom))})
            for inner in re.findall(r"\be_[0-9a-f]{10}\b", value):
                visit(inner)
            found[name] = value

    for name in dict.fromkeys(re.findall(r"\be_[0-9a-f]{10}\b", text)):
        visit(name)
    return list(found.items())


# What kernels do with complex numbers: they move them, as 64 bits.
MOVES = frozenset({
    "constant", "copy", "where", "bitcast", "reshape", "transpose", "expand", "slice", "pad", "concat", "gather",
    "gather_elements", "gather_nd", "scatter_elements", "scatter_nd", "scan",
})  # fmt: skip


def check_complex(graph: Graph) -> None:
    """Raises UnsupportedError for a node that computes with complex numbers."""
    for node in graph.all_nodes():
        kinds = {v.dtype.kind for v in (*node.operands, *node.outputs) if isinstance(v.type, TensorType)}
        moved = node.op in MOVES and node.attrs.get("reduction", "none") == "none"
        if "complex" in kinds and not moved:
            where = ", ".join(map(str, node.origin)) or None
            raise UnsupportedError(f"kernels move complex numbers; {node.op} of such is not supported", node=where)


def literal(raw: bytes, dtype: DType) -> str:
    """A vector constant, exact to the bit."""
    if dtype.kind == "complex":
        dtype = dtypes.int64
    value = np.frombuffer(raw, dtype.numpy)[0]
    lane = lane_type(dtype)
    if dtype.name == "bool":
        return "vi{} - 1" if value else "vi{}"
    if dtype.is_float:
        return f"bc<{lane}>({_float(float(value), lane)})"
    number = int(value)
    suffix = "ULL" if dtype.name == "uint64" else "LL"
    text = f"(-{-(number + 1)}LL - 1)" if number < 0 else f"{number}{suffix}"
    return f"bc<{lane}>(({lane}){text})"


def _float(x: float, lane: str) -> str:
    suffix = "f" if lane == "f32" else ""
    if math.isnan(x):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(x):
        return ("-" if x < 0 else "") + f"__builtin_inf{suffix}()"
    return f"{float(x).hex()}{suffix}"


_MATH = {
    "exp", "log", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh",
    "acosh", "atanh", "erf", "floor", "ceil", "round", "abs", "sign", "max", "min", "pow", "mod", "fmod",
}  # fmt: skip
_INFIX = {"add": "+", "sub": "-", "mul": "*", "bitand": "&", "bitor": "|", "bitxor": "^"}
_MASKS = {
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "not": "~{}",
    "eq": "~({} ^ {})",
    "max": "{} | {}",
    "min": "{} & {}",
}
_OVERFLOWS = {"add", "sub", "mul", "neg", "abs", "pow", "div", "shl", "shr", "bitnot"}
_COMPARE = {"eq": "v_eq", "lt": "v_lt", "le": "v_le"}


def apply(op: str, args: list[str], dtype: DType, operand: DType, attrs: Mapping[str, object]) -> str:
    """A pointwise primitive over vector expressions. `operand` is the dtype of the first (last, for
    where) operand.
    """
    lane = lane_type(operand)
    if op == "cast":
        return cast(args[0], operand, dtype)
    if op == "bitcast":
        return bitcast(args[0], operand, dtype)
    if op == "copy":
        return args[0]
    if op == "where":
        return f"ox_sel<{lane_type(dtype)}>({', '.join(args)})"
    if operand.name == "bool" and op in _MASKS:
        return "(" + _MASKS[op].format(*args) + ")"
    if operand.is_integer and is_narrow(operand) and op in _OVERFLOWS:
        whole = dtypes.BY_NAME[operand.kind + "8"]
        return f"ox_fit<{NARROW[operand.name]}>({apply(op, args, whole, whole, attrs)})"
    if op in _INFIX:
        return f"({args[0]} {_INFIX[op]} {args[1]})"
    if op in _COMPARE:
        return f"ox_mask<{lane}>({_COMPARE[op]}({args[0]}, {args[1]}))"
    if op == "div":
        return (
            f"({args[0]} / {args[1]})"
            if operand.is_float
            else f"ox_idiv<{lane}>(ctx, {args[0]}, {args[1]}, (int)lanes)"
        )
    if op in ("mod", "fmod") and operand.is_integer:
        return f"v_{op}({args[0]}, ox_idivisor<{lane}>(ctx, {args[1]}, (int)lanes))"
    if op == "neg":
        return f"v_neg({args[0]})" if operand.is_float else f"(-{args[0]})"
    if op in ("floor", "ceil", "round") and not operand.is_float:
        return args[0]
    if op == "pow" and attrs.get("even"):
        return f"ox_power<{lane}>({', '.join(args)})"
    if op in _MATH:
        return f"v_{op}({', '.join(args)})"
    return _OTHER[op](args, lane, attrs)


def element(text: str, dtype: DType) -> str:
    """A stored element as a lane."""
    if dtype.name == "bool":
        return f"({text} ? -1 : 0)"
    return f"ox_get({text})" if is_narrow(dtype) else text


def put_element(place: str, lane: str, dtype: DType) -> str:
    """The statement that stores a lane."""
    if dtype.name == "bool":
        return f"{place} = (u8)({lane} & 1)"
    return f"ox_put({place}, {lane})" if is_narrow(dtype) else f"{place} = {lane}"


def _isinf(args: list[str], lane: str, attrs: Mapping[str, object]) -> str:
    tests = [
        f"({args[0]} == bc<{lane}>({sign}__builtin_inf()))"
        for sign, k in (("", "positive"), ("-", "negative"))
        if attrs.get(k, True)
    ]
    return f"ox_mask<{lane}>({' | '.join(tests)})" if tests else "vi{}"


def _shift(sign: str) -> Callable[[list[str], str, Mapping[str, object]], str]:
    """A shift by the whole width or more leaves zeros; to the right, of a signed number, its sign."""

    def spell(args: list[str], lane: str, attrs: Mapping[str, object]) -> str:
        x, by = args
        if sign == ">>" and lane[0] == "i":
            return f"({x} >> v_min({by}, bc<{lane}>(sizeof({lane}) * 8 - 1)))"
        shifted = f"({x} {sign} {by})"
        return f"ox_sel<{lane}>(ox_mask<{lane}>(v_lt({by}, bc<{lane}>(sizeof({lane}) * 8))), {shifted}, V<{lane}>{{}})"

    return spell


def _quantize(args: list[str], lane: str, attrs: Mapping[str, object]) -> str:
    scale, zero, low, high = (np.float64(attrs[k]) for k in ("scale", "zero", "low", "high"))  # type: ignore[arg-type]
    if scale == 1 or not 2.0**-90 < scale < 2.0**90:
        x = args[0] if scale == 1 else f"{args[0]} / {_float(float(scale), 'f32')}"
        limits = ", ".join(_float(float(x - zero), "f32") for x in (low, high))
        return f"v_quantize({x}, {limits}, {int(zero)})"
    limits = ", ".join(_float(float(np.float32((x - zero) * scale)), "f32") for x in (low, high))
    inverse = _float(float(np.float32(1) / np.float32(scale)), "f32")
    return f"v_quantize({args[0]}, {_float(float(scale), 'f32')}, {inverse}, {limits}, {int(zero)})"


_OTHER: dict[str, Callable[[list[str], str, Mapping[str, object]], str]] = {
    "isnan": lambda args, lane, attrs: f"ox_mask<{lane}>(v_ne({args[0]}, {args[0]}))",
    "isinf": _isinf,
    "quantize": _quantize,
    "threefry": lambda args, lane, attrs: f"v_threefry({', '.join(args)})",
    "bitnot": lambda args, lane, attrs: f"(~{args[0]})",
    "shl": _shift("<<"),
    "shr": _shift(">>"),
}


def cast(x: str, source: DType, target: DType) -> str:
    """Conversion between dtypes' vectors."""
    a, b = lane_type(source), lane_type(target)
    if source is target:
        return x
    if target.name == "bool":
        return x if source.name == "bool" else f"ox_mask<{a}>(v_ne({x}, V<{a}>{{}}))"
    if source.name == "bool":
        return f"conv<{b}, i32>({x} & 1)"
    if source.is_float and target.is_integer:
        x, a = f"ox_trunc<{b}, {a}>({x})", b
    if is_narrow(target) and target.is_float:
        if source.bits > 32 or (source.is_integer and source.bits == 32):  # a float would round it once more
            return f"ox_fit<{NARROW[target.name]}>(ox_odd({x if a == 'f64' else f'conv<f64, {a}>({x})'}))"
        return f"ox_fit<{NARROW[target.name]}>(conv<f32, {a}>({x}))"
    x = x if a == b else f"conv<{b}, {a}>({x})"
    return f"ox_fit<{NARROW[target.name]}>({x})" if is_narrow(target) else x


def bitcast(x: str, source: DType, target: DType) -> str:
    """The same bits as lanes of another dtype."""
    word = f"u{max(source.bits, 8)}"
    if source.name == "bool":
        x = f"conv<u8, i32>({x} & 1)"
    else:
        x = f"ox_narrow({x}, ({NARROW[source.name]} *)0)" if is_narrow(source) else f"bits<V<{word}>>({x})"
    if target.name == "bool":
        return f"ox_mask<u8>(v_ne({x}, V<u8>{{}}))"
    if is_narrow(target):
        return f"ox_widen({x}, ({NARROW[target.name]} *)0)"
    return f"bits<V<{lane_type(target)}>>({x})"


# What the spellings above need beyond vec.h and vmath.h: `OP` names in generated text.
PRELUDE = """\
// Divisors are sizes: where one is zero there are no elements, and the quotient does not matter.
OX i64 ox_div(i64 a, i64 b) { if (b == 0) return 0; i64 q = a / b; return q - (a % b && (a < 0) != (b < 0)); }
OX i64 ox_mod(i64 a, i64 b) {
  if (b == 0) return 0;
  i64 r = a % b;
  return r + (r && (r < 0) != (b < 0) ? b : 0);
}
template <class T> OX vi ox_mask(VM<T> m) { return conv<i32, typename int_of<sizeof(T)>::s>(m); }
template <class T> OX V<T> ox_sel(vi m, V<T> a, V<T> b) {
  return v_sel(conv<typename int_of<sizeof(T)>::s, i32>(m), a, b);
}
// Float to integer as onnxruntime has it: narrow types take the low bits of an int32, out of range
// gives the least value, and unsigned types subtract the half of their range from what is above it.
template <class R, class T> OX V<R> ox_trunc(V<T> x) {
  if constexpr (sizeof(R) < 4) {
    return conv<R, i32>(conv<i32, T>(x));
  } else if constexpr ((R)-1 < 0) {
    return conv<R, T>(x);
  } else {
    typedef typename int_of<sizeof(R)>::s S;
    constexpr T half = sizeof(R) == 4 ? (T)0x1p31 : (T)0x1p63;
    VM<T> high = v_ge(x, bc<T>(half));
    V<S> r = conv<S, T>(v_sel(high, x - half, x));
    return bits<V<R>>(r ^ (conv<S, typename int_of<sizeof(T)>::s>(high) << (sizeof(S) * 8 - 1)));
  }
}
template <class M> OX bool ox_any(M m) {  // of a mask's lanes
  typedef elem<M> I;
#if defined(__AVX__)
  if constexpr (sizeof(M) % 32 == 0) {
    typedef i64 words __attribute__((vector_size(32)));
    struct { words v[sizeof(M) / 32]; } w = bits<decltype(w)>(m);
    words any = w.v[0];
    OX_UNROLL for (unsigned i = 1; i < sizeof(M) / 32; i++) any |= w.v[i];
    return !__builtin_ia32_ptestz256(any, any);
  }
#endif
  return h_fold<I, VL>(m, [](auto a, auto b) { return (decltype(a))(a | b); }) != 0;
}
// One exponent for all lanes. Squares and cubes are products, as they are where it is a constant.
template <class T> OX V<T> ox_power(V<T> x, V<T> y) {
  if (!ox_any(v_ne(y, bc<T>(2)))) return x * x;
  if (!ox_any(v_ne(y, bc<T>(3)))) return x * x * x;
  return v_pow(x, y);
}
template <class T> OX V<T> ox_idivisor(ox_ctx *ctx, V<T> b, int n) {
  if (__builtin_expect(ox_any(v_eq(b, V<T>{})), 0)) {
    for (int i = 0; i < n; i++) if (b[i] == 0) ctx->api->fail(ctx, OX_ERR_DIVIDE, 0, 0);
  }
  return b;
}
template <class T> OX V<T> ox_idiv(ox_ctx *ctx, V<T> a, V<T> b, int n) { return v_idiv(a, ox_idivisor<T>(ctx, b, n)); }
OX i64 ox_index(ox_ctx *ctx, i64 i, i64 n) {
  i64 at = i < 0 ? i + n : i;
  if (__builtin_expect(at < 0 || at >= n, 0)) { ctx->api->fail(ctx, OX_ERR_INDEX, 0, i); return 0; }
  return at;
}
template <class T> OX vl ox_indices(ox_ctx *ctx, V<T> at, i64 n, int lanes) {
  vl r = conv<i64, T>(at);
  r += (r >> 63) & n;
  if (__builtin_expect(!ox_any(v_lt(r, vl{}) | v_ge(r, bc<i64>(n))), 1)) return r;
  for (int i = 0; i < VL; i++) r[i] = i < lanes ? ox_index(ctx, (i64)at[i], n) : 0;
  return r;
}
template <class T> OX V<T> ox_part(V<T> x, V<T>, Full) { return x; }
template <class T> OX V<T> ox_part(V<T> x, V<T> other, Part l) {
  return v_sel(range_mask<T>(0, l.n, all_lanes{}), x, other);
}
template <class T> constexpr T ox_least() { return (T)-1 < 0 ? (T)((u64)1 << (sizeof(T) * 8 - 1)) : (T)0; }
template <class T> constexpr T ox_greatest() { return (T)~ox_least<T>(); }
template <class T> OX V<T> ox_lanes() { V<T> r; OX_UNROLL for (int i = 0; i < VL; i++) r[i] = i; return r; }
template <class L> OX vi ox_ldbool(const u8 *p, L lanes) {
  return __builtin_convertvector(ldl((const i8 *)p, lanes) != V<i8>{}, vi);
}
template <class L> OX void ox_stbool(u8 *p, vi m, L lanes) { stl(p, __builtin_convertvector(m & 1, V<u8>), lanes); }
"""

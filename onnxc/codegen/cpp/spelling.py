"""How C++ spells dtypes, index expressions, constants and pointwise primitives.

Every term of a kernel is a vector of VL lanes. A bool is a mask of int32 lanes (0 or -1); float16 and
bfloat16 are
computed as float.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Call, Dim, Symbol, of, symbols

STORAGE = {
    "float32": "f32", "float64": "f64", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "u8", "float16": "ox_half",
    "bfloat16": "ox_bf16",
}  # fmt: skip
_LANES = {**STORAGE, "float16": "f32", "bfloat16": "f32", "bool": "i32"}


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


def literal(raw: bytes, dtype: DType) -> str:
    """A vector constant, exact to the bit."""
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
_COMPARE = {"eq": "v_eq", "lt": "v_lt", "le": "v_le"}


def apply(op: str, args: list[str], dtype: DType, operand: DType, attrs: Mapping[str, object]) -> str:
    """A pointwise primitive over vector expressions. `operand` is the dtype of the first (last, for
    where) operand.
    """
    lane = lane_type(operand)
    if op == "cast":
        return cast(args[0], operand, dtype)
    if op == "copy":
        return args[0]
    if op == "where":
        return f"ox_sel<{lane_type(dtype)}>({', '.join(args)})"
    if operand.name == "bool" and op in _MASKS:
        return "(" + _MASKS[op].format(*args) + ")"
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
    if op in _MATH:
        return f"v_{op}({', '.join(args)})"
    return _OTHER[op](args, lane, attrs)


def element(text: str, dtype: DType) -> str:
    """A stored element as a lane."""
    if dtype.name == "bool":
        return f"({text} ? -1 : 0)"
    return f"ox_get({text})" if dtype.name in ("float16", "bfloat16") else text


def put_element(place: str, lane: str, dtype: DType) -> str:
    """The statement that stores a lane."""
    if dtype.name == "bool":
        return f"{place} = (u8)({lane} & 1)"
    return f"ox_put({place}, {lane})" if dtype.name in ("float16", "bfloat16") else f"{place} = {lane}"


def _isinf(args: list[str], lane: str, attrs: Mapping[str, object]) -> str:
    tests = [
        f"({args[0]} == bc<{lane}>({sign}__builtin_inf()))"
        for sign, k in (("", "positive"), ("-", "negative"))
        if attrs.get(k, True)
    ]
    return f"ox_mask<{lane}>({' | '.join(tests)})" if tests else "vi{}"


def _shift(sign: str) -> Callable[[list[str], str, Mapping[str, object]], str]:
    return lambda args, lane, attrs: (
        f"ox_sel<{lane}>(ox_mask<{lane}>(v_lt({args[1]}, bc<{lane}>(sizeof({lane}) * 8))), "
        f"({args[0]} {sign} {args[1]}), V<{lane}>{{}})"
    )


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
        return f"ox_trunc<{b}, {a}>({x})"
    if target.name in ("float16", "bfloat16"):
        return f"ox_round_{STORAGE[target.name][3:]}(conv<f32, {a}>({x}))"
    return x if a == b else f"conv<{b}, {a}>({x})"


# What the spellings above need beyond vec.h and vmath.h: `OP` names in generated text.
PRELUDE = """\
// Divisors are sizes: where one is zero there are no elements, and the quotient does not matter.
OX i64 ox_div(i64 a, i64 b) { if (b == 0) return 0; i64 q = a / b; return q - (a % b && (a < 0) != (b < 0)); }
OX i64 ox_mod(i64 a, i64 b) {
  if (b == 0) return 0;
  i64 r = a % b;
  return r + (r && (r < 0) != (b < 0) ? b : 0);
}
OX i64 ox_max(i64 a, i64 b) { return a > b ? a : b; }
OX i64 ox_min(i64 a, i64 b) { return a < b ? a : b; }
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
  return h_fold<I, VL>(m, [](auto a, auto b) { return (decltype(a))(a | b); }) != 0;
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
HALF = """\
typedef _Float16 ox_f16;
struct ox_half { ox_f16 x; };
struct ox_bf16 { u16 x; };
OX f32 ox_get(ox_half h) { return (f32)h.x; }
OX f32 ox_get(ox_bf16 h) { u32 b = (u32)h.x << 16; return bits<f32>(b); }
OX void ox_put(ox_half &h, f32 x) { h.x = (ox_f16)x; }
OX void ox_put(ox_bf16 &h, f32 x) {
  u32 b = bits<u32>(x);
  h.x = x != x ? (u16)((b >> 16) | 0x40) : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
// Whole vectors: lanes of 16 bits to floats and back, rounded to the nearest even.
OX vf ox_widen(V<u16> h, const ox_bf16 *) { return bits<vf>(conv<u32, u16>(h) << 16); }
OX V<u16> ox_narrow(vf x, const ox_bf16 *) {
  const V<u32> b = bits<V<u32>>(x), r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return conv<u16, u32>(v_sel(v_ne(x, x), (b >> 16) | 0x40, r));
}
#if OX_512
OX vf ox_widen(V<u16> h, const ox_half *) {
  return __builtin_ia32_vcvtph2ps512_mask(bits<V<i16>>(h), vf{}, OX_ALL, OX_CUR);
}
OX V<u16> ox_narrow(vf x, const ox_half *) {
  return bits<V<u16>>(__builtin_ia32_vcvtps2ph512_mask(x, OX_CUR, V<i16>{}, OX_ALL));
}
#elif OX_256 && defined(__F16C__)
OX vf ox_widen(V<u16> h, const ox_half *) { return __builtin_ia32_vcvtph2ps256(bits<V<i16>>(h)); }
OX V<u16> ox_narrow(vf x, const ox_half *) { return bits<V<u16>>(__builtin_ia32_vcvtps2ph256(x, 4)); }
#else
OX vf ox_widen(V<u16> h, const ox_half *) {
  vf r;
  for (int i = 0; i < VL; i++) { u16 b = h[i]; r[i] = (f32)bits<ox_f16>(b); }
  return r;
}
OX V<u16> ox_narrow(vf x, const ox_half *) {
  V<u16> r;
  for (int i = 0; i < VL; i++) r[i] = bits<u16>((ox_f16)x[i]);
  return r;
}
#endif
template <class H> OX vf ox_ldhalf(const H *p, i64 s, int n) {
  return some_lanes<f32>(0, n, [&](int i) OX_LAMBDA { return ox_get(p[i * s]); });
}
template <class H> OX vf ox_ldhalf(const H *p, Full) { return ox_widen(ld((const u16 *)p), p); }
template <class H> OX vf ox_ldhalf(const H *p, Part l) { return ox_widen(ldl((const u16 *)p, l), p); }
template <class H> OX void ox_sthalf(H *p, vf v, i64 s, int n) {
  for (int i = 0; i < n; i++) ox_put(p[i * s], v[i]);
}
template <class H> OX void ox_sthalf(H *p, vf v, Full) { st((u16 *)p, ox_narrow(v, p)); }
template <class H> OX void ox_sthalf(H *p, vf v, Part l) { stl((u16 *)p, ox_narrow(v, p), l); }
OX vf ox_round_half(vf v) { return ox_widen(ox_narrow(v, (ox_half *)0), (ox_half *)0); }
OX vf ox_round_bf16(vf v) { return ox_widen(ox_narrow(v, (ox_bf16 *)0), (ox_bf16 *)0); }
"""

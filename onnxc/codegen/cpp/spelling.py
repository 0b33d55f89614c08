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
from onnxc.loops.loop_index import is_size

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
    if all(is_size(s) for s in symbols(of(atom))):
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


def derives_from(name: str, symbol: Symbol) -> bool:
    """Whether a derived size depends on a symbol."""
    return symbol in symbols(of(_DERIVED[name]))


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
    if op == "byte_table":
        return _byte_table(args[0], lane, attrs["numbers"], dtype)
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


def _byte_table(x: str, lane: str, numbers: object, to: DType) -> str:
    """The table is a string literal."""
    assert isinstance(numbers, tuple)
    content = "".join(f"\\{n & 255:03o}" for n in numbers)
    return f'v_byte_table<{lane_type(to)}, {lane}>({x}, "{content}")'


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

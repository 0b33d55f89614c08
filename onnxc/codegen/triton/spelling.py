"""How Triton spells dtypes, index expressions, constants and pointwise primitives.

Every term of a kernel is a tile. float16 and bfloat16 are computed as float32, as on the CPU; a bool is ``int1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from onnxc.errors import UnsupportedError
from onnxc.ir.dtypes import DType
from onnxc.ir.expr import Call, Dim, Symbol, is_nonnegative

Attrs = Mapping[str, object]

# Floats of 8 bits and fewer: exponent and mantissa bits, bias, and what the largest codes mean (see ox_from_small).
# Triton has some of these types on some architectures; computed in integers they are the same on all.
_SMALL = {
    "float8e4m3fn": (4, 3, 7, "FN"), "float8e4m3fnuz": (4, 3, 8, "FNUZ"), "float8e5m2": (5, 2, 15, "IEEE"),
    "float8e5m2fnuz": (5, 2, 16, "FNUZ"), "float4e2m1": (2, 1, 1, "FINITE"), "float6e2m3": (2, 3, 1, "FINITE"),
    "float6e3m2": (3, 2, 3, "FINITE"), "float8e8m0": (8, 0, 127, "POWER"),
}  # fmt: skip

# dtype -> (element of a buffer in a signature, Triton's dtype in memory, Triton's dtype of a term)
_TYPES = {
    "float64": ("fp64", "tl.float64", "tl.float64"), "float32": ("fp32", "tl.float32", "tl.float32"),
    "float16": ("fp16", "tl.float16", "tl.float32"), "bfloat16": ("bf16", "tl.bfloat16", "tl.float32"),
    "int8": ("i8", "tl.int8", "tl.int8"), "int16": ("i16", "tl.int16", "tl.int16"),
    "int32": ("i32", "tl.int32", "tl.int32"), "int64": ("i64", "tl.int64", "tl.int64"),
    "uint8": ("u8", "tl.uint8", "tl.uint8"), "uint16": ("u16", "tl.uint16", "tl.uint16"),
    "uint32": ("u32", "tl.uint32", "tl.uint32"), "uint64": ("u64", "tl.uint64", "tl.uint64"),
    "bool": ("u8", "tl.uint8", "tl.int1"),
    # A byte each in memory, with anything in the upper bits of those that have fewer.
    **dict.fromkeys(_SMALL, ("u8", "tl.uint8", "tl.float32")),
    "int4": ("u8", "tl.uint8", "tl.int8"), "uint4": ("u8", "tl.uint8", "tl.uint8"),
    "int2": ("u8", "tl.uint8", "tl.int8"), "uint2": ("u8", "tl.uint8", "tl.uint8"),
}  # fmt: skip


def _row(dtype: DType) -> tuple[str, str, str]:
    try:
        return _TYPES[dtype.name]
    except KeyError:
        raise UnsupportedError(f"GPU kernels for {dtype} are not supported yet") from None


def pointer(dtype: DType) -> str:
    """The type of a buffer in a kernel's signature."""
    return "*" + _row(dtype)[0]


def stored(dtype: DType) -> str:
    """Triton's dtype of an element in memory."""
    return _row(dtype)[1]


def computed(dtype: DType) -> str:
    """Triton's dtype of a term."""
    return _row(dtype)[2]


def index(d: Dim, names: Mapping[Symbol, str]) -> str:
    """An index expression. Every symbol must have a name."""
    if isinstance(d, int):
        return str(d)
    parts = []
    for mono, coef in d.terms:
        factors = [_atom(a, names) for a in mono]
        if coef != 1 or not factors:
            factors.insert(0, str(coef))
        parts.append(" * ".join(factors))
    return f"({' + '.join(parts)})" if len(parts) > 1 or " * " in parts[0] else parts[0]


def _atom(atom: object, names: Mapping[Symbol, str]) -> str:
    if isinstance(atom, Symbol):
        return names[atom]
    assert isinstance(atom, Call)
    a, b = (index(x, names) for x in atom.args)
    if atom.op in ("max", "min"):
        return f"tl.{atom.op}imum({a}, {b})"
    positive = isinstance(atom.args[1], int) and atom.args[1] > 0
    if positive and is_nonnegative(atom.args[0]):
        return f"({a} {'//' if atom.op == 'floordiv' else '%'} {b})"
    return f"ox_floor{atom.op.removeprefix('floor')}({a}, {b})"


def literal(raw: bytes, dtype: DType, rank: int) -> str:
    """A constant tile of one element, exact to the bit."""
    value = np.frombuffer(raw, dtype.numpy)[0]
    if dtype.is_float:
        text = _float(float(value))
    else:
        text = str(bool(value)) if dtype.name == "bool" else str(int(value))
    return f"tl.full({ones(rank)}, {text}, {computed(dtype)})"


def ones(rank: int) -> str:
    """The shape of a tile of one element."""
    return f"({'1, ' * rank})" if rank else "()"


def scalar(x: float) -> str:
    """A float32 of any value. (Triton takes a number beyond its normal range for a float64.)"""
    return f"tl.full((), {_float(x)}, tl.float32)"


def _float(x: float) -> str:
    if math.isnan(x):
        return 'float("nan")'
    if math.isinf(x):
        return f'float("{"-" if x < 0 else ""}inf")'
    return repr(x)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "bitand": "&", "bitor": "|", "bitxor": "^", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "lt": "<", "le": "<=",
}  # fmt: skip
_LIBDEVICE = {
    "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf",
    "floor", "ceil",
}  # fmt: skip


def apply(op: str, args: list[str], dtype: DType, operand: DType, attrs: Attrs) -> str:
    """A pointwise primitive over tiles. `operand` is the dtype of the first (last, for where) operand."""
    if op == "cast":
        return cast(args[0], operand, dtype)
    if op == "bitcast":
        return _bitcast(args[0], operand, dtype)
    if op == "copy":
        return args[0]
    if op == "mul" and attrs.get("rounded"):
        return f"libdevice.mul_rn({args[0]}, {args[1]})"
    if op in _INFIX:
        return f"({args[0]} {_INFIX[op]} {args[1]})"
    if op in ("floor", "ceil", "round") and not operand.is_float:
        return args[0]
    if op in _OF_HALVES.get(operand.name, ()):
        return _OF_HALVES[operand.name][op].format(*args)
    if op in _LIBDEVICE:
        return f"libdevice.{op}({args[0]})"
    return _OTHER[op](args, operand, attrs)


def _bitcast(x: str, source: DType, target: DType) -> str:
    """The same bits as another dtype. (In Triton a bool has one.)"""
    if target.name == "bool":
        return f"({x}.to({stored(source)}).to(tl.uint8, bitcast=True) != 0)"
    if _is_packed(source) or _is_packed(target):
        return widened(f"{narrowed(x, source)}.to({stored(target)}, bitcast=True)", target)
    return f"{x}.to({stored(source)}).to({stored(target)}, bitcast=True).to({computed(target)})"


# Of float16 numbers, which have 11 bits, and bfloat16 numbers, which have 8: in float32, to some units in the last
# place of that. Those of bfloat16 keep the range of float32, denormals too. Divisions end in a product, which nothing
# joins with a sum (passes/round_products.py).
_OF_HALVES = {
    "float16": {
        "exp": "ox_exp_half({0})", "div": "libdevice.mul_rn({0}, ox_rcp_half({1}))", "sqrt": "tl.sqrt({0})",
        "tanh": "ox_tanh_half({0})", "erf": "ox_erf_half({0}, False)",
    },
    "bfloat16": {
        "exp": "tl.exp({0})", "div": "libdevice.add_rn({0} / {1}, -0.0)", "sqrt": "tl.sqrt({0})",
        "tanh": "ox_tanh_half({0})", "erf": "ox_erf_half({0}, True)",
    },
}  # fmt: skip


def _by_kind(of_floats: str, of_integers: str) -> Callable[[list[str], DType, Attrs], str]:
    return lambda args, t, attrs: (of_floats if t.is_float else of_integers).format(*args)


def _division(t: DType) -> str:
    """Division, rounded correctly; Triton's own division of float32 is not."""
    if t.is_integer:
        return "ox_idiv({0}, {1})"
    return "({0} / {1})" if t.name == "float64" else "tl.div_rn({0}, {1})"


def _extreme(op: str) -> Callable[[list[str], DType, Attrs], str]:
    logical = {"max": "|", "min": "&"}[op]
    return lambda args, t, attrs: (
        f"({args[0]} {logical} {args[1]})" if t.name == "bool" else f"ox_{op}({args[0]}, {args[1]})"
    )


def _quantize(args: list[str], t: DType, attrs: Attrs) -> str:
    scale, zero, low, high = (float(attrs[k]) for k in ("scale", "zero", "low", "high"))  # type: ignore[arg-type]
    return f"ox_quantize({args[0]}, {scalar(scale)}, {zero!r}, {low!r}, {high!r})"


_OTHER: dict[str, Callable[[list[str], DType, Attrs], str]] = {
    "where": lambda args, t, attrs: f"tl.where({', '.join(args)})",
    "div": lambda args, t, attrs: _division(t).format(*args),
    "mod": _by_kind("ox_mod_float({0}, {1})", "ox_mod_int({0}, {1})"),
    "fmod": _by_kind("libdevice.fmod({0}, {1})", "ox_fmod_int({0}, {1})"),
    "pow": lambda args, t, attrs: (
        f"libdevice.pow({', '.join(args)})" if t.is_float else f"ox_pow_int({', '.join(args)}, {t.bits})"
    ),
    "sqrt": lambda args, t, attrs: f"libdevice.sqrt_rn({args[0]})",
    "round": lambda args, t, attrs: f"libdevice.rint({args[0]})",
    "abs": lambda args, t, attrs: args[0] if t.kind == "uint" else f"tl.abs({args[0]})",
    "neg": _by_kind("ox_neg({0})", "(-{0})"),
    "sign": lambda args, t, attrs: f"ox_sign({args[0]})",
    "not": lambda args, t, attrs: f"({args[0]} == 0)",
    "bitnot": lambda args, t, attrs: f"(~{args[0]})",
    "max": _extreme("max"),
    "min": _extreme("min"),
    "shl": lambda args, t, attrs: f"ox_shl({args[0]}, {args[1]}, {t.bits})",
    "shr": lambda args, t, attrs: f"ox_shr({args[0]}, {args[1]}, {t.bits})",
    "isnan": lambda args, t, attrs: f"({args[0]} != {args[0]})",
    "isinf": lambda args, t, attrs: (
        f"ox_isinf({args[0]}, {bool(attrs.get('positive', True))}, {bool(attrs.get('negative', True))})"
    ),
    "quantize": _quantize,
    "threefry": lambda args, t, attrs: f"ox_threefry({', '.join(args)})",
}


def _is_packed(dtype: DType) -> bool:
    """Whether an element in memory is a byte that stands for something else."""
    return dtype.name in _SMALL or _is_part(dtype)


def _small(function: str, x: str, dtype: DType) -> str:
    """`ox_from_small` or `ox_to_small` of a type."""
    exponent, mantissa, bias, kind = _SMALL[dtype.name]
    if kind == "POWER":
        return f"{function.replace('small', 'power')}({x})"
    return f'{function}({x}, {exponent}, {mantissa}, {bias}, "{kind}")'


def _is_part(dtype: DType) -> bool:
    """Whether an element has only some bits of a byte."""
    return dtype.is_integer and dtype.bits < 8


def _part(x: str, dtype: DType) -> str:
    """Such an element from the lower bits of bytes."""
    return f"ox_part({x}, {8 - dtype.bits}, {dtype.kind == 'int'})"


def widened(x: str, dtype: DType) -> str:
    """Elements as they are stored, as a term's tile."""
    if dtype.name == "bool":
        return f"({x} != 0)"
    if dtype.name in _SMALL:
        return _small("ox_from_small", x, dtype)
    if _is_part(dtype):
        return _part(x, dtype)
    kind = computed(dtype)
    return x if kind == stored(dtype) else f"{x}.to({kind})"


def narrowed(x: str, dtype: DType) -> str:
    """A term as it is stored."""
    if _is_part(dtype):
        return f"(({x}).to(tl.uint8) & {(1 << dtype.bits) - 1})"
    return _small("ox_to_small", x, dtype) if dtype.name in _SMALL else f"({x}).to({stored(dtype)})"


def rounded(x: str, dtype: DType) -> str:
    """A term as it is after it has been stored and loaded."""
    return widened(narrowed(x, dtype), dtype)


def cast(x: str, source: DType, target: DType) -> str:
    """Conversion of a tile between dtypes: floats to integers as onnxruntime has it on the CPU."""
    if source is target:
        return x
    if target.name == "bool":
        return f"({x} != 0)"
    kind = computed(target)
    if _is_part(target):
        return _part(f"ox_to_int32({x})" if source.is_float else x, target)
    if source.is_float and target.is_integer:
        if target.bits < 32:
            return f"ox_to_int32({x}).to({kind})"
        return f"ox_to_{target.name}({x})"
    if target.name in _SMALL:  # a float32 would round once more what has more digits than that
        long = source.bits > 32 or (source.is_integer and source.bits == 32)
        return rounded(f"ox_odd({x}.to(tl.float64))" if long else f"({x}).to(tl.float32)", target)
    if target.name in ("float16", "bfloat16") or stored(target) != kind:
        return f"{x}.to({stored(target)}).to({kind})"
    return f"{x}.to({kind})"

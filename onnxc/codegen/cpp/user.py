"""Kernels of users: each is a translation unit of its own, and a kernel of ours calls it.

The unit ends with a function of one signature for all, `entry_of` says how it is called. It is the only name that
others see: the user's text stands in a namespace without a name, and errors in it cite lines of that text.
"""

from __future__ import annotations

import hashlib
import math

from onnxc.codegen.cpp import spelling
from onnxc.codegen.cpp.routine import RoutineEmitter
from onnxc.errors import UnsupportedError
from onnxc.ir.graph import Node
from onnxc.primitives.kernels import kernel_of

_TYPES = {"float16": "f16", "bfloat16": "bf16", "bool": "bool"}
# Inputs, outputs, sizes and integer scalars, other scalars, the piece of work, and memory for it.
PARAMETERS = "const void *const *in, void *const *out, const i64 *n, const f64 *x, i64 first, i64 last, char *work"


def unit_of(node: Node) -> tuple[str, str]:
    """The name of the function that calls a node's kernel, and the text of its translation unit.

    Raises UnsupportedError for a kernel that has no C++.
    """
    kernel = kernel_of(node)
    if not kernel.cpp:
        raise UnsupportedError(
            f"the kernel {kernel.name} has no C++ source, which the CPU needs", node=", ".join(map(str, node.origin))
        )
    arguments = ", ".join(_arguments(node))
    digest = hashlib.sha256(f"{kernel.key} {arguments}".encode()).hexdigest()[:16]
    entry = f"ox_user_{kernel.name}_{digest}"
    lines = [
        '#include "kernel.h"', *(f"#include <{name}>" for name in kernel.headers), "namespace {",
        f'#line 1 "{kernel.name}.cpp"', kernel.cpp, "}", f'#line 1 "the call of {kernel.name}"',
        f'__attribute__((visibility("hidden"))) int {entry}({PARAMETERS}) {{',
        "  (void)in; (void)out; (void)n; (void)x; (void)first; (void)last; (void)work;",
        f"  return ox_told((::{kernel.name}({arguments}), ox_none{{}}));",  # the user's, whatever parameters are called
        "}", "",
    ]  # fmt: skip
    return entry, "\n".join(lines)


def _arguments(node: Node) -> list[str]:
    """What the user's function is called with."""
    attrs = node.attrs
    found = [f"(const {_type(v.dtype.name)} *)in[{k}]" for k, v in enumerate(node.operands)]
    found += [f"({_type(v.dtype.name)} *)out[{k}]" for k, v in enumerate(node.outputs)]
    found += [f"n[{k}]" for k in range(len(attrs["sizes"]))]
    ints, floats = len(attrs["sizes"]), 0
    for scalar in attrs["scalars"]:
        if isinstance(scalar, float):
            found.append(f"x[{floats}]")
            floats += 1
        else:
            found.append(f"n[{ints}]")
            ints += 1
    found += ["first", "last"] if attrs["divided"] else []
    return [*found, "work"] if attrs["workspace"] != 0 else found


def _type(name: str) -> str:
    return _TYPES.get(name) or spelling.STORAGE[name]


def literal(x: float) -> str:
    """A double of C++."""
    if math.isnan(x):
        return '__builtin_nan("")'
    if math.isinf(x):
        return "__builtin_inf()" if x > 0 else "-__builtin_inf()"
    return x.hex()


def body(emitter: RoutineEmitter, entry: str) -> tuple[list[str], str]:
    """Statements of the kernel that calls the function, and the bytes of each thread's workspace."""
    node = emitter.node
    attrs = node.attrs
    ins = ", ".join(f"(const void *)({emitter.start(v)})" for v in node.operands) or "0"
    outs = ", ".join(f"(void *)({emitter.start(v)})" for v in node.outputs)
    numbers = [emitter.size(d) for d in attrs["sizes"]]
    numbers += [f"(i64){s % (1 << 64)}ULL" for s in attrs["scalars"] if isinstance(s, int)]
    floats = [literal(s) for s in attrs["scalars"] if isinstance(s, float)]
    each = f"routines::up({emitter.size(attrs['workspace'])}, 64) * 64"
    return [
        f"int {entry}({PARAMETERS});",
        f"const void *const in[] = {{{ins}}}; void *const out[] = {{{outs}}};",
        f"const i64 n[] = {{{', '.join(numbers) or '0'}}}; const f64 x[] = {{{', '.join(floats) or '0'}}};",
        f"const int told = {entry}(in, out, n, x, first, last, a->scratch + worker * ({each}));",
        "if (told) ctx->api->fail(ctx, OX_ERR_USER, 0, told);",
    ], f"ctx->threads * ({each})"

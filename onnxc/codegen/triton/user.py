"""Kernels of users: their Triton functions, which kernels of ours call.

All functions of a program stand in one source, so those of users get names of their own there.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable

from onnxc.codegen.cpp.routine import is_row_major
from onnxc.codegen.triton.kernel import Kernel
from onnxc.codegen.triton.terms import Buffers
from onnxc.errors import InputError, UnsupportedError
from onnxc.ir.graph import Node
from onnxc.planner.layout import Layout
from onnxc.primitives import kernels
from onnxc.primitives.kernels import kernel_of

_MENTIONED = re.compile(r"\buser_([0-9a-f]{16})_")


def users_library(texts: Iterable[str]) -> list[str]:
    """The sources of the users' functions that these texts call."""
    keys = {key for text in texts for key in _MENTIONED.findall(text)}
    return [renamed(kernels.by_key(key)) for key in sorted(keys)]


def renamed(kernel: kernels.Kernel) -> str:
    """A kernel's source with its key in all of its names, and without imports.

    Raises InputError where it is no source of functions and constants, or lacks the function.
    """
    try:
        tree = ast.parse(textwrap.dedent(kernel.triton))
    except SyntaxError as error:
        raise InputError(f"the Triton source of the kernel {kernel.name}: {error}", cause=error) from error
    body = [n for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom))]
    functions = {n.name for n in body if isinstance(n, ast.FunctionDef)}
    assigned = [t for n in body if isinstance(n, ast.Assign) for t in ast.walk(n) if isinstance(t, ast.Name)]
    constants = {t.id for t in assigned if isinstance(t.ctx, ast.Store)}  # those of `A, B = 1, 2` as well
    if kernel.name not in functions:
        raise InputError(f"the Triton source of the kernel {kernel.name} has no function of this name")
    if others := [n for n in body if not isinstance(n, (ast.FunctionDef, ast.Assign, ast.Expr))]:
        raise InputError(
            f"the Triton source of the kernel {kernel.name} has more than functions and constants: "
            f"{ast.unparse(others[0])[:80]!r}"
        )
    tree.body = list(body)
    return ast.unparse(_Renaming(functions | constants, f"user_{kernel.key}_").visit(tree))


class _Renaming(ast.NodeTransformer):
    """Puts something in front of global names; parameters and locals of the same name are renamed alike."""

    def __init__(self, names: set[str], prefix: str) -> None:
        self.names, self.prefix = names, prefix

    def _new(self, name: str) -> str:
        return self.prefix + name if name in self.names else name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self._new(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        self.generic_visit(node)
        node.arg = self._new(node.arg)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.name = self._new(node.name)
        return node


def emit_user(node: Node, layout: Layout, wide: bool, buffers: Buffers, sizes: list[str], starts: list[str]) -> Kernel:
    """The kernel that calls a user's function.

    Raises UnsupportedError for one that has no Triton.
    """
    kernel, attrs = kernel_of(node), node.attrs
    if not kernel.triton:
        raise UnsupportedError(
            f"the kernel {kernel.name} has no Triton source, which GPUs need", node=", ".join(map(str, node.origin))
        )
    for v in (*node.operands, *node.outputs):
        assert is_row_major(v, layout), "as layout.assign has it"
    renamed(kernel)  # says what is wrong with it
    arguments = [*starts, *sizes, *map(_literal, attrs["scalars"])]
    arguments += [f"{k}={v}" for k, v in zip(attrs["constants"], attrs["values"], strict=True)]
    line = f"user_{kernel.key}_{kernel.name}({', '.join(arguments)})"
    return Kernel([line], buffers, attrs["programs"], kernel.warps, kind="user", wide=wide)


def _literal(x: int | float) -> str:
    return repr(x) if isinstance(x, int) or x - x == 0 else f'float("{x}")'

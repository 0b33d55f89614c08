"""Triton's interpreter, made quicker: what it works out anew in each operation, though it never changes, is kept.

No result is another, and no check is left out that could raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def quicken(interpreter: Any) -> None:
    """Changes `triton.runtime.interpreter`, in this process."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    builder = interpreter.interpreter_builder
    # Whether integers overflow is computed in 64 bits, by seven operations for each; only a debugger is told.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.block_type.with_element_ty = _with_element_type(tl.block_type.with_element_ty)
    tl.block_type.to_ir = _as_ir(tl.block_type.to_ir)
    tl.tensor.__init__ = _tensor(tl.tensor.__init__)
    TritonSemantic.broadcast_impl_value = _broadcast(TritonSemantic.broadcast_impl_value)


def _by_name(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Numpy's dtype of a type of Triton's, which its name tells."""
    known: dict[str, Any] = {}

    def kept(type_: Any) -> Any:
        found = known.get(type_.name)
        if found is None:
            found = known[type_.name] = of_type(type_)
        return found

    return kept


def _with_element_type(of_block: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A block type for other elements: one for each, kept at the first."""

    def kept(block: Any, element: Any) -> Any:
        others = vars(block).setdefault("_others", {})
        key = (element.name, getattr(element, "address_space", None))
        if key not in others:
            others[key] = of_block(block, element)
            vars(others[key])["_others"] = others
        return others[key]

    return kept


def _as_ir(of_block: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The builder's own form of a block type. There is one builder."""

    def kept(block: Any, builder: Any) -> Any:
        if "_ir" not in vars(block):
            block._ir = of_block(block, builder)
        return block._ir

    return kept


def _tensor(begin: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    """The constructor of a tensor: but for its handle, all attributes follow from the type."""

    def begin_kept(tensor: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("_attributes")
        if known is None:
            begin(tensor, handle, type)
            type._attributes = {name: value for name, value in vars(tensor).items() if name != "handle"}
        else:
            vars(tensor).update(known, handle=handle)

    return begin_kept


def _broadcast(compatible: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Two operands of one shape: most are that already."""

    def compatible_quickly(semantic: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or (a.is_block() and b.is_block() and list(a.shape) == list(b.shape)):
            return lhs, rhs
        return compatible(semantic, lhs, rhs)

    return compatible_quickly

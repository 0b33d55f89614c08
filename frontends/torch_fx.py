"""Imports FX graphs of ATen ops, as AOTAutograd makes them, into the graph IR.

    sizes = Sizes()
    missing = unsupported(module, sizes)          # node -> why it cannot be imported
    part = imported(module, nodes, outputs, sizes)
    onnxc.compile(part.graph)

Unlike an ONNX file, which comes as ONNX operators, the result is a graph of primitives already: the rules of
`torch_fx_pointwise`, `torch_fx_nn` and the like build it, out of ONNX's own definitions where there are such.
Each node's origin is the ATen op with the line of the user's source.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onnxc.errors import InternalError, OnnxcError, UnsupportedError
from onnxc.frontends import (  # noqa: F401  (the modules register their rules)
    torch_fx_bags,
    torch_fx_control,
    torch_fx_counted,
    torch_fx_distances,
    torch_fx_experts,
    torch_fx_gradient,
    torch_fx_indexing,
    torch_fx_linalg,
    torch_fx_movement,
    torch_fx_nn,
    torch_fx_orders,
    torch_fx_pointwise,
    torch_fx_reduction,
    torch_fx_resizing,
    torch_fx_special,
)
from onnxc.frontends.torch_fx_complex import COMPLEX, complex_rule, has_complex, part_type
from onnxc.frontends.torch_fx_sizes import Sizes
from onnxc.frontends.torch_fx_table import NAMED, RULES, Call, memory_order
from onnxc.ir import dtypes
from onnxc.ir.expr import Expr, never_equal
from onnxc.ir.graph import Graph, Source, Value
from onnxc.ir.types import TensorType
from onnxc.primitives.builder import Builder
from onnxc.primitives.host import RunTime
from onnxc.primitives.pairs import PART, Complex, Number, constant_pair, each, join, split
from onnxc.primitives.symbols import symbols_of

__all__ = ["RULES", "Imported", "Sizes", "decides", "imported", "is_size", "memory_order", "source_line", "unsupported"]

# What rules raise for arguments that they were not written for: then PyTorch computes the node.
_MISFITS = (
    ValueError, TypeError, IndexError, KeyError, AssertionError, AttributeError, ZeroDivisionError,
    GuardOnDataDependentSymNode,
)  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A part of an FX graph as a graph of primitives.

    Attributes:
        graph: its inputs are those of `inputs`, then one of shape [size, 0] for each of `sizes`. Complex tensors
            [...] are real ones [..., 2].
        inputs: the FX nodes whose tensors it reads.
        sizes: PyTorch's symbols that are no dim of these tensors, each with a sign: the size is what the symbol is with
            that sign, or zero.
    """

    graph: Graph
    inputs: tuple[fx.Node, ...]
    sizes: tuple[tuple[sympy.Symbol, int], ...]


def imported(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    sizes: Sizes,
    frozen: Mapping[fx.Node, np.ndarray[Any, Any]] | None = None,
    orders: Mapping[fx.Node, Sequence[int]] | None = None,
    run_time: RunTime | None = None,
) -> Imported:
    """The graph of some nodes of a module.

    Args:
        module: a graph of ATen ops with fake tensors in ``meta["val"]``.
        nodes: the nodes, in order. What they read from elsewhere are inputs.
        outputs: those of the nodes whose values the graph returns.
        frozen: what of the inputs is constant.
        orders: outputs that are returned with permuted axes.
        run_time: given where there is no PyTorch to leave a node to: then the graph may have steps on the host (sizes
            that data decides, branches), and ops have rules of which PyTorch's own say more about wrong data.

    Raises:
        UnsupportedError: a node cannot be imported; `unsupported` tells before.
    """
    work = _Importer(module, sizes, Builder(run_time=run_time))
    for node, array in (frozen or {}).items():
        work.values[node] = work.constant(array)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in work.values and source.op != "get_attr" and not is_size(source):
                work.add_input(source)
        work.add(node)
    for node in outputs:
        if node.op == "placeholder" and node not in work.values:
            work.add_input(node)
    return work.finished([work.output(n, orders[n] if orders and n in orders else None) for n in outputs])


def unsupported(module: fx.GraphModule, sizes: Sizes, run_time: RunTime | None = None) -> dict[fx.Node, str]:
    """The nodes that compute tensors and cannot be imported, each with the reason; `run_time` as of `imported`."""
    work = _Importer(module, sizes, Builder(run_time=run_time))
    missing: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if node.op in ("output", "get_attr") or (is_size(node) and not (run_time is not None and decides(node))):
            continue
        try:
            if node.op == "placeholder":
                work.add_input(node)
            elif node.target is operator.getitem and node.args[0] in missing:
                missing[node] = missing[node.args[0]]
            else:
                work.add(node)
        except (OnnxcError, *_MISFITS) as error:
            if node.op != "placeholder":
                missing[node] = str(error) if isinstance(error, OnnxcError) else f"{type(error).__name__}: {error}"
        if node in missing:
            work.stand_in(node)
    return missing


def _is_sole(node: fx.Node) -> bool:
    """Whether no other node reads its first argument."""
    first = node.args[0] if node.args else None
    return isinstance(first, fx.Node) and len(first.users) == 1


def _tensor(x: Any) -> torch.Tensor | None:
    value = x.meta.get("val") if isinstance(x, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number (a SymInt, say), which is known without its being computed."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def decides(node: fx.Node) -> bool:
    """Whether a node's data decides about sizes, or is a number of the graph: `nonzero`, `item`."""
    return bool(node.meta.get("unbacked_bindings"))


class _Importer:
    """One import: the builder, and what the FX nodes became."""

    def __init__(self, module: fx.GraphModule, sizes: Sizes, b: Builder) -> None:
        self.module, self.sizes, self.b = module, sizes, b
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[fx.Node] = []
        self.numbers = {node: k for k, node in enumerate(module.graph.nodes)}

    def add_input(self, node: fx.Node) -> None:
        """A tensor from outside."""
        self.values[node] = self._input(node.meta.get("val"), f"x{len(self.inputs)}")
        self.inputs.append(node)

    def _input(self, value: Any, name: str = "") -> Number:
        t = self._type(value)
        if t.dtype in PART:
            return split(self.b, self.b.input(TensorType(PART[t.dtype], (*t.shape, 2)), name))
        return self.b.input(t, name)

    def constant(self, array: np.ndarray[Any, Any]) -> Number:
        """What an array's elements are in the graph."""
        return constant_pair(self.b, array) if array.dtype.kind == "c" else self.b.constant(array)

    def stand_in(self, node: fx.Node) -> None:
        """Inputs in the place of a node's results, so that what reads them can be looked at."""
        try:
            value = node.meta.get("val")
            many = isinstance(value, (list, tuple))
            self.values[node] = [self._input(v) for v in value] if many else self._input(value)
        except OnnxcError:
            pass  # what reads it is missing too

    def _type(self, value: Any) -> TensorType:
        if not isinstance(value, torch.Tensor):
            raise UnsupportedError(f"a {type(value).__name__} is no tensor")
        return self.sizes.type(value)

    def output(self, node: fx.Node, order: Sequence[int] | None) -> Value:
        """What a graph returns for a node, its axes in an order; a number that sizes decide is a tensor of rank 0."""
        number = node.meta.get("val")
        is_number = isinstance(number, (torch.SymInt, torch.SymFloat))
        found = self.sizes.number(self.b, number) if is_number else self.value(node)
        if order is not None:
            found = each(lambda v: self.b.transpose(v, order), found)
        return join(self.b, found) if isinstance(found, Complex) else found

    def value(self, node: fx.Node) -> Number:
        """What a node became. UnsupportedError where it is no one tensor."""
        found = self.values.get(node)
        if node.op == "get_attr" and found is None:
            found = self.values[node] = self._attribute(node)
        if not isinstance(found, (Value, Complex)):
            raise UnsupportedError(f"what {node.name} gives is not there as a tensor")
        return found

    def _attribute(self, node: fx.Node) -> Number:
        tensor = operator.attrgetter(str(node.target))(self.module)
        if not isinstance(tensor, torch.Tensor) or tensor.is_quantized or tensor.device.type != "cpu":
            raise UnsupportedError(f"the constant {node.target} is no dense tensor on the CPU")
        self._type(tensor)
        with unset_fake_temporarily():
            return self.constant(tensor.detach().contiguous().resolve_conj().resolve_neg().numpy())

    # ------------------------------------------------------------ nodes

    def add(self, node: fx.Node) -> None:
        """Builds one node. Raises UnsupportedError where it cannot be."""
        if node.target is operator.getitem:
            whole, index = node.args
            assert isinstance(whole, fx.Node) and isinstance(index, int)
            self.values[node] = self.values[whole][index]
            self.value(node)
            return
        rule = RULES.get(node.target) or COMPLEX.get(node.target) or NAMED.get(str(node.target))
        if node.op != "call_function" or rule is None:
            raise UnsupportedError("there is no rule for it")
        expected = node.meta.get("val")
        many = isinstance(expected, (list, tuple))
        listed = list(expected) if many else [expected]
        told = self.b.run_time is None or not decides(node)
        types = tuple(None if v is None or not told else self._type(v) for v in listed)
        source = Source(self.numbers[node], str(node.target).removeprefix("aten."), node.name, source_line(node))
        args, options = [self._argument(a) for a in node.args], {k: self._argument(v) for k, v in node.kwargs.items()}
        if has_complex((args, options), types):
            rule = complex_rule(node.target)
        with self.b.from_origin((source,)):
            tensors = tuple(_tensor(a) for a in node.args)
            call = Call(self.b, types, str(node.target), tensors, _is_sole(node), self._region)
            result = rule(call, *args, **options)
            results = [result] if isinstance(result, (Value, Complex)) else list(result)
            if not told:
                self.sizes.bind(self.b, listed, results)
                types = tuple(self._type(v) if isinstance(v, torch.Tensor) else None for v in listed)
            checked = [self._checked(v, t, node) for v, t in zip(results, types, strict=True)]
        self.values[node] = checked if many else checked[0]

    def _checked(self, value: Number | None, expected: TensorType | None, node: fx.Node) -> Number | None:
        """The value in the dtype that PyTorch has; its shape must be PyTorch's too."""
        if value is None or expected is None:
            return None
        same = value.rank == expected.rank and isinstance(value, Complex) == (expected.dtype in PART)
        if not same or any(never_equal(a, d) for a, d in zip(value.shape, expected.shape, strict=True)):
            raise InternalError(f"{node.target} became {value.dtype}{list(value.shape)} and should be {expected}")
        dtype = part_type(expected).dtype
        return each(lambda v: self.b.reshape(self.b.cast(v, dtype), expected.shape), value)

    def _region(self, module: fx.GraphModule, b: Builder, operands: Sequence[Any]) -> list[Value]:
        """What a graph inside of the graph (a branch, a loop's body) returns for these operands, built by `b`."""
        inner = _Importer(module, self.sizes, b)
        given = iter(operands)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                inner.values[node] = next(given)
            elif node.op == "call_function" and (not is_size(node) or decides(node)):
                try:
                    inner.add(node)
                except (OnnxcError, *_MISFITS) as error:
                    raise UnsupportedError(f"inside of it, {node.target}: {error}") from error
        (end,) = (n for n in module.graph.nodes if n.op == "output")
        ends = end.args[0] if isinstance(end.args[0], (list, tuple)) else [end.args[0]]
        found = [inner.value(o) if isinstance(o, fx.Node) and not is_size(o) else None for o in ends]
        if not all(isinstance(v, Value) for v in found):
            raise UnsupportedError("a branch or a loop that gives numbers, or complex tensors")
        return found  # type: ignore[return-value]

    def _argument(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            if x.op == "get_attr" and isinstance(part := getattr(self.module, str(x.target), None), fx.GraphModule):
                return part
            return self._size(x.meta["val"]) if is_size(x) else self.value(x)
        if isinstance(x, (list, tuple)):
            return [self._argument(v) for v in x]
        return self._size(x) if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else x

    def _size(self, x: Any) -> int | float | Expr | Value:
        if isinstance(x, (int, float)):
            return x
        if x.node.expr in self.sizes.numbers:
            return self.sizes.numbers[x.node.expr]
        if isinstance(x, torch.SymInt):
            try:
                return self.sizes.dim(x)
            except UnsupportedError:  # a number that no size can be, such as 2**x
                return self.sizes.number(self.b, x)
        if isinstance(x, torch.SymFloat):
            return self.sizes.number(self.b, x)
        raise UnsupportedError(f"a number {x} that sizes decide")

    def finished(self, outputs: Sequence[Value]) -> Imported:
        """The graph, with inputs for the sizes that no tensor tells."""
        graph = self.b.graph(outputs, [f"y{k}" for k in range(len(outputs))])
        graph.name = "torch"
        told = {d for v in graph.inputs for d in v.shape if isinstance(d, Expr)}
        told |= self.sizes.decided
        hidden = [(s, sign, d) for s, sign, d in self.sizes.parts if d not in told and _uses(graph, d)]
        for _, _, d in hidden:
            graph.inputs.append(Value(TensorType(dtypes.uint8, (d, 0)), f"x{len(graph.inputs)}"))
        graph.dim_names = {str(d): str(s) for s, d in self.sizes.symbols.items()}
        return Imported(graph, tuple(self.inputs), tuple((s, sign) for s, sign, _ in hidden))


def _uses(graph: Graph, size: Any) -> bool:
    return bool(size.symbols() & symbols_of(graph))


_FRAME = re.compile(r'File "([^"\n]*)", line (\d+)')
_OWN = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def source_line(node: fx.Node) -> str:
    """`file.py:123`: the innermost line outside of PyTorch that a node comes from, else the innermost of all."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not f[0].startswith(_OWN)]
    return ":".join((own or frames)[-1]) if frames else ""

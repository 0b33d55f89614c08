"""A module by way of torch.export and of the importer of ATen ops, where PyTorch's exporters have no ONNX for it.

These are ops that they lack, and results that are numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx.node import map_arg

from onnxc.errors import UnsupportedError, UnsupportedOpError
from onnxc.frontends.torch_fx import Sizes, decides, imported, is_size, source_line, unsupported
from onnxc.ir.graph import Graph
from onnxc.primitives.host import RunTime
from onnxc.torch.arrays import array_of
from onnxc.torch.backend import decompositions
from onnxc.torch.draws import is_seeded
from onnxc.torch.layers import forget_attention, with_dense_attention

Check = Callable[[ExportedProgram], None]


@dataclass(frozen=True)
class Direct:
    """A module as a graph of primitives.

    Attributes:
        graph: its inputs and outputs are called as `inputs` and `outputs` say.
        inputs, outputs: of the leaves of a call, and of its results: the node, or a constant.
        program: what torch.export made.
    """

    graph: Graph
    inputs: tuple[fx.Node | ConstantArgument, ...]
    outputs: tuple[fx.Node | ConstantArgument, ...]
    program: ExportedProgram


def direct(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, check: Check
) -> Direct:
    """Imports a module.

    Args:
        module, args, kwargs, dynamic_shapes: as torch.export takes them.
        check: looks at the program before its ops are decomposed.

    Raises:
        UnsupportedOpError: ops for which there is no rule; lists them.
        UnsupportedError: arguments or results that are neither tensors nor constants.
    """
    forget_attention()
    with fx.experimental._config.patch(backed_size_oblivious=True):  # open dims may be 0 and 1, the example's too
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        check(program)
        with_dense_attention(program.graph_module)
        program = program.run_decompositions(dict(decompositions()))
    graph, signature = program.graph_module.graph, program.graph_signature
    nodes = {n.name: n for n in graph.nodes}
    inputs = [_leaf(s.arg, nodes) for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
    outputs = [_leaf(s.arg, nodes, _NUMBERS) for s in signature.output_specs if s.kind is OutputKind.USER_OUTPUT]
    ends = list(dict.fromkeys(o for o in outputs if isinstance(o, fx.Node)))
    weights = _weights(program, nodes)
    missing = _missing(program.graph_module)
    known = _computed_of_weights([n for n in _needed(graph, ends) if n in missing], weights)
    needed = _needed(graph, ends, known)
    missing = {n: why for n, why in missing.items() if n in needed and n not in known}
    if missing:
        listed = {n: why for n, why in missing.items() if n.target is not operator.getitem or n.args[0] not in missing}
        raise UnsupportedOpError([(source_line(n), f"{_named(n)} ({why})") for n, why in listed.items()])
    computed = [n for n in needed if n not in known and n.op == "call_function" and (not is_size(n) or decides(n))]
    run_time = RunTime()
    constants = {n: array_of(x) for n, x in (weights | known).items()}
    part = imported(program.graph_module, computed, ends, Sizes(run_time), constants, run_time=run_time)
    if part.sizes:
        raise UnsupportedError(f"no input tells the sizes {', '.join(str(s) for s, _ in part.sizes)}")
    for value, node in zip(part.graph.inputs, part.inputs, strict=True):
        value.name = node.name
    return Direct(part.graph, tuple(inputs), tuple(outputs), program)


def _named(node: fx.Node) -> str:
    """An op; of one that is there but for a result, that one."""
    if node.target is operator.getitem:
        return f"result {node.args[1]} of {node.args[0].target}"
    return str(node.target)


def _missing(module: fx.GraphModule) -> dict[fx.Node, str]:
    run_time = RunTime()
    return unsupported(module, Sizes(run_time), run_time)


_NUMBERS = (SymIntArgument, SymFloatArgument)


def _leaf(arg: Any, nodes: dict[str, fx.Node], also: tuple[type, ...] = ()) -> fx.Node | ConstantArgument:
    if isinstance(arg, ConstantArgument):
        return arg
    if type(arg) not in (TensorArgument, *also):
        raise UnsupportedError(f"{arg.name}: a number or a flag that sizes decide as an argument or a result")
    return nodes[arg.name]


def _needed(graph: fx.Graph, ends: list[fx.Node], known: Container[fx.Node] = ()) -> list[fx.Node]:
    """What the results are computed from, in order, back to what is known: a model does nothing else."""
    needed = set(ends)
    for node in reversed(graph.nodes):
        if node in needed and node not in known:
            needed.update(node.all_input_nodes)
    return [n for n in graph.nodes if n in needed]


def _weights(program: ExportedProgram, nodes: dict[str, fx.Node]) -> dict[fx.Node, torch.Tensor]:
    """The module's parameters, buffers and constants, in their memory."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert spec.target is not None
            kept = program.state_dict if spec.target in program.state_dict else program.constants
            found[nodes[spec.arg.name]] = kept[spec.target]
    return found


def _computed_of_weights(
    wanted: Sequence[fx.Node], weights: Mapping[fx.Node, torch.Tensor]
) -> dict[fx.Node, torch.Tensor]:
    """Which of some nodes are the same in each call, as weights alone decide about them, and what PyTorch gives for
    these.
    """
    values: dict[fx.Node, Any] = dict(weights)
    for node in wanted[:1] and wanted[0].graph.nodes:
        fixed = node.op == "call_function" and not is_seeded(node) and not node.is_impure()
        if fixed and all(n in values for n in node.all_input_nodes):
            values[node] = None  # not computed before it is asked for

    def value(node: fx.Node) -> Any:
        if values[node] is None:
            values[node] = node.target(*map_arg(node.args, value), **map_arg(node.kwargs, value))
        return values[node]

    with torch.no_grad():
        found = {n: value(n) for n in wanted if n in values}
    return {n: x for n, x in found.items() if isinstance(x, torch.Tensor)}

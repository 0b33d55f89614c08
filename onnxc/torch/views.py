"""Results that lie in the memory of an argument, or of another result: PyTorch makes these views, and nothing is
computed.

Who writes to such a result writes to the other tensor too. And AOTAutograd takes strides and offset of what a graph
returns, to make the view of the caller's own tensor once more: so these must be those of a view.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._functorch import config
from torch._functorch._aot_autograd.schemas import OutputAliasInfo, OutputType, ViewAndMutationMeta

_MARK = "onnxc_view"


class LostView(Exception):
    """AOTAutograd would not make the view of an argument, or of a result, that the caller is to have."""


def is_returned_view(node: fx.Node) -> bool:
    """Whether PyTorch is to make this node, a view that the graph returns."""
    return _MARK in node.meta


def set_on_arguments(module: fx.GraphModule, facts: ViewAndMutationMeta) -> None:
    """Makes results that are views of what an argument becomes views of that argument itself, in place.

    AOTAutograd writes the new contents to the argument, and then makes the view of it once more: with strides and
    offset that must be of the argument's memory, where what the graph computes lies otherwise.
    """
    graph = module.graph
    (end,) = graph.find_nodes(op="output")
    arguments, outputs = graph.find_nodes(op="placeholder"), list(end.args[0])
    first = len(facts.tokens)  # these come before all else, among arguments and results
    changed = {k: outputs[first + at] for at, k in enumerate(facts.mutated_inp_runtime_indices)}
    for at, info in enumerate(facts.output_info, first + len(changed)):
        k = info.base_idx
        if info.output_type is not OutputType.alias_of_input or k not in changed:
            continue
        chain = _chain(outputs[at])
        if changed[k] in chain and not facts.input_info[k].mutates_metadata:
            copies = {changed[k]: arguments[first + k]}
            with graph.inserting_before(end):
                for n in reversed(chain[: chain.index(changed[k])]):
                    copies[n] = graph.node_copy(n, lambda x, copies=copies: copies.get(x, x))
            outputs[at] = copies[outputs[at]]
    _check(facts, arguments[first:], outputs[first + len(changed) :])
    end.args = (type(end.args[0])(outputs),)
    for n in reversed(graph.nodes):
        if _is_view(n) and not n.users:
            graph.erase_node(n)


def check_overlap(inputs: Sequence[Any], facts: ViewAndMutationMeta) -> None:
    """LostView where arguments have elements in common, one is changed, and PyTorch takes them to be apart.

    Its quick test of two matrices of one pitch does so where one begins in the same column as the other.
    """
    if not facts.mutated_inp_runtime_indices:
        return
    groups: dict[int, list[torch.Tensor]] = {}
    for x in inputs:
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided:
            groups.setdefault(x.untyped_storage()._cdata, []).append(x)
    for tensors in groups.values():
        known = compute_overlapping_tensors(tensors, symbolic=False) if len(tensors) > 1 else range(len(tensors))
        if _have_more_in_common(tensors, known):
            raise LostView("arguments that have elements in common, and one is changed")


def common_memory(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """How arguments that have elements in common lie in their memory, each beside the first; empty: all are apart."""
    groups: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for k, x in enumerate(inputs):
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided:
            groups.setdefault(x.untyped_storage()._cdata, []).append((k, x))
    shared = [g for g in groups.values() if len(g) > 1 and _have_more_in_common([x for _, x in g], ())]
    return tuple(
        tuple((k, x.storage_offset() - g[0][1].storage_offset(), x.shape, x.stride()) for k, x in g) for g in shared
    )


def _have_more_in_common(tensors: Sequence[torch.Tensor], known: Collection[int]) -> bool:
    """Whether tensors of one memory may overlap others, besides those that are known to: in the order of where they
    begin, each beside those that begin before it ends.
    """
    if len(known) == len(tensors):
        return False
    if len({x.dtype.itemsize for x in tensors}) > 1 or not all(map(_is_known, tensors)):
        return True
    order = sorted(range(len(tensors)), key=lambda k: tensors[k].storage_offset())
    for at, k in enumerate(order):
        for other in order[at + 1 :]:
            if tensors[other].storage_offset() >= _end(tensors[k]):
                break
            if not (k in known and other in known) and _overlap(tensors[k], tensors[other]):
                return True
    return False


def _check(facts: ViewAndMutationMeta, arguments: Sequence[fx.Node], outputs: Sequence[Any]) -> None:
    """LostView where AOTAutograd makes a view by strides and offset that are another memory's, or of another dtype."""
    for node, info in zip(outputs, facts.output_info, strict=False):
        if not isinstance(node, fx.Node) or _is_replayed(info):
            continue
        if info.output_type is OutputType.alias_of_input:
            base = arguments[info.base_idx]
        elif info.output_type is OutputType.alias_of_intermediate_base_is_user_output:
            base = outputs[info.base_idx]
        elif info.output_type in _OF_INTERMEDIATE:
            base = outputs[len(facts.output_info) + info.base_idx]
        else:
            continue
        if base not in _chain(node):
            raise LostView(f"a view of {base}, which is changed")
        if node.meta["val"].dtype != base.meta["val"].dtype:
            raise LostView(f"a view of {base} to another dtype")


_OF_INTERMEDIATE = (OutputType.alias_of_intermediate, OutputType.alias_of_intermediate_save_as_output)


def _is_replayed(info: OutputAliasInfo) -> bool:
    """Whether AOTAutograd calls the ops that made a view once more, which takes no strides of the graph's result."""
    if not config.view_replay_for_aliased_outputs or info.view_meta_sequence is None:
        return False
    return not any(m.has_symbolic_inputs for m in info.view_meta_sequence.sequence)


def set_views_apart(module: fx.GraphModule) -> None:
    """Gives each result that shares memory a chain of views of its own, marked for PyTorch, in place.

    These are views of an argument, of another result, those with elements in common, and expanded ones. What else
    reads the views that were there still has them.
    """
    graph = module.graph
    (end,) = (n for n in graph.nodes if n.op == "output")
    chains = {o: _chain(o) for o in end.all_input_nodes}
    shared = [o for o, chain in chains.items() if _is_shared(chain, chains)]
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(end):
        for o in shared:
            for n in reversed(chains[o][:-1]):
                if n not in copies:
                    copies[n] = graph.node_copy(n, lambda x: copies.get(x, x))
                    copies[n].meta[_MARK] = True
    end.args = fx.node.map_arg(end.args, lambda x: copies.get(x, x))
    for n in [n for o in shared for n in chains[o][:-1]]:
        if not n.users and n in graph.nodes:
            graph.erase_node(n)


def _chain(node: fx.Node) -> list[fx.Node]:
    """A node, what it is a view of, and so on, to the tensor that is no view."""
    found = [node]
    while _is_view(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found


def _is_view(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and _is_view(source)
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def _is_shared(chain: Sequence[fx.Node], chains: dict[fx.Node, list[fx.Node]]) -> bool:
    node, root = chain[0], chain[-1]
    if root is node:
        return False
    if root.op == "placeholder":
        return True
    if any("as_strided" in str(n.target) for n in chain) and not _is_dense(root):
        return False  # it speaks of addresses in memory, which must be PyTorch's from the start
    if any(n in chains for n in chain[1:]) or _repeats(chain):
        return True
    others = [o for o, c in chains.items() if o is not node and c[-1] is root]
    return any(_may_overlap(node, o) for o in others)


def _is_dense(node: fx.Node) -> bool:
    """Whether a tensor lies in its memory as a program gives it: row by row, from the beginning."""
    x = node.meta.get("val")
    if not isinstance(x, torch.Tensor) or any(isinstance(d, torch.SymInt) for d in x.shape):
        return False
    return bool(x.is_contiguous() and x.storage_offset() == 0)


def _repeats(chain: Sequence[fx.Node]) -> bool:
    """Whether a view may have elements more than once, as an expanded tensor, or windows that overlap."""
    x = chain[0].meta.get("val")
    if not isinstance(x, torch.Tensor):
        return False
    strides = (s for d, s in zip(x.shape, x.stride(), strict=True) if type(d) is not int or d > 1)
    if any(type(s) is int and s == 0 for s in strides):
        return True
    if not any(n.target in _OF_STRIDES for n in chain):
        return False
    return not _is_known(x) or (x.numel() > 0 and int(_elements(x, _end(x)).sum()) < x.numel())


_OF_STRIDES = (torch.ops.aten.unfold.default, torch.ops.aten.as_strided.default)  # whose strides may be any


def _may_overlap(node: fx.Node, other: fx.Node) -> bool:
    """Whether two views of a tensor may have elements in common: tried out, where all sizes are known."""
    return _overlap(node.meta.get("val"), other.meta.get("val"))


def _overlap(a: Any, b: Any) -> bool:
    if not _is_known(a) or not _is_known(b) or a.dtype.itemsize != b.dtype.itemsize:
        return True
    if not a.numel() or not b.numel() or max(a.storage_offset(), b.storage_offset()) >= min(_end(a), _end(b)):
        return False
    return bool(_of_memory(_elements(a, max(map(_end, (a, b)))), b).any())


def _is_known(x: Any) -> bool:
    if not isinstance(x, torch.Tensor):
        return False
    return all(type(n) is int for n in (*x.shape, *x.stride(), x.storage_offset())) and _end(x) < 1 << 28


def _end(x: torch.Tensor) -> int:
    """How many elements of the memory lie before the end of a tensor."""
    return int(x.storage_offset() + 1 + sum((d - 1) * s for d, s in zip(x.shape, x.stride(), strict=True)))


def _elements(x: torch.Tensor, size: int) -> np.ndarray[Any, Any]:
    """Which elements of a memory of that size are a tensor's."""
    memory = np.zeros(size, np.bool_)
    _of_memory(memory, x)[...] = True
    return memory


def _of_memory(memory: np.ndarray[Any, Any], x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The part of the memory that a tensor is."""
    return np.lib.stride_tricks.as_strided(memory[x.storage_offset() :], x.shape, x.stride())

"""The standard's operator Gradient: it names tensors of the graph that it stands in, so it is replaced before others.

c = Add(a, b)                                        c  = add(a, b)
da, db = Gradient<xs = ["a", "b"], y = "c">(a, b)    da = db = 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxc.autodiff.clean import drop_unused, without_hints
from onnxc.autodiff.control import keep_steps
from onnxc.autodiff.elementwise import zeros_like
from onnxc.autodiff.reverse import gradients
from onnxc.errors import ModelError, UnsupportedError
from onnxc.ir.graph import Graph, Node, Value, cloned
from onnxc.passes.decompose import decompose
from onnxc.passes.simplify import eliminate_dead, share_common
from onnxc.primitives.builder import Builder

OP = "ai.onnx.preview.training.Gradient"


def expand_gradients(graph: Graph) -> Graph:
    """The graph as primitives, with derivatives in the place of its Gradient nodes; without such, as it is.

    Before: as imported. Raises ModelError where a node names what there is not, UnsupportedError where there is no
    derivative; others as `decompose`.
    """
    if not any(_is_gradient(n) for n in graph.nodes):
        return graph
    expansion = _Expansion(graph)
    expansion.run()
    outputs = [expansion.known[v.id] for v in graph.outputs]
    made = replace(graph, nodes=expansion.b.nodes, outputs=outputs)
    return share_common(drop_unused(without_hints(eliminate_dead(made))))


def _is_gradient(node: Node) -> bool:
    return node.op.partition("@")[0] == OP


def _names(node: Node) -> list[str]:
    """What a Gradient node names: variables, other variables, and what is differentiated."""
    return [*node.attrs.get("xs", ()), *node.attrs.get("zs", ()), node.attrs.get("y", "")]


class _Expansion:
    """Builds a graph's nodes as primitives, in parts: first what depends on no gradient, then one Gradient after the
    other with what depends on it.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.b = Builder(differentiable=True)
        self.known: dict[int, Value] = {v.id: v for v in graph.inputs}  # by id of the imported value
        self.named = {v.name: v for v in graph.values() if v.name}
        self.mentioned = {name for n in graph.nodes if _is_gradient(n) for name in _names(n)}

    def run(self) -> None:
        lifted = [n for n in self.graph.nodes if n.op == "constant" and n.output.name in self.mentioned]
        arrays = [(Value(n.output.type, n.output.name), n) for n in lifted]  # so that nothing is folded into them
        self.known.update({n.output.id: v for v, n in arrays})
        self._expand([n for n in self.graph.nodes if n not in lifted])
        made = [Node("constant", (), [v], n.attrs, (), n.origin) for v, n in arrays]
        self.b.nodes = [*made, *self.b.nodes]

    def _expand(self, waiting: list[Node]) -> None:
        while waiting:
            ready, later = self._ready(waiting)
            self._build(ready)
            if later:
                self._differentiate(later.pop(0))
            waiting = later

    def _ready(self, nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
        """Those that depend on no Gradient among them, and the others."""
        blocked: set[int] = set()
        ready, later = [], []
        for node in nodes:
            if _is_gradient(node) or any(v.id in blocked for v in node.operands):
                blocked.update(v.id for v in node.outputs)
                later.append(node)
            else:
                ready.append(node)
        return ready, later

    def _build(self, nodes: Sequence[Node]) -> None:
        if not nodes:
            return
        made = {v.id: v for n in nodes for v in n.outputs}
        taken = list({v.id: v for n in nodes for v in n.operands if v.id not in made}.values())
        inner = {v.id: self.known[v.id] for v in taken}
        copies = cloned(nodes, inner)
        read = {v.id for n in self.graph.nodes for v in n.operands} | {v.id for v in self.graph.outputs}
        wanted = [v for v in made.values() if v.id in read or v.name in self.mentioned]
        part = replace(
            self.graph, inputs=list({self.known[v.id].id: self.known[v.id] for v in taken}.values()), nodes=copies,
            outputs=[inner[v.id] for v in wanted], output_names=[v.name or f"out{k}" for k, v in enumerate(wanted)],
        )  # fmt: skip
        found = decompose(part, differentiable=True)
        if self._draws(found.nodes) and self._draws(self.b.nodes):
            raise UnsupportedError("random operators that depend on a Gradient, beside others, are not supported yet")
        self.b.nodes += found.nodes
        self.known.update({old.id: new for old, new in zip(wanted, found.outputs, strict=True)})

    def _draws(self, nodes: Sequence[Node]) -> bool:
        return any(n.op == "random_state" for n in nodes)

    # ------------------------------------------------------------ one node

    def _differentiate(self, node: Node) -> None:
        xs, zs = list(node.attrs.get("xs", ())), list(node.attrs.get("zs", ()))
        if not xs or len(node.inputs) != len(xs) + len(zs) or len(node.outputs) > len(xs):
            raise self._wrong(node, f"{len(node.inputs)} inputs and {len(node.outputs)} outputs for {xs} and {zs}")
        variables = [self._value(node, name) for name in (*xs, *zs)]
        given = [self.known[v.id] if v is not None else None for v in node.inputs]
        y = self._value(node, node.attrs.get("y", ""))
        with self.b.from_origin(node.origin):
            if any(g is not None and g is not v for g, v in zip(given, variables, strict=True)):
                y, variables = self._elsewhere(node, y, variables, given)
            wrt = variables[: len(xs)]
            if not all(v.dtype.is_float for v in (y, *wrt)):
                raise self._wrong(node, f"derivatives of {y.t} by {', '.join(str(v.t) for v in wrt)}")
            self.b.nodes = keep_steps(replace(self.graph, nodes=self.b.nodes), wrt).nodes
            seed = self.b.full(y.shape, self.b.scalar(1, y.dtype), y.dtype)
            found = gradients(self.b, list(self.b.nodes), {y.id: seed}, wrt)
            for out, x, dx in zip(node.outputs, wrt, found, strict=False):
                self.known[out.id] = zeros_like(self.b, x) if dx is None else dx

    def _elsewhere(
        self, node: Node, y: Value, variables: Sequence[Value], given: Sequence[Value | None]
    ) -> tuple[Value, list[Value]]:
        """y, computed from other values of the variables, and these."""
        at: dict[int, Value] = {}
        for v, g in zip(variables, given, strict=True):
            if g is not None and (g.dtype is not v.dtype or g.rank != v.rank):
                raise self._wrong(node, f"a variable is {v.t}, and {g.t} is given for it")
            new = v if g is None else g
            at[v.id] = self.b.one("copy", new)  # of its own: a value that is given twice is two variables
        points = [at[v.id] for v in variables]
        depends = {v.id for v in variables}
        again = []
        for n in self.b.nodes:
            if any(v.id in depends for v in n.operands) and not any(v.id in at for v in n.outputs):
                depends.update(v.id for v in n.outputs)
                again.append(n)
        self.b.nodes += cloned(again, at)
        return at.get(y.id, y), points

    def _value(self, node: Node, name: str) -> Value:
        value = self.known.get(self.named[name].id) if name in self.named else None
        if value is None:
            raise self._wrong(node, f"no tensor {name!r} is computed before it")
        return value

    def _wrong(self, node: Node, what: str) -> ModelError:
        return ModelError(f"Gradient: {what}", node=next((str(s) for s in node.origin), None))

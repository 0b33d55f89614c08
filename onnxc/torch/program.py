"""An FX graph as something to call: compiled programs, and between them what only PyTorch can compute.

Tensors go in and come out in place: a program reads a contiguous tensor where it lies, and its outputs are tensors in
the arrays that it wrote.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
import torch
from torch import fx
from torch.autograd import forward_ad

from onnxc.compiler import compile
from onnxc.errors import InputError, OnnxcError, UnsupportedError, UnsupportedOpError
from onnxc.frontends.torch_fx import Imported, Sizes, imported, is_size, memory_order, source_line, unsupported
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.torch.arrays import Array, array_of, complex_of, has_own_dtype, plain, reals_of, tensor_of
from onnxc.torch.calls import Calls, Watch
from onnxc.torch.draws import is_draw, set_draws_apart
from onnxc.torch.regions import DECIDED, Region, as_region, regions
from onnxc.torch.stages import must_run, stages
from onnxc.torch.views import is_returned_view, set_views_apart


@dataclass(frozen=True)
class Fallback:
    """An op that PyTorch computes.

    Attributes:
        op: its overload, ``aten.nonzero.default``.
        reason: why it is not compiled.
        line: ``file.py:123``, where the user's source calls it.
    """

    op: str
    reason: str
    line: str

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True)
class Options:
    """How a graph is compiled.

    Attributes:
        frozen: positions of the inputs that are constants as long as they do not change.
        fallback: whether PyTorch computes what cannot be compiled; else that is an error.
        compile: options of :func:`onnxc.compile`.
        views: whether results that are views of arguments, or of each other, are made as such; else they have memory of
            their own, as gradients should.
    """

    frozen: tuple[int, ...] = ()
    fallback: bool = True
    compile: Mapping[str, Any] = field(default_factory=dict)
    views: bool = True


class Program:
    """A graph of ATen ops that is called with a list of tensors and numbers, and returns a list of such.

    Sections are compiled at the first call, when the weights are known. Weights that are constants are looked at in
    each call: where one is another tensor, or was changed in place, the graph is compiled once more, with all weights
    as inputs, and stays so.

    Args:
        module: the graph, with fake tensors in ``meta["val"]``.
        options: how it is compiled.

    Raises:
        UnsupportedError: it has nodes that cannot be compiled, and `options.fallback` is off.
    """

    def __init__(self, module: fx.GraphModule, options: Options) -> None:
        self.module, self.options = module, options
        self.sizes = Sizes()
        if options.views:
            set_views_apart(module)
        set_draws_apart(module)
        found = {n: why for n, why in unsupported(module, self.sizes).items() if not is_returned_view(n)}
        self.missing = missing = _whole(found, module)
        self.inner: list[Program] = []  # of branches and loops
        self.regions = {
            at: as_region(inside, self._inside) for n in missing if n.target in DECIDED for at, inside in regions(n)
        }
        self.fallbacks = [
            Fallback(str(n.target), why, source_line(n))
            for n, why in missing.items()
            if n.target is not operator.getitem and not _is_check(n) and not is_draw(n) and n.target not in DECIDED
        ]
        if self.fallbacks and not options.fallback:
            raise _not_compiled(self.fallbacks)
        self.stages = stages(module.graph, missing)
        self.placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        (end,) = (n for n in module.graph.nodes if n.op == "output")
        self.outputs: list[Any] = list(end.args[0])
        self.models: list[CompiledModel] = []
        self.compiles = 0
        self._lock = threading.Lock()
        self._ready: Ready | None = None  # replaced as a whole: other threads may be calling

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        args = tuple(args)
        found = self.quick(args)
        if found is not None:
            return found
        if any(map(_has_tangent, args)):
            return self._by_pytorch(args)
        ready = self._ready
        if ready is None or not ready.guard.holds(args):
            ready = self._prepared(args)
        return ready.run(tuple(map(plain, args)))

    def quick(self, args: tuple[Any, ...]) -> list[Any] | None:
        """The results, where one program is all, and the call is like one before: a single look at the arguments."""
        ready = self._ready
        if ready is None or ready.quick is None or forward_ad._current_level >= 0:
            return None
        return ready.quick(args)

    def _by_pytorch(self, args: tuple[Any, ...]) -> list[Any]:
        """The results op by op, with their tangents: derivatives in forward mode, which programs have not."""
        steps = [Eager(n, self.regions) for n in self.module.graph.nodes if n.op == "call_function"]
        return _sequence(steps, self.placeholders, self.outputs, self.module)(args)

    def _prepared(self, args: Sequence[Any]) -> Ready:
        with self._lock:
            if self._ready is None or not self._ready.guard.holds(args):
                self._ready = self._compiled(args)
            return self._ready

    def _inside(self, module: fx.GraphModule) -> Program:
        """The program of a branch, or of a loop's body."""
        options = self.options
        self.inner.append(Program(module, Options((), options.fallback, options.compile, views=False)))
        return self.inner[-1]

    def all_parts(self) -> Iterator[Program]:
        """This, and what is inside of its branches and loops."""
        yield self
        for program in self.inner:
            yield from program.all_parts()

    # ------------------------------------------------------------ compiling

    def _compiled(self, args: Sequence[Any]) -> Ready:
        """For these weights the first time, for weights as inputs from then on."""
        frozen = {k: args[k] for k in self.options.frozen if is_freezable(args[k])} if not self.compiles else {}
        self.compiles += 1
        guard, watch = Guard(frozen), Watch(frozen)
        self.models = []
        constants = {self.placeholders[k]: array_of(plain(t)) for k, t in frozen.items()}
        sources = self._sources()
        ends = set(self._needed())
        steps: list[Any] = []
        for stage in self.stages:
            if stage.compiled:
                steps.append(self._section(stage.compiled, ends, constants, sources))
            steps += [Eager(n, self.regions) for n in stage.eager]
        steps = _live(steps, self.outputs)
        direct = _direct(steps, self.placeholders, self.outputs, watch)
        if direct is not None:
            return Ready(guard, direct.run, direct.quick)
        return Ready(guard, _sequence(steps, self.placeholders, self.outputs, self.module))

    def _section(
        self, nodes: list[fx.Node], ends: set[fx.Node], constants: Mapping[fx.Node, Array], sources: Sources
    ) -> Section | Interpreted:
        inside = set(nodes)
        last = {o for o in self.outputs if isinstance(o, fx.Node)}
        outputs = [n for n in nodes if (n in ends or any(u not in inside for u in _readers(n))) and _is_tensor(n)]
        orders = {n: o for n in outputs if n in last or self._read_by_pytorch(n) if (o := _turned(n)) is not None}
        try:
            part = imported(self.module, nodes, outputs, self.sizes, constants, orders)
            _check_told(part, sources)
            model = compile(part.graph, **self.options.compile)
        except InputError:  # an option is wrong
            raise
        except OnnxcError as error:
            if not self.options.fallback:
                raise
            self.fallbacks += [Fallback(str(n.target), f"its program: {error}", source_line(n)) for n in nodes]
            return Interpreted(nodes)
        self.models.append(model)
        return Section(part, model, outputs, orders, sources)

    def _read_by_pytorch(self, node: fx.Node) -> bool:
        return any(u in self.missing or is_returned_view(u) for u in node.users)

    def _needed(self) -> list[fx.Node]:
        return [o for o in self.outputs if isinstance(o, fx.Node)]

    def _sources(self) -> Sources:
        """Where a call tells the value of each symbol."""
        found: Sources = {}
        for known in (self.placeholders, [n for stage in self.stages for n in stage.eager]):
            for node in known:
                value = node.meta.get("val")
                if isinstance(value, torch.SymInt):
                    found.setdefault(value.node.expr, (node, None))
            for node in known:
                value = node.meta.get("val")
                for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                    if isinstance(size, torch.SymInt):
                        found.setdefault(size.node.expr, (node, axis))
        return found


Run = Callable[[tuple[Any, ...]], list[Any]]


@dataclass(frozen=True)
class Ready:
    """A graph that is compiled.

    Attributes:
        guard: whether this holds for given arguments.
        run: a call, where it does.
        quick: a call that looks at the guard too; None where it has to go another way.
    """

    guard: Guard
    run: Run
    quick: Callable[[tuple[Any, ...]], list[Any] | None] | None = None


Sources = dict[sympy.Expr, tuple[fx.Node, "int | None"]]


def _check_told(part: Imported, sources: Sources) -> None:
    unknown = [str(s) for s, _ in part.sizes if s not in sources]
    if unknown:
        raise UnsupportedError(f"no input tells the sizes {', '.join(unknown)}")


def _not_compiled(fallbacks: Sequence[Fallback]) -> OnnxcError:
    return UnsupportedOpError([(f.line, f"{f.op} ({f.reason})") for f in fallbacks])


def _whole(missing: dict[fx.Node, str], module: fx.GraphModule) -> dict[fx.Node, str]:
    """Where PyTorch has to look at the memory of what another node gave, that memory must be PyTorch's: all nodes are
    its.
    """
    for node in missing:
        if "as_strided" in str(node.target) and any(n.op == "call_function" for n in node.all_input_nodes):
            beside = f"{node.target} ({missing[node]}) reads the memory of what others give"
            computed = (n for n in module.graph.nodes if n.op == "call_function" and not is_size(n))
            return {n: missing.get(n, beside) for n in computed}
    return missing


def _turned(node: fx.Node) -> tuple[int, ...] | None:
    """The order in memory that PyTorch gives a tensor, where it is not the row-major one."""
    order = memory_order(node.meta["val"])
    return None if order is None or list(order) == sorted(order) else order


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a tensor: not nodes that ask for its sizes, which are known."""
    return [u for u in node.users if u.op != "output"]


def _is_empty(node: fx.Node) -> bool:
    return any(isinstance(d, int) and d == 0 for d in node.meta["val"].shape)


def _inverse(order: Sequence[int] | None) -> list[int] | None:
    return None if order is None else np.argsort(order).tolist()


_ASSERTIONS = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)


def _is_check(node: fx.Node) -> bool:
    """Whether a node computes nothing: it looks at sizes that data decides, or at a flag that a program gives."""
    if node.target in _ASSERTIONS:
        return True
    return node.meta.get("val") is None and not any(map(_is_tensor, node.all_input_nodes))


def _has_tangent(x: object) -> bool:
    if forward_ad._current_level < 0 or not isinstance(x, torch.Tensor):
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


# ---------------------------------------------------------------- weights


def is_freezable(tensor: object) -> bool:
    """Whether a tensor tells when it is changed: one made in inference mode has no version."""
    plain = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and not tensor.is_inference()  # type: ignore[attr-defined]


class Guard:
    """Watches tensors that were compiled in: each must be the same object, of the same version, in the same memory."""

    def __init__(self, tensors: Mapping[int, torch.Tensor] | None = None) -> None:
        given = tensors or {}
        self._positions = tuple(given)
        self._tensors = tuple(given.values())
        self._versions = [t._version for t in self._tensors]
        self._memory = [t.data_ptr() for t in self._tensors]

    def holds(self, args: Sequence[Any]) -> bool:
        """Whether nothing has changed."""
        tensors = self._tensors
        if not tensors:
            return True
        if not all(map(operator.is_, map(args.__getitem__, self._positions), tensors)):
            return False
        return [t._version for t in tensors] == self._versions and [t.data_ptr() for t in tensors] == self._memory


# ---------------------------------------------------------------- steps


class Section:
    """A compiled part: reads tensors of the environment, and writes some."""

    def __init__(
        self,
        part: Imported,
        model: CompiledModel,
        outputs: Sequence[fx.Node],
        orders: Mapping[fx.Node, Sequence[int]],
        sources: Sources,
    ) -> None:
        self.model, self.inputs, self.outputs = model, part.inputs, tuple(outputs)
        self.hidden = [(*sources[s], sign) for s, sign in part.sizes]
        self.complex = [k for k, n in enumerate(self.inputs) if n.meta["val"].is_complex()]
        self.calls = Calls(model, range(len(self.inputs)))
        self.finish = [
            (k, complex_of if n.meta["val"].is_complex() else tensor_of, _inverse(orders.get(n)))
            for k, n in enumerate(outputs)
            if n in orders or not has_own_dtype(n.meta["val"]) or n.meta["val"].is_complex() or _is_empty(n)
        ]

    def call(self, calls: Calls, args: tuple[Any, ...], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
        """Runs the program.

        Args:
            calls: quick ones.
            args: the tensors that `calls` reads, and others.
            sizes: what the program is told beside its inputs.
        """
        answers = calls(args, sizes)
        return self.tensors(self._slowly(calls, args, sizes) if answers is None else answers)

    def _slowly(self, calls: Calls, args: tuple[Any, ...], sizes: Sequence[int]) -> Sequence[Array]:
        tensors = [args[k] for k in calls.reads]
        if self.complex:
            tensors = [reals_of(t) if k in self.complex else t for k, t in enumerate(tensors)]
        try:
            arrays = [t.numpy() for t in tensors]
        except (RuntimeError, TypeError):  # dtypes that numpy lacks, and the like
            arrays = list(map(array_of, tensors))
        answers = self.model.answers((*arrays, *(np.empty((n, 0), np.uint8) for n in sizes)))
        if not self.complex:
            calls.learn(args, arrays, sizes)
        return answers

    def tensors(self, answers: Sequence[Array]) -> list[torch.Tensor]:
        """What the program has written, as PyTorch is to have it."""
        if not self.finish:
            return list(map(torch.from_numpy, answers))
        found: list[Any] = list(answers)
        for k, made, order in self.finish:
            found[k] = made(found[k])
            found[k] = found[k] if found[k].numel() else found[k].new_empty(found[k].shape)  # numpy's strides are 0
            found[k] = found[k] if order is None else found[k].permute(order)
        return [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in found]

    def __call__(self, env: dict[fx.Node, Any], module: fx.GraphModule) -> None:
        sizes = [_told(env[n], axis, sign) for n, axis, sign in self.hidden]
        env.update(zip(self.outputs, self.call(self.calls, tuple([env[n] for n in self.inputs]), sizes), strict=True))

    @property
    def reads(self) -> list[fx.Node]:
        return [*self.inputs, *(n for n, _, _ in self.hidden)]


def _told(source: Any, axis: int | None, sign: int) -> int:
    """What a program is told of a number, or of a tensor's size: see `Imported.sizes`."""
    size: int = source if axis is None else source.shape[axis]
    return max(sign * size, 0)


class Eager:
    """One node that PyTorch computes; where it decides about regions, these are programs."""

    def __init__(self, node: fx.Node, regions: Mapping[fx.Node, Region] | None = None) -> None:
        self.node, self.regions = node, regions or {}
        self.call: Any = DECIDED[node.target] if regions and node.target in DECIDED else node.target

    def __call__(self, env: dict[fx.Node, Any], module: fx.GraphModule) -> None:
        def value(n: fx.Node) -> Any:
            if n in self.regions:
                return self.regions[n]
            return operator.attrgetter(str(n.target))(module) if n.op == "get_attr" else env[n]

        node = self.node
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        env[node] = self.call(*args, **kwargs)

    @property
    def reads(self) -> list[fx.Node]:
        return list(self.node.all_input_nodes)


class Interpreted:
    """Nodes whose program could not be compiled."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.steps = [Eager(n) for n in _with_sizes(nodes)]

    def __call__(self, env: dict[fx.Node, Any], module: fx.GraphModule) -> None:
        for step in self.steps:
            step(env, module)

    @property
    def reads(self) -> list[fx.Node]:
        return [n for step in self.steps for n in step.reads]


def _with_sizes(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes, and the sizes that they are called with, which a program would know without computing them."""
    wanted, pending = set(nodes), list(nodes)
    while pending:
        for n in pending.pop().all_input_nodes:
            if n not in wanted and n.op == "call_function" and is_size(n):
                wanted.add(n)
                pending.append(n)
    return [n for n in nodes[0].graph.nodes if n in wanted]


def _sequence(steps: list[Any], placeholders: Sequence[fx.Node], outputs: Sequence[Any], module: fx.GraphModule) -> Run:
    """What runs the steps one after the other."""
    last = {n: k for k, step in enumerate(steps) for n in step.reads}
    kept = {o for o in outputs if isinstance(o, fx.Node)}
    dead = [[n for n, at in last.items() if at == k and n not in kept] for k in range(len(steps))]

    def run(args: Sequence[Any]) -> list[Any]:
        env = dict(zip(placeholders, args, strict=True))
        for step, gone in zip(steps, dead, strict=True):
            step(env, module)
            for n in gone:
                env.pop(n, None)
        return [_output(o, env, module) for o in outputs]

    return run


def _output(o: Any, env: Mapping[fx.Node, Any], module: fx.GraphModule) -> Any:
    if not isinstance(o, fx.Node):
        return o
    return operator.attrgetter(str(o.target))(module) if o.op == "get_attr" else env[o]


def _live(steps: list[Any], outputs: Sequence[Any]) -> list[Any]:
    """Without single nodes that nothing reads: sizes that the programs know themselves."""
    needed = {o for o in outputs if isinstance(o, fx.Node)}
    kept = []
    for step in reversed(steps):
        if isinstance(step, Eager) and step.node not in needed and not must_run(step.node):
            continue
        kept.append(step)
        needed |= set(step.reads)
    return kept[::-1]


def _direct(steps: list[Any], placeholders: Sequence[fx.Node], outputs: Sequence[Any], watch: Watch) -> Direct | None:
    """For one program that gives all outputs in order, from the arguments alone."""
    if len(steps) != 1 or not isinstance(steps[0], Section) or list(steps[0].outputs) != list(outputs):
        return None
    section = steps[0]
    position = {n: k for k, n in enumerate(placeholders)}
    calls = Calls(section.model, [position[n] for n in section.inputs], watch)
    return Direct(section, calls, [(position[n], axis, sign) for n, axis, sign in section.hidden])


class Direct:
    """One program that is all of a graph."""

    def __init__(self, section: Section, calls: Calls, hidden: Sequence[tuple[int, int | None, int]]) -> None:
        self.section, self.calls, self.hidden = section, calls, hidden
        self._plain = not section.finish

    def _sizes(self, args: tuple[Any, ...]) -> list[int]:
        return [_told(args[k], axis, sign) for k, axis, sign in self.hidden]

    def run(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The results for arguments of any kind."""
        return self.section.call(self.calls, args, self._sizes(args) if self.hidden else ())

    def quick(self, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """The results; None where this call has to go another way."""
        answers = self.calls(args, self._sizes(args) if self.hidden else ())
        if answers is None:
            return None
        return list(map(torch.from_numpy, answers)) if self._plain else self.section.tensors(answers)


__all__ = ["Fallback", "Guard", "Options", "Program"]

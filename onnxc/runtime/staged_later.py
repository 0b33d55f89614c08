"""Parts of a model that are compiled when it runs, for the types, sizes and contents that came."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxc.errors import NeedsSizesError, OnnxcError, SizesError, shortened
from onnxc.ir.dtypes import from_numpy
from onnxc.ir.expr import Dim, Sym, symbols
from onnxc.ir.graph import Graph, Node, Value
from onnxc.ir.text import from_text
from onnxc.ir.types import OptionalType, SequenceType, TensorType, Type
from onnxc.runtime.compiled_model import MANY, MOST_KEPT, CompiledModel
from onnxc.runtime.staged_steps import STEPS, Sizes, Step, Values
from onnxc.runtime.staged_values import on_host

if TYPE_CHECKING:
    from onnxc.runtime.staged import StagedModel

Array = np.ndarray[Any, Any]
Compiler = Callable[[Graph, Mapping[str, Any]], CompiledModel]
Places = set[tuple[int, int]]  # of dims: number of the input, and axis

_compiler: list[Compiler] = []


def set_compiler(compiler: Compiler) -> None:
    """Says how graphs are compiled that wait for the run (with the options of the model that they are part of)."""
    _compiler[:] = [compiler]


def _compile(graph: Graph, options: Mapping[str, Any]) -> CompiledModel:
    if not _compiler:  # a model that was loaded: the one thing that it needs the compiler for
        importlib.import_module("onnxc.compiler")
    return _compiler[0](graph, options)


class Later(Step):
    """ONNX nodes that are compiled for the types (and some contents) that came.

    Sizes stay open, but for those that an operator has asked for as numbers: they are `pinned` from then on.
    """

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.text: str = described["text"]
        self.held = {name: model._arrays[k] for name, k in described["held"].items()}
        self.models: dict[Any, CompiledModel] = {}
        self.pinned: Places = set()
        self.made = 0

    def outcome(self, given: Values, sizes: Sizes) -> Sequence[Any]:
        fixed: tuple[int, ...] = self.attrs["fixed"]
        for k in fixed:
            given[k] = on_host(given[k])
        contents = {k: given[k] for k in fixed if isinstance(given[k], np.ndarray)}
        shown = [None if k in contents else x for k, x in enumerate(given)]
        pinned: Places = set()  # besides, where a size of 1 is computed that is to be broadcast
        while True:
            model = self._model(shown, contents, given, pinned)
            try:
                return self.model.part_of(model, tuple(x for k, x in enumerate(given) if k not in contents))
            except SizesError as error:
                more = _places(typed(shown, self.pinned | pinned), error.symbols) - pinned
                if not more:
                    raise SizesError(error.message, node=error.node) from None  # its symbols are of this part alone
                pinned |= more

    def _model(self, shown: Values, contents: Mapping[int, Array], given: Values, pinned: Places) -> CompiledModel:
        """The program for such values, with these dims as numbers."""
        model = self.models.get(self._key(shown, contents, pinned))
        if model is None:
            model = self._compiled(shown, contents, given, pinned)
            self._keep(self._key(shown, contents, pinned), model)
        return model

    def _key(self, shown: Values, contents: Mapping[int, Array], pinned: Places) -> Any:
        held = tuple((k, x.dtype.str, x.shape, x.tobytes()) for k, x in contents.items())
        return repr(typed(shown, self.pinned | pinned)), held

    def _keep(self, key: Any, model: CompiledModel) -> None:
        while len(self.models) >= MOST_KEPT:
            self.models.pop(next(iter(self.models)), None)
        self.models[key] = model
        self.model.waiting.add(model)
        if self.model.seeded is not None:
            model.seed(self.model.seeded[0], calls=self.model.seeded[1])
        self.made += 1
        if self.made == MANY:
            names = shortened(", ".join(self.node.split(" or ")[:3]))
            warnings.warn(
                f"{names} was compiled {MANY} times, anew for each content, size or rank of what it reads: slow",
                stacklevel=2,
            )

    def _compiled(self, shown: Values, contents: Mapping[int, Array], given: Values, pinned: Places) -> CompiledModel:
        options = {**self.model.manifest["options"], "threads": self.model.threads}
        while True:
            types = typed(shown, self.pinned | pinned)
            try:
                return _compile(self._graph(types, contents), options)
            except NeedsSizesError as error:
                more = self._wanted(shown, contents, options, error) - self.pinned
                if not more:
                    raise
                self.pinned |= more
            except OnnxcError:  # an op may want sizes as numbers, and not say which
                exact = [_exact(t, x) for t, x in zip(types, given, strict=True)]
                if list(types) == exact:
                    raise
                found = _compile(self._graph(exact, contents), options)
                self.pinned |= {(k, a) for k, t in enumerate(exact) if isinstance(t, TensorType) for a in range(t.rank)}
                return found  # is for these sizes alone, and is kept for them

    def _wanted(
        self, shown: Values, contents: Mapping[int, Array], options: Mapping[str, Any], error: NeedsSizesError
    ) -> Places:
        """The dims that an error asks for: asked again with a symbol of its own for each dim, equal ones too."""
        types = typed(shown, self.pinned, apart=True)
        try:
            _compile(self._graph(types, contents), options)
        except NeedsSizesError as again:
            error = again
        except OnnxcError:
            types = typed(shown, self.pinned)
        return _places(types, {s.key for d in error.dims for s in symbols(d)})  # type: ignore[arg-type]

    def _graph(self, types: Sequence[Type | None], contents: Mapping[int, Array]) -> Graph:
        graph = from_text(self.text, self.held)
        inputs: list[Value] = []
        constants = []
        names = Counter(v.name for v in graph.inputs)
        for k, (v, t) in enumerate(zip(graph.inputs, types, strict=True)):
            if k in contents:
                v.type = TensorType(from_numpy(contents[k].dtype), contents[k].shape)
                constants.append(Node("constant", (), [v], {"value": contents[k]}))
            else:
                v.type, v.name = t, v.name if v.name and names[v.name] == 1 else f"in{k}"
                inputs.append(v)
        graph.inputs, graph.nodes = inputs, [*constants, *graph.nodes]
        told = Counter(v.name for v in graph.outputs)
        graph.output_names = [
            v.name if v.name and told[v.name] == 1 else f"out{k}" for k, v in enumerate(graph.outputs)
        ]
        return graph


def _places(types: Sequence[Type | None], asked: Set[str]) -> Places:
    """The dims whose sizes these symbols are."""
    tensors = [(k, t) for k, t in enumerate(types) if isinstance(t, TensorType)]
    return {(k, a) for k, t in tensors for a, d in enumerate(t.shape) if asked & {s.key for s in symbols(d)}}


def typed(
    values: Sequence[Any], pinned: Set[tuple[int, int]] = frozenset(), *, apart: bool = False
) -> list[Type | None]:
    """The types of values: dims of one size share a symbol, if they are not kept `apart`; 0, 1 and those that are
    `pinned` stay numbers.
    """
    known: dict[Any, Dim] = {0: 0, 1: 1}

    def dim(n: int, at: tuple[int, int] | None = None) -> Dim:
        key: Any = (n, at) if apart and at is not None and n > 1 else n
        if at in pinned:
            return n
        if key not in known:
            known[key] = Sym(f"s{len(known) - 2}", 2)
        return known[key]

    return [_type_of(x, dim, k) for k, x in enumerate(values)]


def _type_of(x: Any, dim: Callable[..., Dim], number: int | None) -> Type | None:
    if hasattr(x, "dtype"):
        places = [None if number is None else (number, a) for a in range(x.ndim)]
        return TensorType(from_numpy(x.dtype), tuple(map(dim, x.shape, places)))
    if isinstance(x, list):
        kinds = {repr(t): t for t in (_type_of(v, dim, None) for v in x)}
        return SequenceType(next(iter(kinds.values())) if len(kinds) == 1 else None)
    return OptionalType(None)


def _exact(t: Type | None, x: Any) -> Type | None:
    return t.with_shape(x.shape) if isinstance(t, TensorType) else t


STEPS["later"] = Later

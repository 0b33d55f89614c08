"""``torch.compile(module, backend="onnxc")``: the backend that Dynamo finds through the entry point.

Dynamo traces the Python code and guards it; AOTAutograd makes one graph of ATen ops of it, without mutations and
aliases; that graph is a :class:`onnxc.torch.program.Program`. Without gradients, parameters and buffers are constants,
packed as kernels want them. With gradients, AOTAutograd's forward and backward graphs are two programs, and all weights
are inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.ao.quantization.fx import _decomposed
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onnxc.errors import InputError, UnsupportedError
from onnxc.frontends.torch_fx import RULES, source_line
from onnxc.report import Report
from onnxc.torch.composites import COMPOSITES
from onnxc.torch.draws import is_draw, kept_apart
from onnxc.torch.layers import DECOMPOSITIONS, with_dense_attention
from onnxc.torch.lists import LISTS
from onnxc.torch.losses import with_losses
from onnxc.torch.pools import POOLS
from onnxc.torch.program import Fallback, Options, Program
from onnxc.torch.recurrent import with_layers
from onnxc.torch.views import LostView, check_overlap, common_memory, set_on_arguments

_OWN = ("freezing", "fallback")
_PASSED = ("threads", "cache", "accuracy", "tuned", "mode", "fusion", "attention", "dtype", "memory_limit", "record")
_programs: list[tuple[str, weakref.ref[Program]]] = []
_left: list[tuple[weakref.ref[fx.GraphModule], str]] = []  # graphs that PyTorch runs as they are, and why


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What ``torch.compile`` calls for each graph.

    Args:
        module: Dynamo's graph.
        inputs: example inputs.
        options: ``freezing`` (weights are constants, where no gradient is asked for; default True), ``fallback``
            (PyTorch computes what cannot be compiled; default True), and options of :func:`onnxc.compile`:
            ``threads``, ``cache``, ``accuracy``, ``tuned``, ``fusion``, ``attention``, ``dtype``, ``memory_limit``,
            ``record``.
        mode: ``max-autotune``, as of :func:`onnxc.compile`.

    Raises:
        InputError: an option that does not exist, or a flag that is neither True nor False.
    """
    chosen, freezing = _chosen(dict(options or {}) | ({"mode": mode} if mode else {}))
    plain: list[Program] = []
    changes: list[bool] = []

    def compiled(kind: str, frozen: bool) -> Callable[..., Any]:
        def compiler(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
            facts = _facts()
            positions = _weights(facts) if frozen else ()
            if facts is not None and kind != "backward":
                check_overlap(inputs, facts)
                changes.append(any(info.mutates_data for info in facts.input_info))
                set_on_arguments(graph, facts)
            program = Program(graph, Options(positions, chosen.fallback, chosen.compile, kind != "backward"))
            if kind == "inference" and _is_plain(program, inputs):
                plain.append(program)
            _programs[:] = [*((k, ref) for k, ref in _programs if ref() is not None), (kind, weakref.ref(program))]
            return _boxed(program)

        return compiler

    def traced(keep: bool) -> Callable[..., Any]:
        plain.clear()
        with _views_by_strides(inputs):
            return aot_autograd(  # type: ignore[no-any-return]
                fw_compiler=compiled("forward", False),
                bw_compiler=compiled("backward", False),
                inference_compiler=compiled("inference", freezing),
                partition_fn=_partition,
                decompositions=decompositions(),
                keep_inference_input_mutations=keep,
            )(prepared, inputs)

    _check_out(module)
    _as_traced(module, inputs)
    prepared = with_dense_attention(with_losses(with_layers(module)))
    try:
        found = traced(keep=False)
    except LostView as error:
        if not chosen.fallback:
            raise UnsupportedError(f"torch.compile(backend='onnxc', fallback=False): {error}") from None
        _left[:] = [*(pair for pair in _left if pair[0]() is not None), (weakref.ref(module), str(error))]
        return module.forward  # type: ignore[no-any-return]
    except AssertionError as error:
        try:  # a parameter of which `.data` is another tensor: PyTorch has that in graphs alone
            found = traced(keep=True)
        except Exception:
            raise error from None
    if any(changes):
        return _for_such_memory(found, module if chosen.fallback else None, inputs)
    return _shortened(found, plain[0].quick) if len(plain) == 1 else found


def _chosen(given: Mapping[str, Any]) -> tuple[Options, bool]:
    """What a user's options mean, and whether weights are constants."""
    unknown = sorted(set(given) - {*_OWN, *_PASSED})
    if unknown:
        raise InputError(
            f"torch.compile(backend='onnxc') has no option {', '.join(map(repr, unknown))}; "
            f"it has {', '.join((*_OWN, *_PASSED))}"
        )
    for name in _OWN:
        if not isinstance(given.get(name, True), bool):
            raise InputError(f"{name} is True or False, not {given[name]!r}")
    passed = {k: v for k, v in given.items() if k in _PASSED}
    return Options((), given.get("fallback", True), passed), given.get("freezing", True)


def _for_such_memory(
    found: Callable[..., Any], module: fx.GraphModule | None, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """What changes arguments, where these have the elements in common that they have now; else the module, by PyTorch.

    PyTorch guards that only among arguments that lie in one memory when it compiles, and by a test that is not exact.
    """
    known = common_memory(inputs)

    def call(*args: Any) -> Any:
        if common_memory(args) == known:
            return found(*args)
        if module is None:
            why = "arguments, of which one is changed, have other elements in common than when this was compiled"
            raise UnsupportedError(f"torch.compile(backend='onnxc', fallback=False): {why}")
        return module.forward(*args)

    return call


def _views_by_strides(inputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Where arguments lie in one memory, has AOTAutograd make results in it by strides and offset.

    It takes such arguments for views of one base. A result's own views, called once more, would be of that base too,
    and not of the argument.
    """
    places = [x.untyped_storage()._cdata for x in inputs if type(x) in (torch.Tensor, torch.nn.Parameter)]
    shared = len({*places}) < len(places)
    return config.patch(view_replay_for_aliased_outputs=False) if shared else nullcontext()


def _partition(joint: fx.GraphModule, *args: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The way forward and the way back."""
    with kept_apart(joint.graph):
        return min_cut_rematerialization_partition(joint, *args, **options)  # type: ignore[no-any-return]


def _is_plain(program: Program, inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd has nothing to do about a call of the program that is being compiled but to hand it on."""
    facts = _facts()
    if facts is None or facts.num_mutated_inp_runtime_indices or facts.num_outputs_aliased:
        return False
    if facts.num_intermediate_bases or facts.dynamic_outputs or facts.grad_enabled_mutation is not None:
        return False
    if facts.tokens or facts.num_graphsafe_rng_states or facts.is_rng_op_functionalized:
        return False
    if any(isinstance(x, (list, tuple, dict)) or is_traceable_wrapper_subclass(x) for x in inputs):
        return False
    return len(program.placeholders) == len(inputs) and len(program.outputs) == facts.num_outputs


def _shortened(found: Callable[..., Any], quick: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the program at once, where that can be; else through AOTAutograd's layers, which take 8 us."""

    def call(*args: Any) -> Any:
        results = quick(args)
        return found(*args) if results is None else results

    return call


def _as_traced(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Has AOTAutograd give an argument the sizes that Dynamo guards.

    Dynamo keeps how it has traced a tensor, open sizes and all. Of one that is the base of a view among the arguments,
    it keeps last how it would have traced that base, of which no guard knows: its sizes may be fixed.
    """
    context = TracingContext.try_get()
    shapes = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if context is None or shapes is None:
        return
    traced = {t.source: t.symbolic_context for t in shapes.tracked_fakes or ()}
    places = [n.meta.get("grapharg") for n in module.graph.nodes if n.op == "placeholder"]
    for place, x in zip(places, inputs, strict=True):
        found = None if place is None else traced.get(place.source)
        if found is not None and isinstance(x, torch.Tensor):
            context.tensor_to_context[x] = found


_OWN_DTYPE = (torch.amax, torch.amin, torch.aminmax)  # which eager PyTorch does not convert to that of `out=`


def _check_out(module: fx.GraphModule) -> None:
    """InputError where eager PyTorch refuses the dtype of `out=`, and its tracing converts to it."""
    for node in module.graph.nodes:
        if node.target in _OWN_DTYPE and node.kwargs.get("out") is not None:
            given = node.args[0] if node.args else node.kwargs["input"]
            wanted = given.meta["example_value"].dtype
            out = node.kwargs["out"]
            for other in out if isinstance(out, (list, tuple)) else [out]:
                found = other.meta["example_value"].dtype
                if found is not wanted:
                    name = node.target.__name__
                    raise InputError(f"{name} of {wanted} with out= of {found} [{source_line(node)}]")


def _boxed(program: Program) -> Callable[..., Any]:
    """What AOTAutograd calls with a list, which it wants emptied."""

    def call(args: list[Any]) -> list[Any]:
        found = program(args)
        args.clear()
        return found

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _facts() -> ViewAndMutationMeta | None:
    """What AOTAutograd knows of the graph that is being compiled."""
    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def _weights(facts: ViewAndMutationMeta | None) -> tuple[int, ...]:
    """Positions of the parameters and buffers in the graph that is being compiled, but for those that it changes."""
    if facts is None:
        return ()
    changed = {*facts.mutated_inp_runtime_indices, *facts.mutated_graph_handled_indices}
    return tuple(k for k in facts.static_input_indices or () if k not in changed)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's core ATen decompositions, some others of its, and ours, for what has no rule here."""
    found = dict(core_aten_decompositions().items())
    for name in _ALSO:
        packet = getattr(torch.ops.aten, name, None)
        overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
        found.update({op: decomposition_table[op] for op in overloads if op in decomposition_table})
    for name in ("quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel"):
        found[getattr(torch.ops.quantized_decomposed, name).default] = getattr(_decomposed, name)
    found = {op: f for op, f in found.items() if op not in RULES} | DECOMPOSITIONS | COMPOSITES | LISTS | POOLS
    return {op: _for_complex(f) for op, f in found.items()}


def _for_complex(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that leaves the op whole where it is not written for complex numbers, which the op takes."""

    @wraps(decomposition)
    def found(*args: Any, **kwargs: Any) -> Any:
        try:
            return decomposition(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if any(isinstance(x, torch.Tensor) and x.is_complex() for x in pytree.arg_tree_leaves(*args, **kwargs)):
                return NotImplemented
            raise

    return found


_ALSO = (
    "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
    "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm",
    "_batch_norm_with_update_functional", "batch_norm_backward", "embedding_dense_backward",
    "_softmax_backward_data", "_log_softmax_backward_data", "linalg_vector_norm", "ldexp",
    "dist", "permute_copy", "narrow_copy", "cumprod",
    "hardtanh_backward", "max_pool2d_with_indices_backward", "rrelu_with_noise_backward",
)  # fmt: skip


# ---------------------------------------------------------------- what became of it


@dataclass(frozen=True)
class GraphReport:
    """One graph that ``torch.compile`` gave to this backend.

    Attributes:
        kind: ``inference``, ``forward`` or ``backward``; ``eager``: PyTorch runs all of it, as Dynamo has it.
        nodes: how many ATen ops it has.
        fallbacks: the ops that PyTorch computes.
        draws: how many times PyTorch draws random numbers for its programs.
        programs: the reports of its programs, as :meth:`onnxc.CompiledModel.explain` has them; none before a call.
        compiles: how often it was compiled: a second time where weights changed.
    """

    kind: str
    nodes: int
    fallbacks: tuple[Fallback, ...]
    programs: tuple[Report, ...]
    compiles: int
    draws: int = 0

    def __str__(self) -> str:
        counted: dict[str, int] = {}
        for f in self.fallbacks:
            counted[str(f)] = counted.get(str(f), 0) + 1
        head = f"{self.kind}: {self.nodes} nodes, {len(self.programs)} programs, {len(self.fallbacks)} nodes in PyTorch"
        head += f", {self.draws} draws" if self.draws else ""
        return "\n".join([head, *(f"  {n} x {text}" for text, n in counted.items())])


@dataclass(frozen=True)
class TorchReport:
    """What ``torch.compile(backend="onnxc")`` has compiled and is still alive. Prints as a list of fallbacks."""

    graphs: tuple[GraphReport, ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "nothing has been compiled"


def report() -> TorchReport:
    """The graphs compiled so far in this process: what fell back to PyTorch, and why; which kernels the rest became."""
    alive = [(kind, program) for kind, ref in _programs if (program := ref()) is not None]
    left = [(module, why) for ref, why in _left if (module := ref()) is not None]
    return TorchReport((*(_described(kind, p) for kind, p in alive), *(_described_as_left(m, why) for m, why in left)))


def _described_as_left(module: fx.GraphModule, why: str) -> GraphReport:
    nodes = [n for n in module.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
    fallbacks = tuple(Fallback(str(n.target), why, source_line(n)) for n in nodes)
    return GraphReport("eager", len(nodes), fallbacks, (), 0)


def _described(kind: str, program: Program) -> GraphReport:
    parts = list(program.all_parts())
    inside = [n for part in parts for n in part.module.graph.nodes if n.op == "call_function"]
    reports = tuple(m.explain() for part in parts for m in part.models)
    draws = sum(is_draw(n) and n.target is not torch.get_rng_state for n in inside)
    fallbacks = tuple(f for part in parts for f in part.fallbacks)
    return GraphReport(kind, len(inside), fallbacks, reports, program.compiles, draws)

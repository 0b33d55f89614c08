"""PyTorch's own lists of samples (OpInfo), run by way of the importer.

    python tests/torch_opinfo.py                          # every op, its graph of primitives interpreted by numpy
    python tests/torch_opinfo.py --gradient               # with gradients: AOTAutograd's two graphs
    python tests/torch_opinfo.py --core                   # every overload that PyTorch calls core, on what OpInfo's
                                                          # samples give it; add --gradient for its derivative
    python tests/torch_opinfo.py --compile softmax gelu   # these ops, compiled to C++
    python tests/torch_opinfo.py --dtype int64 --samples 4  # samples of another dtype; --dynamic: sizes are symbols

Prints what compiles, what falls back (and on which ATen op), and what is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onnxc.primitives.interpret import interpret
from onnxc.torch import program as programs
from onnxc.torch.backend import decompositions
from onnxc.torch.draws import drawn, is_draw, is_seeded
from onnxc.torch.program import Options, Program

# What draws random numbers, or leaves its result open: there is nothing to compare.
OPEN = (
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "multinomial", "rand",
    "dropout", "empty", "new_empty", "rrelu", "scaled_dot_product_attention_dropout", "svd_lowrank", "pca_lowrank",
)  # fmt: skip
# Core ops whose results are numbers that the graph knows without computing them.
# Ops whose result may hold anything.
ANYTHING = ("empty", "new_empty", "rand", "dropout")
SIZES = ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "sym_is_contiguous")

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]  # function, args, kwargs


@dataclass
class Outcome:
    """What became of an op's samples."""

    name: str
    samples: int = 0
    fallbacks: set[str] = field(default_factory=set)
    draws: bool = False  # whether the last sample drew random numbers: which, PyTorch leaves open
    breaks: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.wrong:
            return "WRONG"
        if self.failed:
            return "FAILED"
        if self.breaks:
            return "break"
        return "fallback" if self.fallbacks else "compiled" if self.samples else "empty"


class Interpreted:
    """Stands in for a compiled model: numpy runs the graph."""

    def __init__(self, graph: Any, **options: Any) -> None:
        self.graph = graph

    def __call__(self, *arrays: Any) -> list[Any]:
        return [np.array(a, order="C") for a in interpret(self.graph, list(arrays))]

    def answers(self, arrays: Sequence[Any]) -> list[Any]:
        return self(*arrays)

    def explain(self) -> None:
        """There are no kernels to tell of."""


def cases(
    name: str, most: int | None = None, gradient: bool = False, dtype: torch.dtype = torch.float32
) -> Iterator[Case]:
    """An op's samples of a dtype; with `gradient` those that have one, with inputs that ask for it."""
    for op in op_db:
        if op.name != name or not op.supports_dtype(dtype, "cpu") or (gradient and not op.supports_autograd):
            continue
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=gradient), most):
            yield op.op, (sample.input, *sample.args), sample.kwargs


def names(dtype: torch.dtype = torch.float32) -> list[str]:
    """The ops that have samples of a dtype, and one answer."""
    found = {op.name for op in op_db if op.supports_dtype(dtype, "cpu")}
    return sorted(n for n in found if not any(part in n for part in OPEN))


# ---------------------------------------------------------------- core ATen ops


def core() -> list[Any]:
    """The overloads that PyTorch tags as core, but for those that are written to an argument or give sizes."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags and overload != "out" and name not in SIZES:
                found.append(op)
    return found


def more_calls() -> Iterator[Case]:
    """Of core overloads that no float32 sample of OpInfo reaches."""
    aten, x, image = torch.ops.aten, torch.randn(4, 5), torch.randn(2, 3, 8)
    whole, other = torch.arange(-6, 6).reshape(3, 4), torch.arange(12).reshape(3, 4) * 7 - 20
    stats = (torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5)
    yield aten._native_batch_norm_legit_no_training.default, (image, *stats, 0.1, 1e-5), {}
    yield aten.adaptive_avg_pool1d.default, (image, [3]), {}
    yield aten.avg_pool1d.default, (image, [3], [2], [1]), {}
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        yield getattr(aten, name).Tensor, (whole, other), {}
        yield getattr(aten, name).Scalar, (whole, 5), {}
    yield aten.copy.default, (x, torch.randn(5)), {}
    for mode in (None, "floor", "trunc"):
        yield aten.div.Scalar_mode, (x, 0.3), {"rounding_mode": mode}
    yield aten.fmod.Scalar, (x, 0.3), {}
    yield aten.native_dropout.default, (x, 0.5, False), {}
    yield aten.randperm.default, (7,), {}
    yield aten.var.dim, (x, [1]), {"unbiased": False}
    yield aten.upsample_nearest2d.vec, (torch.randn(2, 3, 4, 5), [8, 7], None), {}
    yield aten.upsample_bilinear2d.vec, (torch.randn(2, 3, 4, 5), None, True, [2.0, 1.5]), {}


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Keeps calls of core overloads, of each kind of arguments one: at most `each` of an overload for an op of
    OpInfo, `total` in all.
    """

    def __init__(self, each: int = 6, total: int = 60) -> None:
        super().__init__()
        self.calls: dict[Any, dict[str, Case]] = {op: {} for op in core()}
        self.each, self.total = each, total
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self.calls.get(func)
        if kept is not None and len(kept) < self.total and self.counts.get(func, 0) < self.each:
            leaves, spec = pytree.tree_flatten((args, kwargs or {}))
            plain = all(type(x) is torch.Tensor and x.numel() < 1 << 16 for x in leaves if isinstance(x, torch.Tensor))
            plain = plain and (_FOURIER in str(func) or not any(map(_is_complex, leaves)))
            key = str(spec) + str([_kind(x) for x in leaves])
            if plain and key not in kept:
                copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
                kept[key] = (func, *pytree.tree_unflatten(copies, spec))
                self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


_FOURIER = "fft"  # whose float32 samples have complex numbers inside; those of no other op do


def _is_complex(x: Any) -> bool:
    return (
        isinstance(x, complex)
        or (isinstance(x, torch.Tensor) and x.is_complex())
        or (isinstance(x, torch.dtype) and x.is_complex)
    )


def _kind(x: Any) -> Any:
    return (x.dtype, tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x


def core_calls() -> dict[Any, list[Case]]:
    """What OpInfo's float32 samples, forward and backward, call the core overloads with."""
    recorder = Recorder()
    for op in op_db:
        if not op.supports_dtype(torch.float32, "cpu"):
            continue
        recorder.counts.clear()
        for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd), 40):
            torch.manual_seed(0)
            try:
                with recorder:
                    found = op.op(sample.input, *sample.args, **sample.kwargs)
                    ends = [y for y in pytree.tree_leaves(found) if isinstance(y, torch.Tensor) and y.requires_grad]
                    torch.autograd.backward(ends, [torch.ones_like(y) for y in ends])
            except Exception:  # a sample for which eager PyTorch raises proves nothing
                continue
    for call in more_calls():
        recorder.calls[call[0]][str(len(recorder.calls[call[0]]))] = call
    return {op: list(calls.values()) for op, calls in recorder.calls.items()}


def asking(case: Case) -> Case:
    """A call whose float tensors ask for gradients."""
    function, args, kwargs = case

    def copy(t: torch.Tensor) -> torch.Tensor:
        return t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex())

    return function, *pytree.tree_map_only(torch.Tensor, copy, (args, kwargs))


def joined(cases: Sequence[Case]) -> Case:
    """Many calls as one, whose compile is one program; those without tensors, or for which PyTorch raises, are left
    out.
    """
    good = []
    for function, args, kwargs in cases:
        leaves = pytree.tree_leaves((args, kwargs))
        try:
            function(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
            good += [(function, args, kwargs)] if any(isinstance(x, torch.Tensor) for x in leaves) else []
        except Exception:
            continue
    functions = [function for function, _, _ in good]

    def all_of(args: Sequence[Any], kwargs: Sequence[Any]) -> list[Any]:
        return [f(*a, **k) for f, a, k in zip(functions, args, kwargs, strict=True)]

    return all_of, ([a for _, a, _ in good], [k for _, _, k in good]), {}


# ---------------------------------------------------------------- checks


def checked(
    name: str, most: int | None = None, gradient: bool = False, given: Sequence[Case] | None = None,
    dtype: torch.dtype = torch.float32, dynamic: bool = False,
) -> Outcome:  # fmt: skip
    """Runs an op's samples (or the calls given) by way of this backend, and without."""
    outcome = Outcome(name)
    for number, (function, args, kwargs) in enumerate(given or cases(name, most, gradient, dtype)):
        flat, spec = pytree.tree_flatten((args, kwargs))
        try:
            torch.manual_seed(0)
            expected = _with_gradients(partial(_called, function, spec), _fresh(flat), gradient)
        except Exception:  # a sample for which eager PyTorch raises proves nothing
            continue
        if gradient and expected[1] is None:
            continue
        outcome.samples += 1
        outcome.draws = any(part in name for part in ANYTHING)
        try:
            torch.manual_seed(0)
            compiled = _through(function, flat, spec, outcome, gradient, dynamic)
            found = _with_gradients(compiled, _fresh(flat), gradient, has_one=True)
            message = differences(found, expected, values=not outcome.draws)
            if message and not _as_near(found, expected, function, flat, spec, gradient):
                outcome.wrong.append(f"sample {number}: {message}")
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            outcome.breaks.add(str(error.func))  # where Dynamo breaks the graph
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome.failed.append(
                f"sample {number}: {type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"
            )
    return outcome


def _called(function: Callable[..., Any], spec: Any, flat: Sequence[Any]) -> Any:
    args, kwargs = pytree.tree_unflatten(flat, spec)
    return function(*args, **kwargs)


def _fresh(flat: Sequence[Any]) -> list[Any]:
    """Copies in the same order of memory, which views of an input read."""
    return [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in flat]


def _with_gradients(
    f: Callable[[list[Any]], Any], flat: list[Any], gradient: bool, has_one: bool = False
) -> tuple[Any, Any]:
    """The results and, for cotangents that depend on shapes alone, the gradients of the leaves that ask for them.

    None where there is no gradient; with `has_one` zeros: `aot_function` forgets that a result has a gradient of zeros.
    """
    if not gradient:
        with torch.no_grad():
            return f(flat), None
    asked = [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad]
    given = [x.clone() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]  # may be written to
    found = f(given)
    ends = [y for y in pytree.tree_leaves(found) if isinstance(y, torch.Tensor) and y.requires_grad]
    if not asked or (not ends and not has_one):
        return None, None
    seeds = [torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape).to(y.dtype) for y in ends]
    gradients = torch.autograd.grad(ends, asked, seeds, allow_unused=True) if ends else [None] * len(asked)
    results = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, found)
    return results, [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, asked, strict=True)]


def _through(
    function: Callable[..., Any], flat: Sequence[Any], spec: Any, outcome: Outcome, gradient: bool, dynamic: bool
) -> Callable[[list[Any]], Any]:
    """The function by way of AOTAutograd and Programs, of all leaves."""
    places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        given = list(flat)
        for k, t in zip(places, tensors, strict=True):
            given[k] = t
        return _called(function, spec, given)

    def compiler(views: bool, graph: torch.fx.GraphModule, examples: Any) -> Any:
        program = Program(graph, Options(views=views))
        outcome.fallbacks.update(f.op + ": " + f.reason for f in program.fallbacks)
        outcome.fallbacks.update(f"{n.target}: PyTorch draws it" for n in program.missing if _is_all_drawn(n))
        outcome.draws |= any(map(is_seeded, program.missing))

        def call(*args: Any) -> Any:
            before = len(program.fallbacks)
            found = program(args)
            outcome.fallbacks.update(f.op + ": " + f.reason for f in program.fallbacks[before:])
            return found

        return make_boxed_func(call)

    joint = {"partition_fn": min_cut_rematerialization_partition} if gradient else {}
    compiled = aot_function(
        of_tensors, fw_compiler=partial(compiler, True), bw_compiler=partial(compiler, False),
        decompositions=decompositions(), dynamic=dynamic, **joint,
    )  # fmt: skip
    return lambda leaves: compiled(*(leaves[k] for k in places))


def _is_all_drawn(node: torch.fx.Node) -> bool:
    """Whether an op is nothing but a draw, which is no fallback of a program, and nothing compiled either."""
    return is_draw(node) and node.target is not drawn


def _as_near(found: Any, expected: Any, function: Any, flat: Sequence[Any], spec: Any, gradient: bool) -> bool:
    """Whether the results are at least as near to those in float64 as eager PyTorch's float32 is."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in flat]
    wide = [
        w.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else w
        for w, x in zip(wide, flat, strict=True)
    ]
    try:
        exact = _with_gradients(partial(_called, function, spec), wide, gradient)
        rows = zip(*(pytree.tree_leaves(r) for r in (found, expected, exact)), strict=True)
        return all(
            not isinstance(y, torch.Tensor) or bool(((x - e).abs().max() <= (y - e).abs().max()) | torch.equal(x, y))
            for x, y, e in rows
            if not isinstance(y, torch.Tensor) or y.numel()
        )
    except Exception:
        return False


def differences(found: Any, expected: Any, values: bool = True) -> str | None:
    """What differs, to the tolerance that PyTorch's own tests have for float32, and for narrower floats."""
    a, b = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    if len(a) != len(b):
        return f"{len(a)} results, not {len(b)}"
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        if not isinstance(y, torch.Tensor):
            if x != y and not (isinstance(y, float) and math.isnan(y)):
                return f"result {k}: {x} is not {y}"
            continue
        if not values:
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"result {k}: {x.dtype}{list(x.shape)} is not {y.dtype}{list(y.shape)}"
            continue
        try:
            near = {} if y.dtype.itemsize == 2 and y.is_floating_point() else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(x, y, equal_nan=True, **near)
        except AssertionError as error:
            return f"result {k}: " + " ".join(str(error).split())[:300]
    return None


# ---------------------------------------------------------------- command line


def outcomes(given: argparse.Namespace) -> Iterator[Outcome]:
    """One for each op that was asked for."""
    if not given.core:
        dtype = getattr(torch, given.dtype)
        for name in given.ops or names(dtype):
            yield checked(name, given.samples, given.gradient, dtype=dtype, dynamic=given.dynamic)
        return
    for op, calls in core_calls().items():
        name = str(op)
        if given.ops and name not in given.ops:
            continue
        chosen = calls[: given.samples]
        if given.gradient:
            chosen = [asking(c) for c in chosen] if "backward" not in name else []
        yield checked(name, None, given.gradient, [joined(chosen)] if given.compile and chosen else chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names of ops; default: all")
    parser.add_argument("--core", action="store_true", help="the overloads that PyTorch calls core, one by one")
    parser.add_argument("--gradient", action="store_true", help="forward and gradient")
    parser.add_argument("--compile", action="store_true", help="compile to C++, in place of interpreting")
    parser.add_argument("--dtype", default="float32", help="of the samples; not with --core")
    parser.add_argument("--dynamic", action="store_true", help="with sizes that are symbols; not with --core")
    parser.add_argument("--samples", type=int, help="at most so many samples of each op")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if not given.compile:
        programs.compile = Interpreted
    counts: dict[str, int] = {}
    start = time.time()
    for outcome in outcomes(given):
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
        if outcome.verdict != "compiled" or given.ops:
            print(f"{outcome.verdict:8} {outcome.name} ({outcome.samples} samples)")
            for line in [
                *sorted(outcome.breaks),
                *sorted(outcome.fallbacks)[:4],
                *outcome.wrong[:3],
                *outcome.failed[:2],
            ]:
                print(f"           {line}")
            sys.stdout.flush()
    tried = sum(n for verdict, n in counts.items() if verdict != "empty")
    share = counts.get("compiled", 0) / max(tried, 1)
    print(counts, f"{share:.1%} of {tried} compiled without fallback, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()

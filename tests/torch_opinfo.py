"""PyTorch's own lists of samples (OpInfo), run by way of the importer.

    python tests/torch_opinfo.py              # every op, its graph of primitives interpreted by numpy
    python tests/torch_opinfo.py --compile softmax gelu   # these ops, compiled to C++

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
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from onnxc.primitives.interpret import interpret
from onnxc.torch import program as programs
from onnxc.torch.backend import decompositions
from onnxc.torch.program import Options, Program

# What draws random numbers, or leaves its result open: there is nothing to compare.
OPEN = (
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "multinomial", "rand",
    "dropout", "empty", "new_empty", "rrelu", "scaled_dot_product_attention_dropout", "svd_lowrank", "pca_lowrank",
)  # fmt: skip


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
        return [np.ascontiguousarray(a).reshape(np.shape(a)) for a in interpret(self.graph, list(arrays))]


def cases(
    name: str, most: int | None = None
) -> Iterator[tuple[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]]]:
    """(function, input, args, kwargs) of an op's float32 samples."""
    for op in op_db:
        if op.name != name or not op.supports_dtype(torch.float32, "cpu"):
            continue
        for sample in islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), most):
            yield op.op, sample.input, sample.args, sample.kwargs


def names() -> list[str]:
    """The ops that have samples and one answer."""
    found = {op.name for op in op_db if op.supports_dtype(torch.float32, "cpu")}
    return sorted(n for n in found if not any(part in n for part in OPEN))


def checked(name: str, most: int | None = None) -> Outcome:
    """Runs an op's samples by way of this backend, and without."""
    outcome = Outcome(name)
    for number, (function, first, args, kwargs) in enumerate(cases(name, most)):
        flat, spec = pytree.tree_flatten((first, args, kwargs))
        torch.manual_seed(0)
        try:
            expected = function(*_fresh(flat, spec)[0], **_fresh(flat, spec)[1])
        except Exception:  # a sample for which eager PyTorch raises proves nothing
            continue
        outcome.samples += 1
        outcome.draws = False
        torch.manual_seed(0)
        try:
            found = _through(function, flat, spec, outcome)
            message = differences(found, expected, values=not outcome.draws)
            if message:
                outcome.wrong.append(f"sample {number}: {message}")
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            outcome.breaks.add(str(error.func))  # where Dynamo breaks the graph
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            outcome.failed.append(
                f"sample {number}: {type(error).__name__}: {str(error)[:300]} ({place.filename}:{place.lineno})"
            )
    return outcome


def _fresh(flat: Sequence[Any], spec: Any) -> tuple[list[Any], dict[str, Any]]:
    copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in flat]
    first, args, kwargs = pytree.tree_unflatten(copies, spec)
    return [first, *args], kwargs


def _through(function: Callable[..., Any], flat: Sequence[Any], spec: Any, outcome: Outcome) -> Any:
    """The function's results through AOTAutograd and a Program."""
    args, kwargs = _fresh(flat, spec)
    flat, spec = pytree.tree_flatten((args, kwargs))
    places = [k for k, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        given = list(flat)
        for k, t in zip(places, tensors, strict=True):
            given[k] = t
        args, kwargs = pytree.tree_unflatten(given, spec)
        return function(*args, **kwargs)

    def compiler(graph: torch.fx.GraphModule, examples: Any) -> Any:
        program = Program(graph, Options())
        outcome.fallbacks.update(f.op + ": " + f.reason for f in program.fallbacks)
        outcome.draws |= any(
            torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.graph.nodes
        )

        def call(*args: Any) -> Any:
            before = len(program.fallbacks)
            found = program(args)
            outcome.fallbacks.update(f.op + ": " + f.reason for f in program.fallbacks[before:])
            return found

        return make_boxed_func(call)

    with torch.no_grad():
        return aot_function(of_tensors, fw_compiler=compiler, decompositions=decompositions())(
            *(flat[k] for k in places)
        )


def differences(found: Any, expected: Any, values: bool = True) -> str | None:
    """What differs, to the tolerance that PyTorch's own tests have for float32."""
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
            torch.testing.assert_close(x, y, equal_nan=True, rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            return f"result {k}: " + " ".join(str(error).split())[:300]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names of ops; default: all")
    parser.add_argument("--compile", action="store_true", help="compile to C++, in place of interpreting")
    parser.add_argument("--samples", type=int, help="at most so many samples of each op")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if not given.compile:
        programs.compile = Interpreted
    counts: dict[str, int] = {}
    start = time.time()
    for name in given.ops or names():
        outcome = checked(name, given.samples)
        counts[outcome.verdict] = counts.get(outcome.verdict, 0) + 1
        if outcome.verdict != "compiled" or given.ops:
            print(f"{outcome.verdict:8} {name} ({outcome.samples} samples)")
            for line in [
                *sorted(outcome.breaks),
                *sorted(outcome.fallbacks)[:4],
                *outcome.wrong[:3],
                *outcome.failed[:2],
            ]:
                print(f"           {line}")
            sys.stdout.flush()
    print(counts, f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()

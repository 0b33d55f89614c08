"""Derivatives that operators bring along: `gradient=` of `onnxc.ops.registry.op`."""

from __future__ import annotations

import inspect

from onnxc.autodiff.rules import Gradients, Step, rule
from onnxc.errors import InternalError, ModelError, UnsupportedError
from onnxc.ir.expr import never_equal
from onnxc.ir.graph import Value
from onnxc.ir.types import same_shape
from onnxc.ops.registry import find
from onnxc.primitives.custom import OWN
from onnxc.primitives.kernels import USER


@rule(OWN)
def with_gradient(s: Step) -> Gradients:
    """What the operator's own function builds, checked against its inputs."""
    domain, name, opset, given = s.node.attrs["rule"]
    definition = find(domain, name, opset)
    if definition is None or definition.gradient is None:
        raise InternalError(f"{name} has no gradient in the table of operators")
    count = s.node.attrs["results"]
    ys, present = s.operands[:count], iter(s.operands[count:])
    xs: list[Value | None] = [next(present) if there else None for there in s.node.attrs["inputs"]]
    keywords = inspect.signature(definition.gradient).parameters
    found = definition.gradient(s.b, list(s.dys), xs, list(ys), **{k: v for k, v in given if k in keywords})
    dxs = [found] if found is None or isinstance(found, Value) else list(found)
    if len(dxs) != len(xs):
        raise ModelError(f"the gradient of {name} has {len(dxs)} results for {len(xs)} inputs")
    for k, (x, dx) in enumerate(zip(xs, dxs, strict=True)):
        if x is None or dx is None:
            continue
        if dx.dtype is not x.dtype or dx.rank != x.rank or any(map(never_equal, dx.shape, x.shape)):
            raise ModelError(f"the gradient of {name} by its input {k}, which is {x.t}, is {dx.t}")
        if not same_shape(dx.shape, x.shape):  # a run finds out
            dxs[k] = s.b.reshape(dx, x.shape)
    return [*(None for _ in ys), *(dx for x, dx in zip(xs, dxs, strict=True) if x is not None)]


@rule(USER)
def user_kernel(s: Step) -> Gradients:
    """Nobody knows what it computes."""
    raise UnsupportedError(
        f"the kernel {s.node.attrs['name']} has no derivative: give the operator's with @op(..., gradient=...)",
        node=", ".join(map(str, s.node.origin)),
    )

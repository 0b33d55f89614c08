"""Gradients and training steps, compared as answers are.

compare_gradients("model.onnx", loss="loss")               # the gradient's graph: onnxc and onnxruntime
compare_gradients("model.onnx", inputs, reference=module)  # PyTorch's autograd
compare_training("model.onnx", batches, optimizer=onnxc.optim.AdamW(lr=1e-3))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxc.errors import InputError, UnsupportedError
from onnxc.export.model import to_onnx
from onnxc.frontends import onnx_file
from onnxc.gradient import backward, joint
from onnxc.ir.graph import UPDATES
from onnxc.optim import Optimizer
from onnxc.passes.decompose import decompose
from onnxc.random_inputs import random_inputs
from onnxc.tools.compare.bounds import Tolerances
from onnxc.tools.compare.core import compare
from onnxc.tools.compare.engines import OnnxRuntime
from onnxc.tools.compare.judge import Judge
from onnxc.tools.compare.pieces import ModelLike
from onnxc.tools.compare.results import Comparison, OutputComparison
from onnxc.training.graph import Update, slots_of, step_graph
from onnxc.training.statistics import running_statistics
from onnxc.training.step import compile_training

Array = np.ndarray[Any, Any]


def compare_gradients(
    model: ModelLike,
    inputs: Mapping[str, Any] | None = None,
    *,
    loss: str | None = None,
    wrt: Sequence[str] | None = None,
    reference: Any = "onnxruntime",
    parameters: Mapping[str, str] | None = None,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    **options: Any,
) -> Comparison:
    """The model's outputs and its gradients, `<name>_grad`, on two sides.

    Args:
        model, inputs, seed, dims: as for `onnxc.compare`.
        loss: the scalar that is differentiated; by default the only output.
        wrt: what it is differentiated by: weights or inputs; by default all weights of a float dtype.
        reference: a side as in `onnxc.compare`, which runs the graph of the gradient as an ONNX model; or a
            `torch.nn.Module` that returns the loss (alone, or as its first tensor), differentiated by autograd.
        parameters: the module's name of each weight; by default they have the model's names.
        options: of `onnxc.compare` (`layers=True` compares each tensor of the gradient's graph).
    """
    gradient = backward(model, loss, wrt)
    assert gradient is not None
    if inputs is None:
        graph = decompose(onnx_file.load(gradient), staged=True)
        inputs = random_inputs(graph, seed=seed, dims=dims)
    if hasattr(reference, "named_parameters"):
        names = [o.name for o in gradient.graph.output]
        reference = _by_autograd(reference, inputs, names, parameters or {})
    return compare(gradient, inputs, reference=reference, **options)


def _by_autograd(
    module: Any, inputs: Mapping[str, Any], names: Sequence[str], parameters: Mapping[str, str]
) -> dict[str, Array]:
    """The outputs of the gradient's graph, as PyTorch computes them."""
    import torch
    from torch.utils import _pytree

    given = {n: torch.from_numpy(np.asarray(a, order="C")) for n, a in inputs.items()}
    wanted = [n.removesuffix("_grad") for n in names if n.endswith("_grad")]
    held = dict(module.named_parameters())
    leaves: dict[str, Any] = {}
    for name in wanted:
        if name in given:
            leaves[name] = given[name].requires_grad_()
        elif parameters.get(name, name) in held:
            leaves[name] = held[parameters.get(name, name)]
        else:
            raise InputError(f"the module has no parameter {parameters.get(name, name)!r}; it has {', '.join(held)}")
    found = [t for t in _pytree.tree_leaves(module(*given.values())) if hasattr(t, "detach")]
    gradients = torch.autograd.grad(found[0], list(leaves.values()), allow_unused=True)
    arrays = {
        f"{n}_grad": np.zeros(tuple(leaves[n].shape), np.float32) if g is None else g.numpy()
        for n, g in zip(leaves, gradients, strict=True)
    }
    own = [n for n in names if n not in arrays]
    if len(own) > len(found):
        raise InputError(f"the module returns {len(found)} tensors, and the model {len(own)}")
    return arrays | {n: t.detach().numpy() for n, t in zip(own, found, strict=False)}


def compare_training(
    model: ModelLike,
    batches: Iterable[Mapping[str, Any]],
    *,
    optimizer: Optimizer,
    loss: str | None = None,
    wrt: Sequence[str] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-5,
    cache: bool = True,
) -> Comparison:
    """Some steps of training with onnxc, and the same steps with onnxruntime, which runs the step's graph as an ONNX
    model: the outputs of each step, and each parameter and state after the last, as `state/name`.

    Each side goes on with its own parameters, so errors add up as they do in a training. The sample of a row is the
    step. Raises UnsupportedError for models with random operators.
    """
    imported = onnx_file.load(model)
    both = joint(imported, loss, wrt, buffers=running_statistics(imported))
    update = Update(optimizer)
    slots = slots_of(both, update)
    graph = step_graph(both, update, slots, last=True)
    updates: Mapping[str, str] = graph.metadata[UPDATES]
    plain = replace(graph, metadata={k: v for k, v in graph.metadata.items() if k != UPDATES})
    reference = OnnxRuntime().load(to_onnx(plain))
    step = compile_training(model, loss=loss, wrt=wrt, optimizer=optimizer, cache=cache)
    names = graph.input_names
    count = len(names) - len(slots)
    if count != len(imported.inputs) + 2:
        raise UnsupportedError("a model with random operators: no other runtime draws the same numbers")
    held: dict[str, Array] = {n: np.array(s.initial) for n, s in zip(names[count:], slots, strict=True)}
    judge = Judge(model, None, Tolerances(rtol, atol), lambda stage: None)
    rows: list[OutputComparison] = []
    done = 0
    for done, batch in enumerate(batches, 1):
        given = judge.named(batch)
        clock = dict(zip(names[count - 2 : count], (step.learning_rate, float(done)), strict=True))
        feeds = {**given, **{n: np.asarray(x, np.float64) for n, x in clock.items()}, **held}
        found = dict(zip(graph.output_names, reference(feeds), strict=True))
        ours = dict(step(**batch).items())
        held.update({updates[n]: np.asarray(a) for n, a in found.items() if n in updates})
        rows += [judge.compared(n, done, np.asarray(ours[n]), np.asarray(found[n])) for n in ours]
    if not done:
        raise InputError("there is no batch to train with")
    state = step.state()
    for slot, theirs in zip(slots, held.values(), strict=True):
        rows.append(judge.compared(slot.key, done, np.asarray(state[slot.key]), theirs))
    return Comparison(tuple(rows), "onnxruntime", done, rtol, atol)

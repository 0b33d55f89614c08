"""Weights that PyTorch's exporter computed from parameters: what is trained then, and what is said about it."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from onnxc.optim import SGD
from onnxc.training.step import compile_training
from tests.small_models import parse

NOTE = "pkg.onnxscript.optimizer.folded_from"
STEPS = 5


class Tokens(nn.Module):
    """A class token before a sequence, attention with a scale, and a loss, as in a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = self.qkv(x).reshape(x.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.head((x + a)[:, 0]), y)


def exported(tmp_path: Path, *, optimize: bool) -> tuple[Path, Tokens, tuple[Tensor, Tensor]]:
    """A file, the module, and the batch that it was exported with."""
    torch.manual_seed(0)
    net, batch = Tokens(), (torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 1]))
    path = tmp_path / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(copy.deepcopy(net).eval(), batch, path, dynamo=True, optimize=optimize, verbose=False)
    return path, net, batch


def losses(net: Tokens, batch: tuple[Tensor, Tensor], frozen: tuple[str, ...] = ()) -> list[float]:
    """What PyTorch's training has."""
    optimizer, found = torch.optim.SGD([p for n, p in net.named_parameters() if n not in frozen], lr=0.3), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def test_a_parameter_repeated_along_the_batch(tmp_path: Path) -> None:
    path, net, batch = exported(tmp_path, optimize=True)
    weights = {w.name: numpy_helper.to_array(w) for w in onnx.load(path).graph.initializer}
    token = net.token.detach().numpy()
    (copies,) = (n for n, a in weights.items() if a.shape == (4, 1, 8) and np.array_equal(a, np.tile(token, (4, 1, 1))))
    arrays = [t.numpy() for t in batch]
    with pytest.warns(UserWarning, match=rf"{copies!r} \(from 'token'.*optimize=False") as caught:
        step = compile_training(path, optimizer=SGD(lr=1.0))
    step(*arrays)
    net(*batch).backward()
    assert net.token.grad is not None
    gradient = weights[copies] - step.parameters[copies]
    np.testing.assert_allclose(gradient.sum(0, keepdims=True), net.token.grad.numpy(), rtol=1e-4, atol=1e-6)
    (transposed,) = (n for n, a in weights.items() if np.array_equal(a, net.qkv.weight.detach().numpy().T))
    assert repr(transposed) not in str(caught[0].message)
    wanted = [n for n in step.parameters if weights[n].size > 1 and n != copies]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = compile_training(path, optimizer=SGD(lr=0.3), wrt=wanted)
    found = [float(next(iter(step(*arrays).values()))) for _ in range(STEPS)]
    np.testing.assert_allclose(found, losses(net, batch, frozen=("token",)), rtol=1e-5)


def test_without_the_exporters_optimizations(tmp_path: Path) -> None:
    path, net, batch = exported(tmp_path, optimize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = compile_training(path, optimizer=SGD(lr=0.3))
    assert step.parameters.keys() == dict(net.named_parameters()).keys()
    found = [float(next(iter(step(*(t.numpy() for t in batch)).values()))) for _ in range(STEPS)]
    np.testing.assert_allclose(found, losses(net, batch), rtol=1e-5)


@pytest.mark.parametrize(
    ("notes", "named"),
    [
        ({"w": "['linear.weight']"}, []),
        ({"w": "['v']"}, ["w"]),
        ({"w": "['tied']", "v": "['tied']"}, ["w", "v"]),
        ({"w": "['p', 'shape']"}, ["w"]),
        ({"h": "['p', 'shape']", "nothing": "['v']"}, []),
        ({"w": "not a list'", "v": ""}, []),
    ],
)  # fmt: skip
def test_what_is_named(notes: dict[str, str], named: list[str]) -> None:
    proto = parse("(float[n, 4] x, float[4, 4] w, float[4, 4] v) => (float loss)"
                  "{ h = MatMul(x, w)\n s = MatMul(h, v)\n loss = ReduceMean<keepdims = 0>(s) }", 18)  # fmt: skip
    rng = np.random.default_rng(0)
    proto.graph.initializer.extend(
        numpy_helper.from_array(rng.random((4, 4), np.float32), n) for n in ("w", "v")
    )  # fmt: skip
    for name, sources in notes.items():
        info = proto.graph.value_info.add(name=name)
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        info.metadata_props.add(key=NOTE, value=sources)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_training(proto, optimizer=SGD())
    said = " ".join(str(w.message) for w in caught)
    assert [n for n in ("w", "v") if f"{n!r} (from" in said] == named
    assert len(caught) == bool(named)

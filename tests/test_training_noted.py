"""What PyTorch's exporter notes beside the operators: parameters, buffers, constants, padding, detached values."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import onnxc
from onnxc.frontends import onnx_file
from onnxc.gradient import joint
from onnxc.optim import SGD
from tests.small_models import Array, floats, parse

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FX_NODE = "pkg.torch.onnx.fx_node"


class Quantizer(nn.Module):
    """Words to the nearest of some rows, which passes gradients on as if it did nothing; classes of unlike weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6, padding_idx=2)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.power = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("table", torch.randn(5, 6))
        self.rows = nn.Parameter(torch.randn(4, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor, t: Tensor) -> Tensor:
        x = self.words(ids) * self.scale + self.table
        near = ((x[:, :, None] - self.rows) ** 2).sum(-1).argmin(-1)
        y = self.rows[near]
        pulled = nn.functional.mse_loss(y, x.detach()) + 0.25 * nn.functional.mse_loss(x, y.detach())
        y = (x + (y - x).detach()).abs() ** self.power
        loss = nn.functional.cross_entropy(self.head(y.mean(1)), t, weight=torch.tensor([1.0, 2.0, 0.5]))
        return loss + pulled


@pytest.mark.parametrize("optimize", [False, True])
def test_what_is_trained_and_how(tmp_path: Path, optimize: bool) -> None:
    torch.manual_seed(0)
    net, batch = Quantizer(), (torch.randint(0, 9, (4, 5)), torch.tensor([0, 1, 2, 1]))
    assert (batch[0] == 2).any()
    path = tmp_path / "model.onnx"
    torch.onnx.export(copy.deepcopy(net), batch, path, dynamo=True, optimize=optimize, verbose=False)
    if optimize:  # which leaves no trace of detach()
        graph = onnx_file.load(path)
        assert set(graph.metadata["padding"].values()) == {2}
        names = {v.name for v in joint(graph).wrt}
        assert {"words.weight", "scale", "power", "rows", "head.bias"} <= names and "table" not in names
        return
    step = onnxc.compile_training(path, optimizer=SGD(lr=0.1))
    assert step.parameters.keys() == dict(net.named_parameters()).keys()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = net(*batch)
        loss.backward()
        optimizer.step()
        (found,) = step(*(x.numpy() for x in batch)).values()
        np.testing.assert_allclose(found, loss.detach().numpy(), rtol=1e-5)
    for name, p in net.named_parameters():
        np.testing.assert_allclose(step.parameters[name], p.detach().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def gradient(proto: onnx.ModelProto, wrt: list[str], inputs: dict[str, Array]) -> list[Array]:
    found = onnxc.compile(onnxc.backward(proto, "loss", wrt))(**inputs)
    return [found[f"{name}_grad"] for name in wrt]


def test_a_stop_at_another_name_of_a_value() -> None:
    """Whoever reads the value by its first name has a derivative."""
    proto = parse("(double[3] x) => (double loss) { y = Exp(x)\n z = Identity(y)\n p = Mul(y, z)\n"
                  "loss = ReduceSum<keepdims = 0>(p) }", 18)  # fmt: skip
    x = np.array([0.1, -0.3, 0.5])
    (whole,) = gradient(proto, ["x"], {"x": x})
    np.testing.assert_allclose(whole, 2 * np.exp(2 * x))
    found = onnxc.backward(proto, "loss", ["x", "y", "z"], stop_gradient=["z"])
    out = onnxc.compile(found)(x=x)
    np.testing.assert_allclose([out["x_grad"], out["y_grad"], out["z_grad"]], [np.exp(2 * x), np.exp(x), np.exp(x)])
    proto.graph.node[1].metadata_props.add(key=FX_NODE, value="%z = call[target=torch.ops.aten.detach.default](%y,)")
    (half,) = gradient(proto, ["x"], {"x": x})
    np.testing.assert_allclose(half, np.exp(2 * x))


def padded(note: str, axis: int = 0, index: type = np.int64) -> Array:
    proto = parse(f"(float[4, 3] w, {index.__name__}[2, 2] i) => (float loss) {{ r = Gather<axis = {axis}>(w, i)\n"
                  "q = Mul(r, r)\n loss = ReduceSum<keepdims = 0>(q) }", 18)  # fmt: skip
    value = (
        f"%r : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = ({note}), kwargs = {{}})"
    )
    proto.graph.node[0].metadata_props.add(key=FX_NODE, value=value)
    (found,) = gradient(proto, ["w"], {"w": 1 + floats(4, 3), "i": np.array([[0, 2], [2, 1]], index)})
    return found


def test_the_row_of_the_padding() -> None:
    whole = padded("%w, %i")
    masked = whole.copy()
    masked[2] = 0
    np.testing.assert_array_equal(padded("%w, %i, 2"), masked)
    np.testing.assert_array_equal(padded("%w, %i, 2, True"), masked)
    np.testing.assert_array_equal(padded("%w, %i, 2", index=np.int32), masked)
    np.testing.assert_array_equal(padded(f"%w, %i, {1 << 40}", index=np.int32), whole)
    for odd in ("%w, %i, 9", "%w, %i, 99999999999999999999", "%w, %i, -1", "2", ""):
        np.testing.assert_array_equal(padded(odd), whole, err_msg=odd)
    np.testing.assert_array_equal(padded("%w, %i, 2", axis=1), padded("", axis=1))


def test_buffers_and_constants_are_not_trained() -> None:
    proto = parse("(float[2, 4] x, float[4] w, float[4] b, float[4] c, float s, float p) => (float loss) {"
                  "h = Mul(x, w)\n k = Add(h, b)\n m = Mul(k, c)\n n = Mul(m, s)\n q = Pow(n, p)\n"
                  "loss = ReduceSum<keepdims = 0>(q) }", 18)  # fmt: skip
    weights = {"w": floats(4), "b": floats(4, seed=1), "c": floats(4, seed=2), "s": floats(), "p": np.float32(2)}
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in weights.items())

    def names() -> list[str]:
        return [v.name for v in joint(onnx_file.load(proto)).wrt]

    assert names() == ["w", "b", "c"]
    for name, kind in (("b", "BUFFER"), ("c", "CONSTANT_TENSOR"), ("s", "PARAMETER"), ("nothing", "PARAMETER")):
        info = proto.graph.value_info.add(name=name)
        info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        info.metadata_props.add(key=KIND, value=kind)
    assert names() == ["w", "s"]
    assert [v.name for v in joint(onnx_file.load(proto), wrt=["b"]).wrt] == ["b"]

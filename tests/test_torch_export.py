"""onnxc.from_torch: calls as the module's, dynamic shapes, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(7, 3)

    def forward(self, x: Any, pair: dict[str, list[Any]], *, scale: float = 2.0) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {"a": y + pair["p"][0], "b": (y.sum(0), None, pair["p"][1] * 2)}


@pytest.fixture
def module() -> Nested:
    torch.manual_seed(0)
    return Nested().eval()


PAIR = {"p": [torch.ones(3), torch.ones(2)]}


def test_nested_arguments_and_results(module: Nested) -> None:
    x = torch.randn(5, 7)
    compiled = onnxc.from_torch(module, (x, PAIR), {"scale": 3.0})
    with torch.no_grad():
        expected = module(x, PAIR, scale=3.0)
    found = compiled(x, PAIR, scale=3.0)
    torch.testing.assert_close(found, expected)
    arrays = compiled(x.numpy(), {"p": [t.numpy() for t in PAIR["p"]]}, scale=3.0)
    assert isinstance(arrays["a"], np.ndarray) and arrays["b"][1] is None
    np.testing.assert_array_equal(arrays["a"], found["a"].numpy())
    with pytest.raises(InputError, match=r"3\.0 when the module was exported"):
        compiled(x, PAIR, scale=2.0)
    with pytest.raises(InputError, match=r"args\[1\]\['p'\]\[1\] missing"):
        compiled(x, {"p": [torch.ones(3)]}, scale=3.0)


def test_dynamic_shapes(module: Nested) -> None:
    shapes = {"x": {0: torch.export.Dim("rows")}, "pair": {"p": [None, None]}}
    compiled = onnxc.from_torch(module, (torch.randn(5, 7), PAIR), dynamic_shapes=shapes)
    for rows in (2, 13):
        x = torch.randn(rows, 7)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, PAIR), module(x, PAIR))


def test_a_failure_carries_the_report() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(onnxc.torch.ExportError, match="data-dependent") as failure:
        onnxc.from_torch(Branch(), torch.ones(3))
    assert "TracerWarning" in str(failure.value) and "Conversion Error Report" in failure.value.report


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, counts: bool) -> Any:
        self.calls.add_(1)
        if counts:
            self.count.add_(x)
        return x * self.count


def test_buffers_that_each_call_changes() -> None:
    """A model has none: what is computed with them would be that of the first call for ever."""
    with pytest.raises(onnxc.torch.ExportError, match=r"Counter computes with buffers .*\('count'\)"):
        onnxc.from_torch(Counter(), (torch.ones(3), True))
    x = torch.randn(3)
    torch.testing.assert_close(onnxc.from_torch(Counter(), (x, False))(x, False), torch.zeros(3))


def test_a_batch_norm_in_training_mode() -> None:
    """PyTorch's exporter takes it for one in inference mode."""
    with pytest.raises(onnxc.torch.ExportError, match=r"running_mean.*\.eval\(\)"):
        onnxc.from_torch(torch.nn.BatchNorm1d(3).train(), torch.randn(4, 3))


class Dicts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Any, *, scale: dict[str, Any]) -> Any:
        return x * scale["b"] - 2 * scale["a"] + self.bias


def test_dicts_in_another_order_and_an_example_of_equal_tensors() -> None:
    """torch.export takes equal tensors for one argument."""
    module, (x, a, b) = Dicts(), torch.randn(3, 2)
    compiled = onnxc.from_torch(module, (x,), {"scale": {"b": x, "a": module.bias}})
    torch.testing.assert_close(compiled(x, scale={"a": a, "b": b}), x * b - 2 * a + 1)
    with pytest.raises(InputError, match=r"kwargs\['scale'\]\['b'\] missing; kwargs\['scale'\]\['c'\] too much"):
        compiled(x, scale={"a": a, "c": b})


class Turn(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2j, x.abs()


def test_complex_arguments_and_results() -> None:
    x = torch.randn(3, dtype=torch.complex64)
    compiled = onnxc.from_torch(Turn(), (x,))
    torch.testing.assert_close(compiled(x), (x * 2j, x.abs()))
    arrays = compiled(x.numpy())
    assert arrays[0].dtype == np.complex64
    np.testing.assert_array_equal(arrays[0], compiled(x)[0].numpy())
    with pytest.raises(InputError, match="shape"):
        compiled(x.real)


class Pooled(torch.nn.Module):
    """An op that PyTorch's exporter lacks, and results that it does not export."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(3, 1))
        self.pool = torch.nn.AdaptiveMaxPool1d(4)

    def forward(self, x: Any, unused: Any) -> Any:
        return self.pool(x * self.scale), x.shape[1], "name", None, x


def test_what_the_exporters_lack() -> None:
    module, x = Pooled().eval(), torch.randn(2, 3, 9)
    shapes = ({0: torch.export.Dim("batch")}, None)
    compiled = onnxc.from_torch(module, (x, x), dynamic_shapes=shapes)
    for rows in (2, 1, 5):
        x = torch.randn(rows, 3, 9)
        with torch.no_grad():
            (y, *found), (wanted, *expected) = compiled(x, x), module(x, x)
        torch.testing.assert_close((y, found.pop()), (wanted, expected.pop()))
        assert found == expected == [3, "name", None]
    assert [t.name for t in compiled.compiled.get_inputs()] == ["x"]


class Both(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x + x


def test_where_the_exporter_writes_what_is_no_onnx() -> None:
    """It makes Add of a sum of bools, which is `or`."""
    x = torch.tensor([True, False])
    torch.testing.assert_close(onnxc.from_torch(Both(), (x,))(x), x)

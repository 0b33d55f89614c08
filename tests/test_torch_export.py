"""onnxc.from_torch: calls as the module's, dynamic shapes, errors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import InputError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402
from torch.ao.quantization.fx import _decomposed  # noqa: E402, F401  (has the ops of quantized_decomposed)
from torch.nn.utils import parametrizations  # noqa: E402

from onnxc.torch.omissions import check_nothing_left_out  # noqa: E402
from tests.torch_harness import Function, close  # noqa: E402


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


def test_modules_of_other_kinds() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    inside = torch.nn.Sequential(torch.jit.script(net[0]))
    quantized = torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear})
    for module, message in (
        (torch.jit.trace(net, torch.ones(2, 4)), "it is a TopLevelTracedModule, which is TorchScript; give the module"),
        (inside, "its part '0' is a RecursiveScriptModule, which is TorchScript"),
        (quantized, r"its part '0' is a Linear of torch\.ao\.nn\.quantized.*before it was quantized"),
    ):
        with pytest.raises(onnxc.torch.ExportError, match=message):
            onnxc.from_torch(module, torch.ones(2, 4))


def test_what_is_no_module_or_no_sequence() -> None:
    net = torch.nn.Linear(4, 3)
    for module, args, message in (
        (None, (), "takes a torch.nn.Module, not a NoneType$"),
        (lambda x: x + 1, (torch.ones(2),), "not a function; a function can be the forward of one"),
        (net, None, "a sequence, or one tensor, and not a NoneType"),
        (net, {"input": torch.ones(1, 4)}, "and not a dict"),
    ):
        with pytest.raises(onnxc.errors.InputError, match=message):
            onnxc.from_torch(module, args)


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


class Decides(torch.nn.Module):
    """Its code asks for sizes."""

    def forward(self, x: Any, y: Any, z: Any) -> Any:
        if x.shape[0] == 7 or x.shape[0] == 1:
            return x
        return x * 2 + (1 if y.shape[0] > 5 else 3), y + 1, z - 1


def test_sizes_that_the_export_does_not_hold_for() -> None:
    """PyTorch's exporter drops what the code decided about sizes, and the model would run the wrong branch."""
    auto, third = torch.export.Dim.AUTO, torch.export.Dim("third", min=3, max=8)
    shapes = ({0: auto}, {0: auto}, {0: third, 1: 2 * third})
    module = Decides()
    compiled = onnxc.from_torch(module, (torch.ones(4), torch.ones(4), torch.ones(4, 8)), dynamic_shapes=shapes)

    def called(x: int, y: int, z: int, last: int) -> Any:
        return compiled(torch.ones(x), torch.ones(y), torch.ones(z, last))

    torch.testing.assert_close(called(9, 1, 8, 16), module(torch.ones(9), torch.ones(1), torch.ones(8, 16)))
    with pytest.raises(InputError, match=r"\[0\] is 7, and .* for Ne\(args\[0\]\.shape\[0\], 7\) \(.*export\.py:\d+\)"):
        called(7, 4, 4, 8)
    with pytest.raises(InputError, match=r"args\[1\]\.shape\[0\] is 6, and the module was exported for 0 to 5"):
        called(4, 6, 4, 8)
    with pytest.raises(InputError, match=r"args\[2\]\.shape\[0\] is 9, and the module was exported for 3 to 8"):
        called(4, 4, 9, 18)
    with pytest.raises(InputError, match=r"\[1\] is 9, and has to be 2\*args\[2\]\.shape\[0\] = 8"):
        called(4, 4, 4, 9)
    with pytest.warns(onnxc.torch.SizeWarning, match=r"\[0\] is 1, .* for greater sizes"):
        called(1, 4, 4, 8)


@pytest.mark.parametrize("dim", [torch.export.Dim("n", min=1, max=8), torch.export.Dim.DYNAMIC(min=1, max=8)])
@pytest.mark.parametrize("f", [lambda x: x.mean(0), lambda x: torch.linalg.det(x.mT @ x) + x.sum()])
def test_ranges_of_dims(dim: Any, f: Any) -> None:
    """A size below the least that was asked for was answered, where that is 1 or 2."""
    model = onnxc.from_torch(Function(f), (torch.ones(4, 2),), dynamic_shapes={"args": ({0: dim},)})
    torch.testing.assert_close(model(torch.ones(1, 2)), f(torch.ones(1, 2)))
    with pytest.raises(InputError, match=r"args\[0\]\.shape\[0\] is 0, and the module was exported for 1 to 8"):
        model(torch.ones(0, 2))


def test_ranges_of_dims_that_others_are_made_of() -> None:
    """The range was not looked at where no dim is the `Dim` itself; nor whether there is such a number."""
    shapes = {"args": ({0: 2 * torch.export.Dim("n", min=2, max=8) + 1},)}
    model = onnxc.from_torch(Function(lambda x: x * 2), (torch.ones(9, 2),), dynamic_shapes=shapes)
    torch.testing.assert_close(model(torch.ones(5, 2)), torch.full((5, 2), 2.0))
    for size, message in ((6, "is 6, and has to be 2*n + 1 of a whole n"), (3, "n of args[0].shape[0] = 2*n + 1 is 1")):
        with pytest.raises(InputError, match=re.escape(message)):
            model(torch.ones(size, 2))


class Swapped(torch.nn.Module):
    """Calls itself with its arguments the other way around."""

    def forward(self, x: Any, y: Any, again: bool = True) -> Any:
        if again:
            return self(y, x, False)
        return x.sum() if x.shape[0] > 5 and 30 % x.shape[0] % y.shape[0] == 0 else y.sum()


def test_sizes_of_a_module_that_calls_itself() -> None:
    module, x, y = Swapped(), torch.ones(3), torch.ones(9)
    n, m = torch.export.Dim("n"), torch.export.Dim("m")
    called = onnxc.from_torch(module, (x, y), dynamic_shapes=({0: n}, {0: m}))
    torch.testing.assert_close(called(x, y), module(x, y))
    with pytest.raises(InputError, match=r"args\[1\]\.shape\[0\] is 3"):
        called(y, x)
    with pytest.raises(InputError, match=r"^args\[0\]\.shape\[0\] is 0, and the module's code divides by that"):
        called(torch.ones(0), y)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.nn.functional.cross_entropy(x, torch.zeros(2, 5, 5, dtype=torch.long), label_smoothing=0.1),
        lambda x: torch.nn.functional.avg_pool2d(x, 3, divisor_override=5),
        lambda x: x.scatter_reduce(0, torch.zeros(2, 3, 5, 5, dtype=torch.long), x, "mean"),
        lambda x: torch.nn.functional.multilabel_margin_loss(x[:, 0, 0], torch.zeros(2, 5, dtype=torch.long)),
        lambda x: torch.ops.aten._upsample_bilinear2d_aa(x, [3, 3], False, 0.7, 0.7),
        lambda x: torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.5, 3, -8, 7, torch.int8),
        lambda x: torch.cond(
            x.sum() > 0,
            lambda y: -torch.nn.functional.avg_pool2d(y, 3, None, 0, False, True, 5),
            lambda y: torch.nn.functional.avg_pool2d(y, 3),
            (x,),
        ),
        lambda x: x.double() > 0.1,
        lambda x: torch.nn.functional.layer_norm(x.double(), (5,)),
        lambda x: x.to(torch.float8_e5m2).float(),
    ],
)
def test_what_the_exporter_leaves_out_is_seen(f: Any) -> None:
    class Whole(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return f(x)

    program = torch.export.export(Whole(), (torch.ones(2, 3, 5, 5),))
    with pytest.raises(onnxc.errors.UnsupportedError, match=r"exporter (leaves out|writes)"):
        check_nothing_left_out(program)


class Smoothed(torch.nn.Module):
    def forward(self, x: Any, classes: Any) -> Any:
        q = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.5, 3, -8, 7, torch.int8)
        return torch.nn.functional.cross_entropy(x, classes, label_smoothing=0.2), q, torch.cos(x.double() * 1e6 * 0.1)


def test_what_the_exporter_leaves_out() -> None:
    module, x, classes = Smoothed(), torch.randn(4, 3) * 5, torch.tensor([0, 2, 1, 1])
    torch.testing.assert_close(onnxc.from_torch(module, (x, classes))(x, classes), module(x, classes))


class Projected(torch.nn.Module):
    """Of LSTM's projections the exporter writes no valid ONNX."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(2, 3, proj_size=2)

    def forward(self) -> Any:
        return self.layer(torch.ones(2, 1, 2))


def test_a_module_without_arguments() -> None:
    module = Projected().eval()
    with torch.no_grad():
        torch.testing.assert_close(onnxc.from_torch(module)(), module())


class Moments(torch.nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Any) -> Any:
        return self.f(x)


@pytest.mark.parametrize("f", [lambda x: (x.mean(0), x.var(0), x.mean(1)), lambda x: torch.var_mean(x, 0)])
def test_moments_of_dims_without_elements(f: Any) -> None:
    """The exporter's are 0. Our importer's traces once had no dims of 0 and 1 any more after a mean."""
    model = onnxc.from_torch(Moments(f), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    for n in (0, 1, 2):
        x = torch.randn(n, 4)
        torch.testing.assert_close(model(x), f(x), equal_nan=True)


def test_means_that_only_the_exporter_has() -> None:
    """A number as an open argument: the exporter's model, which is right for all sizes but 0."""

    class Scaled(torch.nn.Module):
        def forward(self, x: Any, k: int) -> Any:
            return x.mean(0) * k

    shapes = ({0: torch.export.Dim("n")}, torch.export.Dim.DYNAMIC)
    model = onnxc.from_torch(Scaled(), (torch.ones(3, 4), 5), dynamic_shapes=shapes)
    assert model(torch.ones(5, 4), 7).equal(torch.full((4,), 7.0))


def test_sizes_as_results_of_what_the_exporter_lacks() -> None:
    def f(x: Any) -> Any:
        return {"size": x.shape[0] * 2 - 1, "part": x.shape[0] / 4, "ends": torch.aminmax(x), "k": 3}

    model = onnxc.from_torch(Moments(f), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("n")},))
    for n in (1, 2, 5):
        x = torch.randn(n, 4)
        torch.testing.assert_close(model(x), f(x))


def test_what_parameters_alone_decide_is_computed_once() -> None:
    """Also by ops that no model has."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = parametrizations.orthogonal(nn.Linear(5, 5))  # a matrix_exp
            self.system = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Any) -> Any:
            values, vectors = torch.linalg.eig(self.system)
            return self.turn(x) * values.abs(), (vectors @ torch.diag(values)).real + x.sum()

    net, x = Rotated(), torch.randn(3, 5)
    close(onnxc.from_torch(net, (x,))(x), net(x))

    class Moved(Rotated):
        def forward(self, x: Any) -> Any:
            return torch.linalg.matrix_exp(self.system * x)

    with pytest.raises(onnxc.torch.ExportError, match="linalg_matrix_exp"):
        onnxc.from_torch(Moved(), (x[0],))

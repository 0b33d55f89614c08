"""torch.compile(backend="onnxc"): answers, sizes, weights that change, what falls back, gradients."""

from __future__ import annotations

import copy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxc
from onnxc.errors import InputError, ToolchainError, UnsupportedOpError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from onnxc.torch.backend import backend  # noqa: E402
from tests.torch_harness import close, fallbacks, fresh, through  # noqa: E402


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    with fresh(), torch.no_grad():
        yield


class Net(nn.Module):
    """A small network with what models have: a convolution, norms, attention, an embedding, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(7, 17, 3, padding=1)
        self.norm = nn.BatchNorm1d(17)
        self.table = nn.Embedding(11, 17)
        self.out = nn.Linear(17, 5)
        self.register_buffer("scale", torch.full((17,), 0.5))

    def forward(self, x: Any, ids: Any) -> dict[str, Any]:
        y = F.silu(self.norm(self.conv(x))).transpose(1, 2) * self.scale + self.table(ids)
        y = F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], is_causal=True)[:, 0]
        return {
            "y": F.log_softmax(self.out(F.layer_norm(y, (17,))), -1),
            "best": y.argmax(-1),
            "length": x.shape[2] * 2,
        }


def feeds(batch: int, length: int) -> tuple[Any, Any]:
    return torch.randn(batch, 7, length), torch.randint(0, 11, (batch, length))


@pytest.mark.parametrize("length", [1, 13])
def test_a_network(length: int) -> None:
    net = Net().eval()
    x, ids = feeds(3, length)
    found, expected = through(net)(x, ids), net(x, ids)
    assert found["length"] == expected["length"] and torch.equal(found["best"], expected["best"])
    close(found["y"], expected["y"])
    assert found["y"].stride() == expected["y"].stride()


def test_one_compile_for_all_sizes() -> None:
    net = Net().eval()
    compiled = through(net, dynamic=True)
    for batch, length in ((2, 5), (3, 17), (5, 2), (7, 31)):
        x, ids = feeds(batch, length)
        found = compiled(x, ids)
        close(found["y"], net(x, ids)["y"])
        assert found["length"] == 2 * length
    (graph,) = onnxc.torch.report().graphs
    assert graph.compiles == 1 and not graph.fallbacks


def test_sizes_where_no_program_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise ToolchainError("no compiler")

    monkeypatch.setattr("onnxc.torch.program.compile", refused)
    net = Net().eval()
    compiled = through(net, dynamic=True)
    for batch, length in ((2, 5), (3, 17)):
        x, ids = feeds(batch, length)
        found = compiled(x, ids)
        close(found["y"], net(x, ids)["y"])
        assert found["length"] == 2 * length


def test_a_size_that_is_no_dim_of_a_tensor() -> None:
    def f(x: Any, n: int) -> Any:
        return x.sum() + torch.arange(n).float() * n

    compiled = through(f, dynamic=True)
    for n in (3, 7, 12):
        close(compiled(torch.ones(n + 1), n), f(torch.ones(n + 1), n))


def test_sizes_that_data_decides() -> None:
    """PyTorch decides; what comes after it is a program."""

    def f(x: Any, n: Any) -> Any:
        k = n.sum().item()
        torch._check(k >= 0)
        torch._check(k <= x.shape[0])
        found = x[:, 0].nonzero()
        return x[:k].sum(0), x[k:] * 2, found * 3 + k, x.exp() * (found.shape[0] / 2), x.new_zeros(k) + 1

    sizes = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**sizes), torch.no_grad():
        compiled = through(f)
        for zeros, k in ((2, 3), (5, 0), (0, 5), (4, 1)):
            x = torch.randn(5, 4)
            x[:zeros, 0] = 0
            torch._dynamo.decorators.mark_unbacked(x, 0)
            close(compiled(x, torch.tensor([k, 0])), f(x, torch.tensor([k, 0])))
        (graph,) = onnxc.torch.report().graphs
        assert graph.compiles == 1 and fallbacks() == {"aten.nonzero.default"}
        with pytest.raises(RuntimeError, match="Runtime assertion"):
            compiled(x, torch.tensor([0, -1]))


def test_numbers_that_sizes_decide() -> None:
    def f(x: Any) -> Any:
        n = x.shape[0]
        return x * (n / 3), x / n**0.5, torch.full((2,), n / 7), x.long() * (n / 2), x.clamp(max=1 / n), x.std(0)

    compiled = through(f, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 4)
        close(compiled(x), f(x))
    assert not fallbacks()


def test_whole_numbers_that_may_be_negative() -> None:
    """Programs are told sizes, which are not: such a number is the difference of two."""

    def f(x: Any, n: int) -> Any:
        quotients = x * (n // 3), x + n % 5, x - n // -2, x * (n / 4), x * int(n * 0.7), x * abs(n), x + max(n, 1)
        return *quotients, x[:n], x[n], F.pad(x, (n, 2)), F.pad(x, (-n, n)), torch.arange(n, 9), x.roll(n)

    compiled = through(f, dynamic=True)
    x = torch.randn(9)
    for n in (2, -2, 3, -7, 0, 5, -4):
        close(compiled(x, n), f(x, n))
    assert not fallbacks()


def test_whole_numbers_that_no_size_can_be() -> None:
    def f(x: Any, bits: int) -> Any:
        most = 2 ** (bits - 1) - 1
        return (x * most).round().clamp(-most - 1, most) / (1 << bits), x > most

    compiled = through(f, dynamic=True)
    for bits in (8, 4, 5, 60):
        x = torch.randn(9)
        close(compiled(x, bits), f(x, bits))
    assert not fallbacks()


def test_padding_of_a_sign_that_sizes_decide() -> None:
    def f(x: Any, y: Any) -> Any:
        return F.pad(x, (0, y.shape[1] - x.shape[1]), value=2.0)

    compiled = through(f, dynamic=True)
    for size, wanted in ((3, 5), (7, 4), (5, 8)):
        x, y = torch.randn(2, size), torch.randn(2, wanted)
        close(compiled(x, y), f(x, y))
    assert not fallbacks()


def test_a_mean_of_images_whose_sizes_are_halved() -> None:
    """What a BatchNorm in training mode divides by is made of rounded quotients of sizes."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)).train()
    other = copy.deepcopy(net)
    compiled = through(other, dynamic=True)
    for batch, height, width in ((2, 9, 12), (3, 8, 11), (5, 13, 7)):
        x = torch.randn(batch, 3, height, width)
        close(compiled(x), net(x))
        close(dict(other.named_buffers()), dict(net.named_buffers()))
    assert not fallbacks()


def test_shifts() -> None:
    def f(x: Any, by: Any) -> Any:
        return x << by, x >> by, x << 3, x >> 2, x.to(torch.uint8) >> by, x.to(torch.int8) << by, x.int() >> 70

    x, by = torch.randint(-99, 99, (4, 5)), torch.tensor([0, 3, 40, 70, -1], dtype=torch.int8)
    for found, expected in zip(through(f)(x, by), f(x, by), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert not fallbacks()


@pytest.mark.parametrize("f", [torch.amax, torch.amin, torch.aminmax])
def test_out_of_another_dtype(f: Any) -> None:
    """Eager PyTorch refuses it, and its tracing converts."""
    x = torch.randn(3, 4)

    def into(dtype: Any) -> Any:
        out = torch.empty(3, dtype=dtype)
        return f(x, dim=1, out=(out, torch.empty(3)) if f is torch.aminmax else out)

    close(tuple(through(into)(torch.float32)), tuple(into(torch.float32)))
    with pytest.raises(RuntimeError):
        into(torch.float64)
    with pytest.raises(Exception, match=r"with out= of torch.float64 \[.*test_torch_compile.py"):
        through(into)(torch.float64)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lists_of_labels_end_at_the_first_gap(reduction: str) -> None:
    """PyTorch's own decomposition reads on behind it."""

    def f(x: Any, labels: Any) -> Any:
        return torch.nn.functional.multilabel_margin_loss(x, labels, reduction=reduction)

    compiled = through(f)
    for x, labels in (
        (torch.randn(3, 4), torch.tensor([[1, 3, -1, 2], [0, -1, 1, 1], [-1, 0, 0, 0]])),
        (torch.randn(4), torch.tensor([2, 2, -1, 0])),
        (torch.tensor([[torch.nan, 1.0, 2.0, torch.inf]]), torch.tensor([[1, -1, 0, 0]])),
    ):
        a, b = (x.clone().requires_grad_() for _ in range(2))
        with torch.enable_grad():
            expected, found = f(a, labels), compiled(b, labels)
            torch.testing.assert_close(found, expected, equal_nan=True)
            torch.testing.assert_close(*(torch.autograd.grad(y.sum(), v)[0] for y, v in ((found, b), (expected, a))))
    assert not fallbacks()


@pytest.mark.parametrize("how", ["in place", "replaced", "data"])
def test_weights_that_change_are_seen(how: str) -> None:
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)).eval()
    x = torch.randn(3, 7)
    compiled = through(net)
    close(compiled(x), net(x))
    if how == "in place":
        net[0].weight.mul_(3)
        net[1].running_mean.add_(1)
    elif how == "replaced":
        net[0].weight = nn.Parameter(torch.randn(5, 7))
    else:
        net[0].weight.data = torch.randn(5, 7)
    close(compiled(x), net(x))
    net[0].bias.fill_(2)
    close(compiled(x), net(x))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_weights_that_change_are_seen_without_guards_on_modules(how: str) -> None:
    net = nn.Sequential(nn.Linear(7, 5))
    x = torch.randn(3, 7)
    compiled = through(net, options={"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe})
    close(compiled(x), net(x))
    if how == "in place":
        net[0].weight.mul_(3)
    else:
        net[0].weight = nn.Parameter(torch.randn(5, 7))
    close(compiled(x), net(x))
    close(compiled(x[:2]), net(x[:2]))  # guards on arguments are as they were


class Spectral(nn.Module):
    """A filter among frequencies, with a weight and a buffer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
        self.register_buffer("turn", torch.polar(torch.ones(5), torch.randn(5)))

    def forward(self, x: Any) -> Any:
        y = torch.fft.rfft(x) * self.weight * self.turn.conj()
        return torch.fft.irfft(y, n=x.shape[-1]), y


@pytest.mark.parametrize("gradient", [False, True])
def test_complex_numbers(gradient: bool) -> None:
    net, x = Spectral(), torch.randn(2, 3, 8)
    with torch.set_grad_enabled(gradient):
        found, expected = through(net)(x), net(x)
        close(found, expected)
        if gradient:
            close(*(torch.autograd.grad(y.square().sum() + z.abs().sum(), net.weight) for y, z in (found, expected)))
    assert not fallbacks()


def test_real_numbers_among_complex_ones() -> None:
    """Integers and truth values have no imaginary part."""

    def f(n: Any, m: Any, z: Any) -> Any:
        return torch.cat([n, z]), torch.stack([z, m]), n.sum(dtype=z.dtype), n.cumsum(0, dtype=z.dtype)

    given = torch.arange(4), torch.tensor([True, False, True, True]), torch.randn(4, dtype=torch.complex64)
    close(through(f)(*given), f(*given))
    assert not fallbacks()


def test_a_module_that_changes_its_buffer() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: Any) -> Any:
            self.count.add_(x)
            return self.count * 2

    plain, compiled = Counter(), Counter()
    f = through(compiled)
    for _ in range(3):
        close(f(torch.ones(3)), plain(torch.ones(3)))
    close(compiled.count, plain.count)


def test_inputs_that_are_written_to_and_views() -> None:
    def f(x: Any, y: Any) -> Any:
        x[:, 1:3] = 7
        x.add_(y)
        return x.t(), y.expand(4, 5)

    a, b = torch.randn(4, 5), torch.randn(5)
    c = a.clone()
    found, expected = through(f)(a, b), f(c, b)
    for p, q in zip(found, expected, strict=True):
        close(p, q)
    close(a, c)
    assert found[0].data_ptr() == a.data_ptr()


def test_tensors_with_gaps_and_other_dtypes() -> None:
    def f(x: Any, y: Any, m: Any) -> Any:
        return x * 2 + y, m.float().sum(), (y.to(torch.bfloat16) * 3), x.double() / 3, m & (x > 0)

    x, y = torch.randn(5, 14)[:, ::2], torch.randn(7, 5).t()
    m = torch.rand(5, 7) > 0.5
    for p, q in zip(through(f)(x, y, m), f(x, y, m), strict=True):
        assert p.dtype == q.dtype
        close(p, q)


def test_memory_formats_are_kept() -> None:
    x = torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last)
    compiled, plain = through(lambda t: t * 2)(x), x * 2
    assert compiled.stride() == plain.stride()
    close(compiled, plain)


def test_what_is_missing_falls_back() -> None:
    def f(x: Any) -> Any:
        y = torch.relu(x) + 1
        q, r = torch.linalg.qr(y)
        return torch.exp(q @ r) - y

    x = torch.randn(5, 5)
    compiled = through(f)
    close(compiled(x), f(x))
    (graph,) = onnxc.torch.report().graphs
    assert {fall.op for fall in graph.fallbacks} == {"aten.linalg_qr.default"}
    assert "test_torch_compile.py" in graph.fallbacks[0].line
    assert len(graph.programs) == 2
    assert "linalg_qr" in str(onnxc.torch.report())
    torch._dynamo.reset()
    with pytest.raises(Exception, match="linalg_qr") as failure:
        through(f, options={"fallback": False})(x)
    assert isinstance(failure.value.__cause__ or failure.value, UnsupportedOpError) or "UnsupportedOpError" in str(
        failure.value
    )


def test_random_numbers_are_pytorchs_own() -> None:
    """In PyTorch's order, drawn before the one program; but for those that depend on data."""

    def f(x: Any) -> Any:
        y = F.dropout(x.t() * 2, 0.4) + torch.rand(3, 4) + torch.rand_like(x + 1).t()
        return y + torch.empty_like(y).uniform_(1, 2) + torch.randint_like(y, 9) + torch.randn_like(x).t()

    def g(x: Any) -> Any:
        return torch.rand(3) + torch.poisson(x.exp()) + torch.randn_like(x * 2)

    for h, x, data in ((f, torch.randn(4, 3), False), (g, torch.randn(3), True)):
        with fresh():
            torch.manual_seed(7)
            found = through(h, options={"fallback": data})(x)
            torch.manual_seed(7)
            close(found, h(x))
            assert fallbacks() == ({"aten.poisson.default"} if data else set())
            (graph,) = onnxc.torch.report().graphs
            assert len(graph.programs) == 1 + data and graph.draws == (2 if data else 6)


def test_an_assertion_about_data_is_of_the_programs_flag() -> None:
    def f(x: Any) -> Any:
        y = x.exp()
        torch._assert_async(y.sum() < 100, "too much")
        return y * torch.rand(3)

    compiled = through(f, options={"fallback": False})
    torch.manual_seed(3)
    found = compiled(torch.ones(3))
    torch.manual_seed(3)
    close(found, f(torch.ones(3)))
    with pytest.raises(RuntimeError, match="too much"):
        compiled(torch.full((3,), 9.0))
    (graph,) = onnxc.torch.report().graphs
    assert len(graph.programs) == 1


def test_source_lines_are_origins() -> None:
    net = Net().eval()
    through(net)(*feeds(2, 3))
    (graph,) = onnxc.torch.report().graphs
    lines = {o.line for report in graph.programs for k in report.kernels for o in k.origins}
    assert any("test_torch_compile.py:" in line for line in lines)
    assert not any("torch/nn" in line for line in lines)


def test_gradients() -> None:
    plain, net = Net(), Net()
    net.load_state_dict(plain.state_dict())
    x, ids = feeds(3, 5)
    with torch.enable_grad():
        F.nll_loss(through(net)(x, ids)["y"].flatten(0, 1), ids.flatten() % 5).backward()
        F.nll_loss(plain(x, ids)["y"].flatten(0, 1), ids.flatten() % 5).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        close(p.grad, q.grad)
    close(net.norm.running_mean, plain.norm.running_mean)


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(Exception, match="has no option 'quick'") as failure:
        through(torch.relu, options={"quick": True})(torch.ones(3))
    assert isinstance(failure.value.__cause__ or failure.value, InputError) or "InputError" in str(failure.value)


@pytest.mark.parametrize("flag", ["freezing", "fallback"])
def test_a_flag_that_is_none(flag: str) -> None:
    with pytest.raises(Exception, match=f"{flag} is True or False, not 'no'"):
        through(torch.relu, options={flag: "no"})(torch.ones(3))


@pytest.mark.parametrize("option", [{"threads": 0}, {"threads": "2"}, {"dtype": "float8"}, {"accuracy": "good"}])
def test_an_option_with_a_value_that_does_not_exist(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        through(lambda x: x + 1, options=option)(torch.ones(3))


def test_the_compiler_imports_no_torch() -> None:
    code = "import sys, onnxc, onnxc.torch, onnxc.compiler; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arrays_share_memory() -> None:
    from onnxc.torch.arrays import array_of, tensor_of

    t = torch.arange(6.0).reshape(2, 3)
    assert array_of(t).ctypes.data == t.data_ptr()
    h = torch.arange(6, dtype=torch.bfloat16)
    assert array_of(h).ctypes.data == h.data_ptr() and torch.equal(tensor_of(array_of(h)), h)
    assert tensor_of(np.zeros(3, np.float32)).dtype == torch.float32


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_product_is_its_output(dynamic: bool) -> None:
    """PyTorch views operands and results of products: no kernel copies a result for that."""
    net = nn.Linear(8, 5)
    x = torch.randn(2, 3, 8)
    compiled = through(lambda t: (net(t), t @ t.transpose(1, 2)), dynamic=dynamic)
    for found, expected in zip(compiled(x), (net(x), x @ x.transpose(1, 2)), strict=True):
        assert found.shape == expected.shape
        close(found, expected)
    (graph,) = onnxc.torch.report().graphs
    assert [k.kind for k in graph.programs[0].kernels] == ["matmul", "matmul"]


def test_a_product_that_others_read_too() -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 5)

    def f(t: Any) -> Any:
        y = t.view(2, 3, 8).view(6, 8) @ w
        return y.view(2, 3, 5), y + 1, y.view(3, 2, 5)

    for found, expected in zip(through(f)(x), f(x), strict=True):
        close(found, expected)


def test_products_that_become_vectors_and_scalars() -> None:
    net, x, w = nn.Linear(8, 5), torch.randn(8), torch.randn(8, 1)

    def f(t: Any) -> Any:
        return net(t), (t.view(1, 8) @ w).view(()), (t.view(1, 8) @ w).view(1)

    for found, expected in zip(through(f)(x), f(x), strict=True):
        close(found, expected)
    assert not fallbacks()


class Near(nn.Module):
    """What an attention adds for the distance of two places, as T5 has it: constant where no gradient is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 3)

    def forward(self, x: Any) -> Any:
        place = torch.arange(x.shape[-1])
        apart = (place - place[:, None]).abs()
        far = 8 + (apart.float().clamp(min=1) / 8).log().mul(3).to(torch.long)
        far = torch.min(far, torch.full_like(far, 15))
        return x + self.table(torch.where(apart < 8, apart, far)).permute(2, 0, 1)


@pytest.mark.parametrize("size", [9, 80])
def test_tensors_of_one_number_fold(size: int) -> None:
    net, x = Near(), torch.randn(2, 3, size, size)
    compiled = through(net)
    close(compiled(x), net(x))
    (graph,) = onnxc.torch.report().graphs
    assert [[step.op for step in k.steps] for k in graph.programs[0].kernels] == [["add"]]


def test_numbers_of_tensors_of_one_number() -> None:
    def f(x: Any) -> Any:
        two, one = torch.full_like(x, 2), torch.ones_like(x)
        return two * one, two - x, x * two, torch.full((2, 4), 5.0) + torch.ones(4)

    x = torch.randn(2, 3)
    compiled = through(f)
    close(compiled(x), f(x))
    assert not fallbacks()


def test_attention_that_pytorch_takes_apart() -> None:
    """Queries that are transposed, for which PyTorch has no kernel of its own."""
    q, k, v = torch.randn(3, 2, 4, 8, 6).transpose(-1, -2)
    f = F.scaled_dot_product_attention
    close(through(f)(q, k, v), f(q, k, v))
    (graph,) = onnxc.torch.report().graphs
    assert [k.kind for k in graph.programs[0].kernels] == ["attention"]


def test_attention_of_heads_of_any_size() -> None:
    """The scale, too, is of the call."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(f, backend="onnxc", dynamic=True, options={"fallback": False})
    for length, width in ((5, 8), (9, 8), (7, 16)):
        given = [torch.randn(2, 3, length, width, requires_grad=True) for _ in range(3)]
        same = [x.detach().clone().requires_grad_() for x in given]
        with torch.enable_grad():
            found, wanted = compiled(*given), f(*same)
            found.square().sum().backward()
            wanted.square().sum().backward()
        close(found.detach(), wanted.detach())
        close([x.grad for x in given], [x.grad for x in same])


def test_the_entry_point_names_this_backend() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {"onnxc": f"{backend.__module__}:{backend.__name__}"}

"""Quick calls of compiled graphs: answers and errors as by way of arrays, and nothing that changed is missed."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import onnxc.torch.backend as backend  # noqa: E402
import onnxc.torch.calls as calls  # noqa: E402
from onnxc.errors import InputError, RunError  # noqa: E402


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x):
        return x * self.weight + 1, x.sum()


@pytest.fixture(autouse=True)
def no_grad():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def compiled(function, **options):
    return torch.compile(function, backend="onnxc", options={"fallback": False}, **options)


def the_program():
    return backend._programs[-1][1]()


def agree(f, g, *args):
    for a, b in zip(f(*args), g(*args), strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b)


@pytest.fixture(params=["quick", "by arrays"])
def way(request, monkeypatch):
    if request.param == "by arrays":
        monkeypatch.setattr(calls, "_bridge", lambda: None)
    return request.param


def test_weights_that_change_are_seen(way):
    module, x = Scale(), torch.randn(2, 3)
    f = compiled(module)
    for _ in range(3):
        agree(f, module, x)
    program = the_program()
    assert (program.quick((module.weight, x)) is None) is (way != "quick")
    module.weight.mul_(2)
    agree(f, module, x)
    assert program.compiles == 2
    module.weight.data = torch.full((3,), 7.0)
    agree(f, module, x)
    module.weight = torch.nn.Parameter(torch.full((3,), 5.0))
    agree(f, module, x)


def quick_program():
    """A module, its input, and its program, whose calls are quick from now on."""
    module, x = Scale(), torch.randn(2, 3)
    f = compiled(module)
    f(x), f(x)
    program = the_program()
    assert program.quick((module.weight, x)) is not None
    return module, x, program


@pytest.mark.parametrize("change", ["memory", "version", "object"])
def test_a_look_at_the_weights_finds_each_change(change):
    module, x, program = quick_program()
    weight = module.weight
    if change == "memory":
        weight.data = weight.data.clone()
    elif change == "version":
        weight.add_(1)
    else:
        weight = torch.nn.Parameter(weight.detach())
    assert program.quick((weight, x)) is None


def test_arguments_in_other_forms(way):
    module = Scale()
    f = compiled(module)
    x = torch.randn(2, 3)
    for _ in range(2):
        agree(f, module, x)
    for other in (torch.randn(3, 2).T, torch.randn(4, 3)[::2], torch._neg_view(x), torch.randn(7)[1:].view(2, 3)):
        agree(f, module, other)
        agree(f, module, other)
    agree(f, module, x)


@pytest.mark.parametrize("other", [torch.ones(2, 2), torch.ones(2, 3, dtype=torch.float64), torch.ones(6)])
def test_without_dynamos_guards_a_wrong_argument_is_an_error(other):
    module, _, program = quick_program()
    with pytest.raises(InputError):
        program((module.weight, other))
    assert program.quick((module.weight, torch.ones(2, 3, device="meta"))) is None


def test_sizes_that_change_are_quick_from_the_second_call():
    f = compiled(lambda x, n: (x * n, x.sum(1)), dynamic=True)
    for n in (3, 5, 3, 5, 0):
        x = torch.randn(n, 4)
        agree(f, lambda x, n: (x * n, x.sum(1)), x, 2.5)
        agree(f, lambda x, n: (x * n, x.sum(1)), x, 2.5)


def test_a_failure_of_a_quick_call_is_the_same_error(way):
    table = torch.randn(4, 2)
    f = compiled(lambda i: (torch.nn.functional.embedding(i, table),))
    for _ in range(2):
        agree(f, lambda i: (table[i],), torch.tensor([0, 3]))
    with pytest.raises(RunError, match="the index 9 is out of bounds"):
        f(torch.tensor([0, 9]))
    agree(f, lambda i: (table[i],), torch.tensor([0, 3]))


def test_dtypes_orders_and_empty_results():
    def function(x, i):
        return x.T.contiguous() + 1, x.to(torch.bfloat16) * 2, i > 0, x[:0] * 2

    x, i = torch.randn(2, 3), torch.tensor([1, -1])
    f = compiled(function)
    for _ in range(3):
        agree(f, function, x, i)


def test_many_threads():
    module = Scale()
    f = compiled(module)
    f(torch.randn(2, 3))
    program, wrong = the_program(), []

    def work(seed):
        for k in range(200):
            x = torch.full((2, 3), float(seed * 1000 + k))
            y, s = program((module.weight, x))
            if not torch.equal(y, x * module.weight + 1) or s != x.sum():
                wrong.append((seed, k))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong


def test_results_that_autograd_hands_on_are_not_cut_short():
    """Aliases, writes to arguments and parts that PyTorch computes need AOTAutograd's layers."""

    def function(x):
        x.add_(1)
        return x.view(-1), x * 2

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    f = compiled(function)
    for _ in range(3):
        for a, b in zip((*f(x.copy_(y)), x), (*function(y.clone()), y + 1), strict=True):
            torch.testing.assert_close(a, b)


class Marked(torch.Tensor):
    """A class of tensors that keeps its name through ops, as vision's and audio's libraries have them."""


@pytest.mark.parametrize("of", ["argument", "weight"])
def test_classes_of_tensors(of):
    """The first call is made within a dispatch mode of AOTAutograd's that refuses classes it does not know."""
    module, x = Scale(), torch.randn(3, 3)
    if of == "weight":
        module.weight = torch.nn.Parameter(module.weight.as_subclass(Marked))
    else:
        x = x.as_subclass(Marked)

    def function(x):
        return *module(x), torch.linalg.inv(x), x.view(9)  # a program, an op of PyTorch's, a view of the argument

    f = torch.compile(function, backend="onnxc")
    for _ in range(3):
        agree(f, function, x)
        assert [type(y) for y in f(x)] == [type(y) for y in function(x)]
    module.weight.mul_(2)
    agree(f, function, x)
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        for h in (f, function):
            h(given)[0].sin().sum().backward()
        torch.testing.assert_close(given.grad, 2 * torch.autograd.grad(function(given)[0].sin().sum(), given)[0])


def test_zeros_without_memory(way):
    """Tangents of derivatives in forward mode, which the quick way would read at the address 0."""
    for dtype in (torch.float32, torch.complex64):
        x = torch.arange(1.0, 7.0).reshape(2, 3).to(dtype).requires_grad_()
        with torch.enable_grad():
            f = compiled(lambda x: x.sin() * 2)
            for tangent in (torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)):
                (found,) = torch.autograd.grad(f(x), x, tangent)
                assert found.abs().min() > 0.5
            (found,) = torch.autograd.grad(f(x), x, torch._efficientzerotensor((2, 3), dtype=dtype))
        assert not found.any()


def test_tangents(way):
    """Which programs have not, before and after calls without any."""
    weight = torch.randn(3, 2)
    f = compiled(lambda x: (x @ weight).sin() * 2)
    for _ in range(2):
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(f(forward_ad.make_dual(torch.ones(4, 3), torch.full((4, 3), 2.0)))).tangent
            x = torch.ones(4, 3)
            assert forward_ad.unpack_dual(f(x)).tangent is None
        torch.testing.assert_close(found, (x @ weight).cos() * (x @ weight) * 4)
        torch.testing.assert_close(f(x), (x @ weight).sin() * 2)

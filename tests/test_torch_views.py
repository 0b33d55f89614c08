"""torch.compile(backend="onnxc"): results that share memory, as in PyTorch; sizes that other sizes decide."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

import onnxc

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from tests.torch_harness import close, fallbacks, fresh, through  # noqa: E402


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    with fresh():
        yield


def same(found: Any, expected: Any) -> None:
    close(found, expected)
    for x, y in zip(found, expected, strict=True):
        assert x.stride() == y.stride()


def memory(x: Any) -> int:
    return int(x.untyped_storage().data_ptr())


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_an_argument(dynamic: bool) -> None:
    """With dynamic sizes PyTorch makes them again, with the strides and the offset of what the graph returns."""

    def f(x: Any) -> Any:
        return *x.chunk(3), x.t(), x[1:, ::2], x.view(-1), x[-1]

    compiled = through(f, dynamic=dynamic)
    with torch.no_grad():
        for rows in (5, 6):
            x = torch.randn(rows, 4)
            found = compiled(x)
            same(found, f(x))
            assert {memory(y) for y in found} == {memory(x)}
            x.zero_()
            assert not any(y.any() for y in found)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_a_result(dynamic: bool) -> None:
    def f(x: Any) -> Any:
        y, z = x * 2, x + 1
        return y, y[1], y.t().contiguous(), y.t(), z.view(-1), z.t(), y.split(2)[1]

    x = torch.randn(4, 4)
    with torch.no_grad():
        found, expected = through(f, dynamic=dynamic)(x), f(x)
        same(found, expected)
        shared = [[memory(a) == memory(b) for a in found] for b in found]
        assert shared == [[memory(a) == memory(b) for a in expected] for b in expected]
        found[0].zero_()
        assert not found[1].any() and not found[3].any() and found[2].any()
    (graph,) = onnxc.torch.report().graphs
    assert not graph.fallbacks and len(graph.programs) == 1


def test_views_with_elements_in_common() -> None:
    """Parts of a tensor that overlap share their memory; an expanded tensor has each element once."""

    def f(x: Any) -> Any:
        y, z = x * 2, x + 1
        return y[0][1:], y.view(-1)[2:6], z[:1].expand(5, 4), *(x - 1).chunk(2)

    x = torch.randn(4, 4)
    with torch.no_grad():
        found = through(f)(x)
        same(found, f(x))
        assert memory(found[0]) == memory(found[1]) and memory(found[3]) != memory(found[4])
        found[1].zero_()
        assert not found[0][1:].any()
    assert not fallbacks()


def test_windows_that_overlap() -> None:
    """An element that is in two windows is one element in memory."""

    def f(x: Any) -> Any:
        y = (x * 2).unfold(0, 3, 1)
        return y, (x + 1).unfold(0, 2, 2), y.sum(1) * 2

    for dynamic in (False, True):
        x = torch.randn(6)
        found, expected = through(f, dynamic=dynamic)(x), f(x)
        same(found, expected)
        found[0][1].zero_(), expected[0][1].zero_()
        same(found, expected)
    assert not fallbacks()


def test_changed_arguments_with_elements_in_common() -> None:
    def f(x: Any, y: Any) -> Any:
        return x.add_(1), y.mul_(2)

    a, b = torch.ones(6), torch.ones(6)
    with torch.no_grad():
        same(through(f)(a[:3], a[2:]), f(b[:3], b[2:]))
    assert torch.equal(a, b)


@pytest.mark.parametrize("where", [(slice(None, None, 2), slice(None, None, 2)), (slice(2, 6), slice(2))])
def test_views_of_changed_arguments_with_gaps_or_an_offset(where: Any) -> None:
    """Of open sizes, PyTorch makes these of strides and offset, which are those in the argument's own memory."""

    def f(x: Any) -> Any:
        before = x.chunk(2)[1]
        x.copy_(torch.arange(2.0))
        x[1:].t().mul_(3)
        return before, x[x.shape[0] // 2 :].t(), x.view_as(x)

    a, b = (torch.arange(40.0).view(10, 4) for _ in range(2))
    found, expected = through(f, dynamic=True)(a[where]), f(b[where])
    same(found, expected)
    found[1].zero_(), expected[1].zero_()
    same([a, *found], [b, *expected])


def test_views_of_an_argument_that_is_changed() -> None:
    def f(x: Any) -> Any:
        before = x[:2] * 1
        x.add_(1)
        return x.t(), x[1:], before

    compiled = through(f, dynamic=True)
    with torch.no_grad():
        for rows in (4, 7):
            x = torch.randn(rows, 3)
            y = x.clone()
            same(compiled(x), f(y))
            torch.testing.assert_close(x, y)


class Momentum(torch.nn.Module):
    """A layer, and its running mean, whose tensors each call replaces and then reads."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.mean = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        before = self.mean(x).detach() + self.last
        shift = torch.linalg.det(x)  # PyTorch's: a program after it reads what the weights were
        with torch.no_grad():
            for own, mean in zip(self.own.parameters(), self.mean.parameters(), strict=True):
                mean.data = mean.data * 0.9 + own.data * 0.1
            self.last.copy_(before[0])
        return self.own(x) * shift + self.mean(x).detach(), before * shift


@pytest.mark.parametrize("gradient", [False, True])
def test_weights_whose_data_is_replaced(gradient: bool) -> None:
    net = Momentum()
    other = copy.deepcopy(net)
    compiled = through(other)
    with torch.set_grad_enabled(gradient):
        for _ in range(3):
            x = torch.randn(3, 3)
            found, expected = compiled(x), net(x)
            same(found, expected)
            same(list(other.state_dict().values()), list(net.state_dict().values()))
            if gradient:
                pairs = (found, other), (expected, net)
                close(*(torch.autograd.grad(y[0].sum(), n.own.weight) for y, n in pairs))


def test_sizes_of_an_argument_that_is_the_base_of_another() -> None:
    """Dynamo guards the sizes as open ones; as those of a base, which is new in the second call, they are fixed."""

    def f(x: Any, part: Any) -> Any:
        return x * 2, len(part)

    compiled = through(f)
    for size in (3, 4, 5):
        x = torch.randn(size, size)
        close(compiled(x, torch.ones(1, 3) if size == 3 else x[:1]), f(x, x[:1]))
    assert len(onnxc.torch.report().graphs) == 2


def test_addresses_in_memory_of_open_sizes() -> None:
    """A mean of images whose channels lie together, which PyTorch strides anew, and windows; forward and backward."""

    def f(x: Any) -> Any:
        pooled = F.adaptive_avg_pool2d(x.sin(), 1).flatten(1)
        return pooled, (x * 2).as_strided((x.shape[0] - 1, 2), (1, 1)).exp()

    compiled = through(f, dynamic=True)
    for batch in (3, 4):
        x = torch.randn(batch, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        found, expected = compiled(x), f(x)
        close(found, expected)
        close(*(torch.autograd.grad(y[0].sum() + y[1].sum(), x) for y in (found, expected)))
    assert not fallbacks()


def test_gradients_of_views() -> None:
    def f(x: Any, w: Any) -> Any:
        y = x * w
        return y.t(), y[1:], x[1:], x.view(-1)

    compiled = through(f, dynamic=True)
    for rows in (4, 7):
        x, w = torch.randn(rows, 3, requires_grad=True), torch.randn(rows, 3, requires_grad=True)
        found, expected = compiled(x, w), f(x, w)
        same(found, expected)
        given = torch.autograd.grad([y.square().sum() for y in found], (x, w))
        torch.testing.assert_close(given, torch.autograd.grad([y.square().sum() for y in expected], (x, w)))


def test_gradients_have_memory_of_their_own() -> None:
    a, b = torch.randn(3, 2, requires_grad=True), torch.randn(6, requires_grad=True)
    through(lambda x, y: x + y.view(3, 2))(a, b).backward(torch.ones(3, 2))
    assert memory(a.grad) != memory(b.grad)


def test_results_without_elements() -> None:
    def f(x: Any, w: Any) -> Any:
        return x @ w, torch.cat([x, x], 1), x + 1, x.to(torch.bfloat16)

    x, w = torch.randn(0, 5), torch.randn(5, 3)
    with torch.no_grad():
        same(through(f)(x, w), f(x, w))


def grown(x: Any) -> Any:
    return F.interpolate(x, scale_factor=1.5, mode="nearest")


def pooled(x: Any) -> Any:
    """PyTorch writes the strides of axes of size 1 down."""
    return F.adaptive_avg_pool2d(x.to(memory_format=torch.channels_last), 1).flatten(1)


def last(x: Any) -> Any:
    return x[: -x.shape[1]] * 2, x[-x.shape[1] :] + 1, x[-x.shape[1]] * 3


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (grown, [(2, 3, 4, 6), (2, 3, 5, 8), (3, 3, 7, 5)]),
        (pooled, [(2, 3, 4, 6), (4, 3, 5, 8), (3, 3, 7, 5)]),
        (last, [(7, 2), (9, 3), (5, 5)]),
    ],
)
def test_sizes_that_others_decide(f: Any, shapes: list[tuple[int, ...]]) -> None:
    compiled = through(f, dynamic=True)
    with torch.no_grad():
        for shape in shapes:
            x = torch.randn(shape)
            torch.testing.assert_close(compiled(x), f(x))
    assert not fallbacks()


def scaled(x: Any, b: Any) -> Any:
    x.mul_(2)
    return x[1:3], x.view(-1), b[1:], b * 2


def as_integers(x: Any, b: Any) -> Any:
    y = b * 2
    x.mul_(2)
    return x.view(torch.int32).chunk(2)[1], y, y.view(torch.int32)[b.shape[0] // 2 :]


def turned(x: Any, b: Any) -> Any:
    x.t_()
    x.mul_(2)
    return x[x.shape[0] // 2 :], b + 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", [scaled, as_integers, turned])
def test_views_of_arguments_that_share_memory(f: Any, dynamic: bool) -> None:
    a, b = (torch.arange(20.0).view(10, 2) for _ in range(2))
    found, expected = through(f, dynamic=dynamic)(a[2:6], a), f(b[2:6], b)
    same(found, expected)
    found[0].add_(1), expected[0].add_(1)
    same([a, *found], [b, *expected])


def test_gradients_of_arguments_that_share_memory() -> None:
    def gradient(f: Any) -> Any:
        w = torch.arange(20.0).requires_grad_()
        b = w.view(10, 2) * 1
        return torch.autograd.grad([y.square().sum() for y in f(b[2:6], b)], w)

    close(gradient(through(scaled)), gradient(scaled))


def test_a_changed_part_that_begins_in_the_same_column() -> None:
    """PyTorch takes two such matrices to be apart in memory."""
    a, b = (torch.arange(40.0).view(10, 4) for _ in range(2))
    same(through(lambda x, b: (x.mul_(2), b * 2))(a[2:6, :2], a), (b[2:6, :2].mul_(2), b * 2))


def test_the_transpose_of_an_argument_with_gaps() -> None:
    a, b = (torch.arange(60.0).view(20, 3) for _ in range(2))
    x, y = a[2:12:2, :2], b[2:12:2, :2]
    found, expected = through(turned, dynamic=True)(x, x.new_ones(1)), turned(y, y.new_ones(1))
    same([a, x, *found], [b, y, *expected])


def test_graphs_that_are_left_to_pytorch_are_reported() -> None:
    """Views that AOTAutograd would lose: PyTorch runs such a graph, and the report says so."""

    def f(x: Any) -> Any:
        x.mul_(2)
        return x.view(torch.int32).chunk(2)[1]

    a, b = torch.arange(8.0), torch.arange(8.0)
    found = torch.compile(f, backend="onnxc", dynamic=True)(a)
    same([a, found], [b, f(b)])
    assert [g.kind for g in onnxc.torch.report().graphs if g.fallbacks][-1] == "eager"
    assert "another dtype" in str(onnxc.torch.report())


@pytest.mark.parametrize("first", ["apart", "of other memory"])
def test_arguments_that_come_to_share_memory(first: str) -> None:
    """PyTorch's guards admit these to what was compiled for arguments that have nothing in common."""

    def f(x: Any, y: Any) -> Any:
        x.add_(y * 2)
        return x * y

    compiled = through(f)
    places = [(0, 40), (0, 10), (0, 2), (3, 13), (0, 0), (0, 40)]
    for at, (i, j) in enumerate(places):
        memories = [torch.linspace(-1, 1, 100) for _ in range(2)]
        pairs = [[m.as_strided((3, 4), (10, 1), k) for k in (i, j)] for m in memories]
        if first == "of other memory" and not at:
            pairs = [[t.clone() for t in pair] for pair in pairs]
        close(compiled(*pairs[0]), f(*pairs[1]))
        close(memories[0], memories[1])


def test_many_parts_of_one_memory() -> None:
    """Of parameters that are parts of one vector, each is looked at beside its neighbours."""
    a, b = torch.arange(600.0), torch.arange(600.0)

    def step(parts: Any) -> Any:
        for p in parts:
            p.mul_(2)
        return parts[0] + 1

    threes = [slice(k, k + 3) for k in range(0, 600, 3)]
    for places in (threes, [slice(0, None, 2), slice(1, None, 2)], [slice(7), slice(5, 9)]):
        same([a, through(step)([a[p] for p in places])], [b, step([b[p] for p in places])])

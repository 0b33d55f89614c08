"""Training through torch.compile(backend="onnxc"): gradients, optimizers, dropout, autocast, sizes, recurrent nets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import onnxc

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.torch_harness import close, fallbacks, fresh, through  # noqa: E402


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    with fresh(), torch._dynamo.config.patch(allow_rnn=True):
        yield


class Block(nn.Module):
    """A residual block of convolutions."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(out), nn.GroupNorm(2, out)
        self.short = nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Any) -> Any:
        return F.relu(self.last(self.b(F.relu(self.norm(self.a(x))))) + self.short(x))


class Transformer(nn.Module):
    """A GPT-2 of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = nn.Embedding(23, 16), nn.Embedding(7, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids) + self.place(torch.arange(ids.shape[1]))
        q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return self.norms[2](x[:, -1]) @ self.table.weight.t()


class Recurrent(nn.Module):
    """A two-way LSTM of two layers under a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 8)
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.out = nn.Linear(5, 23)

    def forward(self, ids: Any) -> Any:
        return self.out(self.gru(self.lstm(self.table(ids))[0])[0][:, -1])


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 23))


def resnet() -> Any:
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 23))
    return nn.Sequential(nn.Conv2d(3, 4, 5, 2, 2), nn.MaxPool2d(3, 2, 1), Block(4, 8, 2), pool)


NETS: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "mlp": (mlp, lambda: torch.randn(5, 8), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "resnet": (resnet, lambda: torch.randn(5, 3, 16, 16), lambda p: torch.optim.AdamW(p, lr=0.01)),
    "gpt2": (Transformer, lambda: torch.randint(0, 23, (5, 7)), lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4)),
    "lstm": (Recurrent, lambda: torch.randint(0, 23, (5, 7)), lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-4)),
}


@pytest.mark.parametrize("name", NETS)
def test_training(name: str) -> None:
    """Three steps: the losses, the gradients of the first, and the parameters after the last."""
    build, feed, optimizer = NETS[name]
    plain = build()
    net = copy.deepcopy(plain)
    compiled = through(net)
    ours, theirs = optimizer(net.parameters()), optimizer(plain.parameters())
    for step in range(3):
        x, labels = feed(), torch.randint(0, 23, (5,))
        losses = []
        for model, rule in ((compiled, ours), (plain, theirs)):
            rule.zero_grad()
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
        if step == 0:
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
        ours.step()
        theirs.step()
    for (key, p), q in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3, msg=lambda text, key=key: f"{key}: {text}")
    assert not fallbacks()
    assert all(graph.compiles == 1 for graph in onnxc.torch.report().graphs)


def test_dropout_drops_the_same_on_the_way_back() -> None:
    """And the same as eager PyTorch's; sizes that change, too."""

    def f(x: Any) -> Any:
        return F.dropout(x.exp() * 2, 0.25) + 1

    compiled = through(f, dynamic=True)
    for size in (40, 31):
        answers = []
        for call in (compiled, f):
            torch.manual_seed(size)
            x = torch.linspace(0, 1, size * 50).reshape(size, 50).requires_grad_()
            y = call(x)
            y.sum().backward()
            answers.append((y, x.grad))
        torch.testing.assert_close(*answers)
    assert not fallbacks()


def test_dropout_of_sizes_that_windows_give() -> None:
    def f(x: Any) -> Any:
        y = F.dropout(F.avg_pool2d(x, 3, 2), 0.25) + 1
        return F.dropout(F.pad(y, (0, 1)), 0.5) + torch.rand_like(torch.cat([y, y[..., :1]], -1))

    compiled = through(f, dynamic=True)
    for size in (12, 15):
        answers = []
        for call in (compiled, f):
            torch.manual_seed(size)
            x = torch.linspace(0, 1, 6 * size * size).reshape(2, 3, size, size).requires_grad_()
            y = call(x)
            y.sum().backward()
            answers.append((y, x.grad))
        close(*answers)
    assert not fallbacks()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_checkpoint_draws_the_same_again(dynamic: bool) -> None:
    """With the numbers that eager PyTorch draws there, and after it."""

    def block(x: Any, w: Any) -> Any:
        y = F.dropout(torch.relu(x @ w), 0.3) * torch.rand_like(x @ w) + torch.rand(6)
        return y * F.dropout(x, 0.5)

    def f(x: Any, w: Any) -> Any:
        for _ in range(2):
            x = checkpoint(block, x, w, use_reentrant=False)
        return x.sin()

    compiled, weight = through(f, dynamic=dynamic), torch.randn(6, 6)
    answers = []
    for call in (compiled, f):
        torch.manual_seed(3)
        x, w = torch.linspace(-1, 2, 24).reshape(4, 6).requires_grad_(), weight.clone().requires_grad_()
        y = call(x, w)
        between = torch.rand(3)
        y.sum().backward()
        answers.append((y, x.grad, w.grad, between, torch.rand(3)))
    close(*answers)
    forward, backward = onnxc.torch.report().graphs
    assert not fallbacks() and len(forward.programs) == len(backward.programs) == 1
    assert forward.draws == backward.draws == 8


def test_autocast() -> None:
    plain = mlp()
    net = copy.deepcopy(plain)
    x, losses = torch.randn(5, 8), []
    for model in (through(net), plain):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        assert y.dtype is torch.bfloat16
        losses.append(F.cross_entropy(y.float(), torch.arange(5)))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype is torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=5e-3)


def test_training_at_all_sizes() -> None:
    plain = mlp()
    net = copy.deepcopy(plain)
    compiled = through(net, dynamic=True)
    for rows in (3, 5, 8, 31):
        x = torch.randn(rows, 8)
        for model in (compiled, plain):
            model(x).square().mean().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    graphs = onnxc.torch.report().graphs
    assert [g.kind for g in graphs] == ["forward", "backward"] and all(g.compiles == 1 for g in graphs)


def test_norms_of_float64() -> None:
    net = nn.Sequential(nn.LayerNorm(5), nn.Tanh(), nn.GroupNorm(1, 5)).double()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    wanted, found = (torch.autograd.grad(f(x).pow(3).sum(), [x, *net.parameters()]) for f in (net, through(net)))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_norms_at_all_sizes() -> None:
    """A BatchNorm counts the elements, for its running variance; weight normalization has a backward op of its own."""
    convolution = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3))
    plain = nn.Sequential(convolution, nn.BatchNorm1d(4), nn.ReLU())
    net = copy.deepcopy(plain)
    compiled = through(net, dynamic=True)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 3, 5 + rows)
        for model in (compiled, plain):
            model(x).square().mean().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, plain[1].running_var)
    assert not fallbacks()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind: str) -> None:
    net = getattr(nn, kind)(4, 3, 2, bidirectional=True, bias=kind != "GRU").eval()
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        found, expected = through(net)(x), net(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (graph,) = onnxc.torch.report().graphs
    assert not graph.fallbacks and len(graph.programs) == 1


@pytest.mark.parametrize(("kind", "dtype"), [("LSTM", torch.bfloat16), ("GRU", torch.float64), ("RNN", torch.float16)])
def test_recurrent_layers_of_other_dtypes(kind: str, dtype: Any) -> None:
    """Those of halves run in float32, and only their results are rounded."""
    net = getattr(nn, kind)(4, 3, bidirectional=True).to(dtype)
    exact = copy.deepcopy(net).double()
    x = torch.randn(5, 2, 4, dtype=dtype)
    found = through(net)(x)[0]
    expected = exact(x.double())[0]
    for y in (found, expected):
        y.sum().backward()
    tolerance = {torch.float64: 1e-10, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    grads = [[p.grad.double() for p in n.parameters()] for n in (net, exact)]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(*grads, rtol=tolerance, atol=tolerance)
    assert found.dtype is dtype and not fallbacks()


def test_a_step_of_an_optimizer_is_one_program() -> None:
    layers = [nn.Linear(4, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    plain, other = (torch.optim.AdamW(layer.parameters(), 1e-2) for layer in layers)
    step = through(lambda: other.step())
    for _ in range(3):
        x = torch.randn(5, 4)
        for layer, go in zip(layers, (plain.step, step), strict=True):
            layer.zero_grad()
            layer(x).pow(2).sum().backward()
            go()
    close(dict(layers[1].named_parameters()), dict(layers[0].named_parameters()))
    assert not fallbacks()

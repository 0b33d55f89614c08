"""torch.compile(backend="onnxc"): ops that PyTorch does not take apart, as compositions of others."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

import onnxc

torch = pytest.importorskip("torch")

from onnxc.frontends.torch_fx import RULES  # noqa: E402
from onnxc.torch.composites import COMPOSITES  # noqa: E402
from onnxc.torch.layers import DECOMPOSITIONS  # noqa: E402
from onnxc.torch.lists import LISTS  # noqa: E402
from onnxc.torch.pools import POOLS  # noqa: E402
from tests.torch_harness import close, fallbacks, through  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted_torch")


def same(f: Any, *args: Any) -> None:
    """One graph without fallbacks, and eager PyTorch's answers and gradients."""
    given = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    found = through(f, fullgraph=True, options={"fallback": False})(*given)
    expected = f(*args)
    close(found, expected)
    first, second = (x[0] if isinstance(x, (list, tuple)) else x for x in (found, expected))
    if second.requires_grad:
        first.sum().backward()
        second.sum().backward()
        close([a.grad for a in given], [a.grad for a in args])


@pytest.mark.parametrize("values", [torch.randn(20), torch.ones(3), torch.zeros(0), torch.randn(4, 9).double()])
def test_histograms_whose_limits_are_those_of_the_data(values: Any) -> None:
    same(lambda x: (torch.histc(x, 5), *torch.histogram(x, 5)), values)
    same(lambda x: torch.histc(x, 4, 2, 2), values)


def test_histograms_whose_limits_are_given() -> None:
    x, weight = torch.tensor([-2, -1, 0, 0.5, 1, 3, 4, math.nan, math.inf]), torch.arange(9.0)
    edges = torch.tensor([-1, 0, 0.5, 3])
    same(lambda x, e: (*torch.histogram(x, e), *torch.histogram(x, e, weight=weight, density=True)), x, edges)
    same(lambda x: (*torch.histogram(x, 3, range=(-1.0, 3.0)), *torch.histogram(x, 3, range=(2.0, 2.0))), x)


def test_histograms_of_no_range() -> None:
    f = through(lambda x: torch.histc(x, 3) * 2)
    close(f(torch.tensor([0.0, 1, 2])), torch.tensor([2.0, 2, 2]))
    with pytest.raises(RuntimeError, match="not finite"):
        f(torch.tensor([0.0, 1, math.nan]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_quantization_that_training_imitates(dtype: Any) -> None:
    x = torch.cat([torch.randn(48) * 0.5, torch.tensor([math.nan, 0.25, -0.35, 3e5, 1e4, math.inf])]).to(dtype)
    same(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7), x.requires_grad_())


def test_quantization_by_numbers_of_the_data() -> None:
    scales, whole = torch.rand(3) * 0.1 + 0.05, torch.tensor([0, 3, -8], dtype=torch.int32)

    def f(x: Any, scales: Any, whole: Any) -> Any:
        one = torch.fake_quantize_per_tensor_affine(x, scales[0], whole[1], -8, 7)
        each = torch.fake_quantize_per_channel_affine(x, scales, whole, 1, -8, 7)
        return one * each, torch.fake_quantize_per_channel_affine(x, scales, whole + 0.3, 1, -8, 7)

    same(f, torch.randn(5, 3, requires_grad=True), scales, whole)

    def switched(x: Any, on: Any) -> Any:
        op = torch._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
        return op(x, scales[:1], whole[:1], on, -8, 7)

    for on in (0, 1):
        same(switched, torch.randn(4, requires_grad=True), torch.tensor([on]))


def test_quantization_whose_scale_is_learned() -> None:
    def f(x: Any, scale: Any, zero: Any) -> Any:
        one = torch._fake_quantize_learnable_per_tensor_affine(x, scale[:1], zero[:1], -8, 7, 0.5)
        each = torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 1, -8, 7, 0.5)
        return (one * each.detach() + each * torch.arange(3.0)).reshape(-1)

    x = torch.cat([torch.randn(48), torch.tensor([math.nan, 3e5, -3e5])]).reshape(17, 3)
    numbers = torch.tensor([0.1, 0.07, 0.3]), torch.tensor([2.5, -1.3, -9.0])
    same(f, *(t.requires_grad_() for t in (x, *numbers)))


@pytest.mark.parametrize(("shape", "window", "counts"), [
    ((2, 3, 9, 11), 2, (4, 5)), ((3, 7, 9), (2, 3), (6, 1)), ((2, 2, 6, 7, 8), (1, 2, 3), (2, 3, 4)),
])  # fmt: skip
def test_pools_whose_windows_are_drawn(shape: Any, window: Any, counts: Any) -> None:
    axes = len(counts)
    pool = (torch.nn.functional.fractional_max_pool2d, torch.nn.functional.fractional_max_pool3d)[axes - 2]
    x = torch.randint(-3, 3, shape).float()  # with equal elements
    x.view(-1)[::17] = math.nan
    samples = torch.rand(shape[0] if len(shape) == axes + 2 else 1, shape[-axes - 1], axes)

    def f(x: Any) -> Any:
        found, at = pool(x, window, counts, return_indices=True, _random_samples=samples)
        return found.nan_to_num(7.0), at

    same(f, x.requires_grad_())
    drawn(lambda x: pool(x.nan_to_num(), window, counts), x.detach())


def test_rows_that_are_looked_up_become_shorter() -> None:
    table = torch.randn(5, 4) * 2
    found, expected = table.clone(), table.clone()

    def f(table: Any, indices: Any) -> Any:
        return torch.nn.functional.embedding(indices, table, max_norm=1.0, norm_type=1.5)

    indices = torch.tensor([[1, 3], [3, 4]])
    close(through(f, options={"fallback": False})(found, indices), f(expected, indices))
    close(found, expected)
    assert not found.equal(table) and found[0].equal(table[0])


def test_numbers_for_complex_nan() -> None:
    z = torch.complex(torch.tensor([math.nan, 1, math.inf]), torch.tensor([math.inf, 2, math.nan]))
    same(lambda z: torch.stack([z.nan_to_num(1.0, 2.0, 3.0), z.nan_to_num()]), z)


def test_lists_of_tensors() -> None:
    xs, ys = [torch.rand(3) + 0.1, torch.rand(2, 2)], [torch.rand(3), torch.rand(2, 2)]

    def f(x: Any, y: Any, a: Any, b: Any, t: Any) -> Any:
        left, right = [x, y], [a, b]
        found = [
            torch._foreach_add(left, right, alpha=3), torch._foreach_add(left, t), torch._foreach_add(left, [1, 2.0]),
            torch._foreach_addcdiv(left, right, left, 2.0), torch._foreach_addcmul(left, right, left, [1.0, 2.0]),
            torch._foreach_maximum(left, 0.3), torch._foreach_minimum(left, right), torch._foreach_norm(left, 1),
            torch._foreach_pow(2.0, left), torch._foreach_pow(left, right), torch._foreach_lerp(left, right, 0.3),
            torch._foreach_sub(left, right, alpha=2), torch._foreach_sqrt(left), torch._foreach_mul(left, 3),
        ]  # fmt: skip
        copies = [x.clone(), y.clone()]
        torch._foreach_copy_(copies, right)
        torch._foreach_zero_(left)
        return [x for part in found for x in part] + copies + left

    same(f, *xs, *ys, torch.tensor(2.0))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_steps_over_lists_are_programs(kind: Any) -> None:
    pairs = [[torch.nn.Parameter(torch.arange(1.0, 4)), torch.nn.Parameter(torch.ones(2, 2))] for _ in range(2)]
    found, expected = (kind(p, lr=0.1, foreach=True) for p in pairs)
    step = through(found.step, options={"fallback": False})
    for number in range(3):
        for parameter in (p for pair in pairs for p in pair):
            parameter.grad = parameter.detach() * (number + 1)
        step()
        expected.step()
        close(*pairs)


def test_imaginary_parts_of_conjugates() -> None:
    same(lambda z: z.conj().imag * 2 + z.real, torch.randn(3, 4, dtype=torch.complex64))


def drawn(f: Any, *args: Any) -> None:
    """As `same`, with the numbers of one seed, and the generator left alike."""
    found = []
    for g in (through(f, fullgraph=True, options={"fallback": False}), f):
        torch.manual_seed(3)
        found.append((g(*args), torch.rand(1)))
    close(*found)


def test_probabilities_are_looked_at() -> None:
    """Of float64 PyTorch's decomposition draws other numbers, and it takes any number for a probability."""
    p = torch.rand(40)
    drawn(lambda p: (p.bernoulli(), torch.zeros(40).bernoulli_(p), p.double().bernoulli()), p)
    drawn(lambda p: (torch.zeros(40).bernoulli_(p.double()), p.bfloat16().bernoulli()), p)
    for wrong in (2.0, -0.5, math.nan):
        with pytest.raises(RuntimeError, match="a probability is not between 0 and 1"):
            through(lambda p: p.bernoulli() * 2)(torch.tensor([0.5, wrong]))


def test_places_drawn_by_probabilities() -> None:
    drawn(lambda p: (torch.multinomial(p, 1), torch.multinomial(p, 4)), torch.rand(50))
    drawn(lambda p: (torch.multinomial(p, 1, True), torch.multinomial(p.T, 3), torch.rand(2)), torch.rand(5, 50))
    drawn(lambda p: (torch.multinomial(p, 300, True), torch.multinomial(p.half(), 9, True)), torch.rand(3, 50))
    drawn(lambda p: (torch.multinomial(p[0].double(), 2, True), torch.rand(3)), torch.eye(5)[2:])
    drawn(lambda x: torch.distributions.Categorical(logits=x.double(), validate_args=False).sample(), torch.randn(3, 9))
    choose = through(lambda p: torch.multinomial(p, 1))
    for wrong in (math.inf, -1.0, math.nan):
        with pytest.raises(RuntimeError, match="negative, infinite or NaN"):
            choose(torch.tensor([0.5, wrong]))
    with pytest.raises(RuntimeError, match="their sum is 0"):
        choose(torch.tensor([[0.0, 1], [0, 0]]))


def test_draws_for_one_tensor_are_two() -> None:
    """With gradients PyTorch's search for equal nodes takes those that it does not know for one."""

    def f(x: Any) -> Any:
        noise = [torch.randn_like(x), torch.randn_like(x), torch.empty_like(x).exponential_()]
        noise += [torch.empty_like(x).exponential_(), *(torch.empty_like(x).uniform_(0, 3) for _ in "ab")]
        noise += [torch.zeros_like(x).normal_(), torch.zeros_like(x).normal_(), torch.randint_like(x, 9)]
        noise += [torch.randint_like(x, 9), torch.empty_like(x).geometric_(0.4), torch.empty_like(x).geometric_(0.4)]
        choices = [torch.nn.functional.gumbel_softmax(x, dim=k) for k in (0, 1)]
        return [x * n for n in noise] + choices

    found = []
    for g in (through(f, options={"fallback": False}), f):
        torch.manual_seed(3)
        x = torch.linspace(1, 2, 20).reshape(4, 5).requires_grad_()
        y = g(x)
        found.append((y, *torch.autograd.grad(sum(t.sin().sum() for t in y), x)))
    close(*found)


def test_arguments_that_the_schema_has_defaults_for_may_be_left_out() -> None:
    """PyTorch's graphs leave out those that are as the default."""
    for table, skipped in ((COMPOSITES, 0), (LISTS, 0), (POOLS, 0), (DECOMPOSITIONS, 0), (RULES, 1)):
        for op, f in table.items():
            all_of_them = list(inspect.signature(f).parameters.values())[skipped:]
            given = [p for p in all_of_them if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
            named = {p.name: p for p in given}
            for k, a in enumerate(op._schema.arguments if hasattr(op, "_schema") else ()):
                p = given[k] if k < len(given) and not a.kwarg_only else named.get(a.name)
                assert not a.has_default_value() or p is None or p.default is not p.empty, (op, a.name)


@pytest.mark.parametrize("n", [3, 40])
def test_normal_numbers_of_tensors(n: int) -> None:
    mean, std = torch.randn(n), torch.rand(n)
    drawn(lambda m: torch.normal(m, 1.0), mean)
    drawn(lambda m, s: (torch.normal(m, s), torch.normal(m, 0.3), torch.normal(1.5, s)), mean, std)
    drawn(lambda m, s: (torch.normal(m[:, None], s), torch.normal(m.double(), s)), mean, std)
    drawn(lambda m, s: torch.distributions.Normal(m, s, validate_args=False).sample((2,)), mean, std)
    with pytest.raises(RuntimeError, match="a standard deviation is negative"):
        through(lambda m, s: torch.normal(m, s))(mean, -std)


def test_casts_to_float8_of_what_is_too_large() -> None:
    x = torch.tensor([448.0, 465, 1e4, math.inf, -math.inf, math.nan, -1e6, 0.3])

    def f(x: Any) -> Any:
        return x.to(torch.float8_e4m3fn).float(), x.to(torch.float8_e5m2).float()

    torch.testing.assert_close(through(f)(x), f(x), equal_nan=True)


def test_linearized_functions() -> None:
    def f(x: Any) -> Any:
        value, derivative = torch.func.linearize(lambda x: x.exp() * x.cumsum(0), x)
        return value, derivative(torch.ones_like(x))

    close(through(f)(torch.arange(3.0)), f(torch.arange(3.0)))
    assert not fallbacks()


def test_second_derivatives_of_a_network() -> None:
    """Whose forward mode makes zeros without memory; and the gradient of what is computed with them."""
    weight = torch.randn(4, 4)

    def f(x: Any) -> Any:
        hessians = torch.func.vmap(torch.func.hessian(lambda z: (weight @ z).tanh()[0]))(x)
        return hessians[:, 1, 1] * x[:, 0]

    found = []
    for g in (through(f, options={"fallback": False}), f):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        y = g(x)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    close(*found)


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64"])
def test_memory_as_elements_of_another_type(name: str) -> None:
    x = torch.randint(0, 256, (3, 16), dtype=torch.uint8).view(getattr(torch, name))
    kinds = [torch.float32, torch.int64, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
    f = through(lambda x: [torch.cat([x, x]).view(kind) for kind in kinds], options={"fallback": False}, dynamic=True)
    for found, kind in zip(f(x), kinds, strict=True):
        assert found.dtype is kind
        assert torch.equal(found.contiguous().view(torch.uint8), torch.cat([x, x]).view(torch.uint8))


def test_bools_as_bytes() -> None:
    same(lambda x: (x > 0).view(torch.uint8) + 1, torch.randn(7))


def test_products_of_int8() -> None:
    x, y = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((32, 40), (40, 16)))
    same(lambda x, y: torch._int_mm(x, y), x, y)


# ---------------------------------------------------------------- branches and loops


def test_a_part_that_is_traced_once() -> None:
    part = torch.compiler.nested_compile_region(lambda x, w: ((x @ w).tanh() + x, x.mean()))

    def f(x: Any, ws: Any) -> Any:
        for w in ws:
            x, mean = part(x, w)
            x = x * mean
        return x

    compiled = through(f, options={"fallback": False})
    for rows in (2, 3):
        given = torch.randn(rows, 4), [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
        found, expected = compiled(*given), f(*given)
        close(found, expected)
        close(*(torch.autograd.grad(y.sum(), given[1]) for y in (found, expected)))


class Branching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        def narrow(x: Any) -> Any:
            return torch.cond(x.min() < -1, lambda x: self.b(x).tanh(), lambda x: x - x.mean(), (x,))

        return torch.cond(x.mean() > 0, lambda x: self.a(x).relu(), narrow, (x,)) * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_branches_are_programs(dynamic: bool) -> None:
    net = Branching()
    compiled = through(net, dynamic=dynamic, options={"fallback": False})
    for rows, least in ((3, 0), (5, -3), (4, -1)):
        found = []
        for f in (compiled, net):
            x = torch.linspace(least, 0.9, rows * 4).reshape(rows, 4).requires_grad_()
            y = f(x)
            found.append((y, *torch.autograd.grad(y.sin().sum(), (x, *net.parameters()), allow_unused=True)))
        close([0 if t is None else t for t in found[0]], [0 if t is None else t for t in found[1]])
    if dynamic:
        forward, backward = onnxc.torch.report().graphs
        assert len(forward.programs) >= 4 and len(backward.programs) >= 3


def test_loops_are_programs() -> None:
    def f(x: Any, n: Any) -> Any:
        def turn(k: Any, y: Any) -> Any:
            return k + 1, torch.cond(y.sum() > 0, lambda y: y * 0.9 - y.std(), lambda y: y + 1 + k, (y,))

        return torch._higher_order_ops.while_loop(lambda k, y: k < n, turn, (torch.zeros((), dtype=torch.int64), x))

    compiled = through(f, dynamic=True, options={"fallback": False})
    with torch.no_grad():
        for rows, n in ((3, 6), (5, 0), (4, 9)):
            x = torch.randn(rows, 2)
            close(compiled(x, torch.tensor(n)), f(x, torch.tensor(n)))
    assert len(onnxc.torch.report().graphs) == 1


def test_numbers_drawn_in_a_branch_keep_their_place() -> None:
    def f(x: Any) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: x + torch.rand(3), lambda x: x * 2, (x,))
        return torch.rand(3) * y

    for sign in (1, -1):
        drawn(f, torch.ones(3) * sign)


def test_a_branch_may_have_what_pytorch_computes() -> None:
    def f(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: torch.linalg.eigvalsh(x) + 1, lambda x: x.sum(0), (x,))

    close(through(f)(torch.eye(3)), f(torch.eye(3)))
    assert fallbacks() == {"aten._linalg_eigh.default"}

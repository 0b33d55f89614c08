"""Objects that hold tensors, as arguments and results of modules: caches of decoders, and the like."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest

import onnxc
from onnxc.errors import InputError, OnnxcError, UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from onnxc.torch.nesting import Held, difference, held, restored  # noqa: E402

Pair = namedtuple("Pair", "a b")


class Layer:
    def __init__(self, keys: Any) -> None:
        self.keys, self.length, self.twin = keys, keys.shape[0], keys
        self.notes = ["none"]


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any) -> None:
        self.x = x


class Private:
    """Made with an argument; one attribute has a slot and a private name, one that of a property."""

    __slots__ = ("__dict__", "__x")

    def __new__(cls, x: Any) -> Private:
        return super().__new__(cls)

    def __init__(self, x: Any) -> None:
        self.__x = x
        self.__dict__["twice"] = 2 * x

    @property
    def twice(self) -> Any:
        return self.__x + self.__dict__["twice"] / 2


class Cache:
    def __init__(self, layers: Any, more: Any = None) -> None:
        self.layers, self.more = layers, more

    def push(self, x: Any) -> None:
        for layer in self.layers:
            layer.keys = torch.cat([layer.keys, x])
            layer.length += x.shape[0]


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Any, cache: Cache) -> Any:
        y = self.linear(x) + sum(layer.keys.sum(0) for layer in cache.layers)
        cache.push(y)
        return {"y": y, "cache": cache}


def test_an_object_and_back() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    shared = Slotted(x)
    cache = Cache([Layer(x), Pair(Layer(y), 3)], OrderedDict(a=shared, b=shared, c=Slotted(1)))
    tree = held({"cache": cache, "n": 1, "shared": (shared, "s"), "none": Slotted(2)})
    assert isinstance(tree["cache"], Held) and len(tree["cache"].tensors) == 2
    assert isinstance(tree["none"], Slotted)
    found = restored(tree)["cache"]
    assert type(found) is Cache and found is not cache and found.layers[0] is not cache.layers[0]
    assert found.layers[0].keys is x and found.layers[0].twin is x and found.layers[1].a.keys is y
    assert found.layers[1].b == 3 and found.more["a"] is found.more["b"] and not hasattr(found.more["a"], "y")
    assert found.layers[0].notes == ["none"] and found.layers[0].notes is not cache.layers[0].notes
    assert found.more["c"] is cache.more["c"]


def test_attributes_that_only_the_class_may_write() -> None:
    x = torch.ones(2)
    found = restored(held(Private(x)))
    assert type(found) is Private and vars(found).keys() == {"twice"}
    torch.testing.assert_close(found.twice, 2 * x)


class Noting(torch.nn.Module):
    def forward(self, layer: Layer) -> Any:
        layer.notes.append("run")
        return layer.keys * len(layer.notes)


def test_a_module_adds_to_a_list() -> None:
    """It is not the caller's, and each trace begins with what was there."""
    layer = Layer(torch.ones(2, 3))
    compiled = onnxc.from_torch(Noting(), (layer,))
    assert layer.notes == ["none"]
    for _ in range(2):
        torch.testing.assert_close(compiled(Layer(torch.ones(2, 3))), torch.full((2, 3), 2.0))
    layer.notes.append("more")
    with pytest.raises(InputError, match=r"args\[0\]\.notes is not what it was"):
        compiled(layer)


def test_a_scripted_module_takes_no_hooks() -> None:
    with pytest.raises(OnnxcError, match="ScriptModule"):
        onnxc.from_torch(torch.jit.script(torch.nn.Linear(3, 3)), torch.ones(1, 3))


def test_recipes_differ_where_something_is_another() -> None:
    def recipe(length: int, *more: Any) -> Any:
        cache = Cache([Layer(torch.ones(2)), *more])
        cache.layers[0].length = length
        return held(cache).recipe

    assert recipe(2) == recipe(2) and difference(recipe(2), recipe(3)) == ".layers[0].length"
    assert difference(recipe(2), recipe(2, Layer(torch.ones(2)))) == ".layers"


def test_what_cannot_be_taken_apart() -> None:
    class Rows(list[Any]):
        pass

    cache = Cache([Layer(torch.ones(2))])
    cache.more = [cache]
    with pytest.raises(UnsupportedError, match="Cache with tensors that refers to itself"):
        held(cache)
    with pytest.raises(UnsupportedError, match="Rows with tensors"):
        held(Cache(Rows([torch.ones(2)])))
    assert isinstance(restored(held(Cache(Rows([1]), torch.ones(1)))).layers, Rows)


def test_a_module_that_takes_and_gives_a_cache() -> None:
    """Its length is a number that sizes decide; the caller's cache stays as it is."""
    torch.manual_seed(0)
    module, rows = Decoder().eval(), torch.export.Dim("rows")

    def cache(n: int) -> Cache:
        made = Cache([Layer(torch.arange(3.0 * n).reshape(n, 3)), Layer(torch.ones(n, 3))])
        for layer in made.layers:
            layer.length = 4
        return made

    shapes = {"x": {0: rows}, "cache": [{0: torch.export.Dim("kept")}, None]}
    compiled = onnxc.from_torch(module, (torch.randn(2, 3), cache(4)), dynamic_shapes=shapes)
    for n, length in ((2, 4), (5, 7)):
        x, given = torch.randn(n, 3), cache(4)
        given.layers[0].keys = given.layers[0].twin = torch.randn(length, 3)
        found = compiled(x, given)
        assert given.layers[0].keys.shape[0] == length
        with torch.no_grad():
            expected = module(x, given)
        torch.testing.assert_close(found["y"], expected["y"])
        assert type(found["cache"]) is Cache
        for layer, wanted in zip(found["cache"].layers, expected["cache"].layers, strict=True):
            torch.testing.assert_close(layer.keys, wanted.keys)
            assert (layer.length, layer.notes) == (wanted.length, ["none"]) and type(layer.length) is int
    wrong = cache(4)
    wrong.layers[1].length = 5
    with pytest.raises(InputError, match=r"args\[1\]\.layers\[1\]\.length is not what it was"):
        compiled(torch.randn(2, 3), wrong)
    with pytest.raises(InputError, match=r"nested otherwise .*args\[1\]\[1\] missing"):
        compiled(torch.randn(2, 3), Cache([Layer(torch.ones(4, 3))]))
    assert not module._forward_hooks and not module._forward_pre_hooks

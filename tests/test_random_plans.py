"""Answers do not depend on which of the legal plans the planner takes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import onnxc
from onnxc.runtime.cpu import level
from tests.compile_harness import compile_graphs
from tests.random_graphs import Generator, Seeded
from tests.random_plans import random_plans
from tests.test_random_graphs import SIZES, run

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
NETS = {
    "convolutions": """
net (float[2,4,6,6] x, float[2,12,6,6] z, float[4,4,3,3] w, float[16] s, float[16] t, float[8,16,1,1] u)
    => (float loss)
{
    c = Conv <pads=[1,1,1,1]> (x, w)
    k = Concat <axis=1> (c, z)
    n = GroupNormalization <num_groups=4> (k, s, t)
    g = Gelu (n)
    d = Conv (g, u)
    m = MaxPool <kernel_shape=[2,2], strides=[2,2]> (d)
    q = Mul (m, m)
    loss = ReduceMean <keepdims=0> (q)
}""",
    "transformer": """
net (float[2,7,12] x, float[12] s, float[12] t, float[12,36] w, float[12,12] o, float[12,20] u, float[20,12] v)
    => (float loss)
{
    n = LayerNormalization (x, s, t)
    p = MatMul (n, w)
    q, k, e = Split <axis=2, num_outputs=3> (p)
    heads = Constant <value_ints=[2,7,3,4]> ()
    q4 = Reshape (q, heads)
    k4 = Reshape (k, heads)
    e4 = Reshape (e, heads)
    qt = Transpose <perm=[0,2,1,3]> (q4)
    kt = Transpose <perm=[0,2,3,1]> (k4)
    et = Transpose <perm=[0,2,1,3]> (e4)
    a = MatMul (qt, kt)
    b = Softmax <axis=-1> (a)
    c = MatMul (b, et)
    ct = Transpose <perm=[0,2,1,3]> (c)
    flat = Constant <value_ints=[2,7,12]> ()
    f = Reshape (ct, flat)
    y = MatMul (f, o)
    r = Add (x, y)
    l = LayerNormalization (r, s, t)
    h = MatMul (l, u)
    g = Gelu <approximate="tanh"> (h)
    z = MatMul (g, v)
    i = Add (r, z)
    j = Mul (i, i)
    loss = ReduceMean <keepdims=0> (j)
}""",
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("first", [7000, 7020])
def test_graphs_of_primitives(first: int, dynamic: bool) -> None:
    seeds = range(first, first + 20)
    made = [Generator(Seeded(s), dynamic).run(8 + s % 16) for s in seeds]
    with random_plans(first):
        programs = compile_graphs([m.graph for m in made], None, level())
    for seed, graph, program in zip(seeds, made, programs, strict=True):
        for sizes in SIZES if dynamic else SIZES[:1]:
            run(graph, program, sizes, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("net", NETS)
def test_gradients(net: str, seed: int) -> None:
    model = onnx.parser.parse_model(HEAD + NETS[net])
    wrt = [v.name for v in model.graph.input]
    gradient = onnxc.backward(model, loss="loss", wrt=wrt)
    rng = np.random.default_rng(3)
    arrays = {
        v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input
    }
    names = {v.name for v in gradient.graph.input}
    given = {name: x for name, x in arrays.items() if name in names}
    wanted = onnxc.compile(gradient, fusion=False)(**given)
    with random_plans(seed):
        found = onnxc.compile(gradient, cache=False)(**given)
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], x, rtol=2e-4, atol=2e-5 * np.abs(x).max(), err_msg=name)

"""ai.onnx.ml without its trees: linear models, support vectors, encoders, strings and maps, against onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnxc
from onnxc.errors import ModelError, OnnxcError, RunError, UnsupportedError
from onnxc.frontends.onnx_file import load
from onnxc.host import ml
from onnxc.passes.decompose import decompose
from onnxc.primitives.interpret import interpret
from tests.tree_models import answers, one_op

FLOAT, INT, STRING, DOUBLE = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.DOUBLE
Array = np.ndarray[Any, Any]
rng = np.random.default_rng(21)


@dataclass
class Case:
    """One node: inputs, attributes, the element types of its outputs. `exact` runs it compiled, on the host too."""

    op: str
    inputs: Sequence[Any]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[Any] = (FLOAT,)
    opset: int = 3
    atol: float = 1e-5
    compiled: bool = False
    types: Sequence[onnx.TypeProto] = ()

    def model(self) -> onnx.ModelProto:
        return one_op(self.op, self.types or self.inputs, self.attrs, self.outputs, self.opset)

    def __str__(self) -> str:
        return f"{self.op}-{self.opset}"


def f32(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def floats(*shape: int) -> list[float]:
    return [float(v) for v in f32(*shape).ravel()]


def strings(*values: str) -> Array:
    return np.array(values, object)


# ---------------------------------------------------------------- models


def linear() -> Iterator[Case]:
    x = f32(7, 5)
    for targets in (1, 2, 3):
        for transform in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
            attrs = {"coefficients": floats(targets, 5), "intercepts": floats(targets), "targets": targets}
            yield Case("LinearRegressor", [x], {**attrs, "post_transform": transform})
    yield Case("LinearRegressor", [x], {"coefficients": floats(5)})
    yield Case("LinearRegressor", [f32(5)], {"coefficients": floats(5)})
    yield Case("LinearRegressor", [x], {"coefficients": floats(2, 8), "targets": 2})  # the first ten count
    more = {"coefficients": floats(3, 7), "intercepts": floats(3), "classlabels_ints": [0, 1, 2]}
    yield Case("LinearClassifier", [x], {**more, "post_transform": "LOGISTIC"}, (INT, FLOAT))
    for scores, classes in ((1, 2), (2, 2), (3, 3)):
        weights = {"coefficients": floats(scores, 5), "intercepts": floats(scores)}
        labels = [3 * i + 1 for i in range(classes)]
        for transform in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
            attrs = {**weights, "classlabels_ints": labels, "post_transform": transform}
            yield Case("LinearClassifier", [x], attrs, (INT, FLOAT))
        attrs = {**weights, "classlabels_strings": [f"c{i}" for i in labels]}
        yield Case("LinearClassifier", [x], attrs, (STRING, FLOAT), compiled=True)
    for dtype in (np.float64, np.int64, np.int32):
        attrs = {"coefficients": floats(3, 5), "intercepts": floats(3), "classlabels_ints": [1, 2, 3]}
        yield Case("LinearClassifier", [(x * 3).astype(dtype)], attrs, (INT, FLOAT))


KERNELS = {"LINEAR": [0.1, 0.2, 3.0], "POLY": [0.1, 0.9, 3.0], "RBF": [0.3, 0.0, 0.0], "SIGMOID": [0.1, 0.2, 0.0]}


def support_vectors() -> Iterator[Case]:
    x = f32(7, 5)
    for kernel, parameters in KERNELS.items():
        machine = {"kernel_type": kernel, "kernel_params": parameters}
        for one_class in (0, 1):
            vectors = {"coefficients": floats(6), "support_vectors": floats(6, 5), "n_supports": 6, "rho": [0.3]}
            yield Case("SVMRegressor", [x], {**vectors, **machine, "one_class": one_class})
        for counts in ([3, 3], [2, 3, 1], [1, 2, 2, 1]):
            classes = len(counts)
            pairs = classes * (classes - 1) // 2
            attrs = {
                "coefficients": floats(classes - 1, 6), "support_vectors": floats(6, 5), "vectors_per_class": counts,
                "rho": floats(pairs), "classlabels_ints": [5 * i + 2 for i in range(classes)], **machine,
            }  # fmt: skip
            for transform in ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"):
                yield Case("SVMClassifier", [x], {**attrs, "post_transform": transform}, (INT, FLOAT))
            chances = {"prob_a": floats(pairs), "prob_b": floats(pairs)}
            yield Case("SVMClassifier", [x], {**attrs, **chances}, (INT, FLOAT), atol=5e-5, compiled=kernel == "RBF")
    plain = {"kernel_type": "RBF", "kernel_params": [0.3, 0.0, 0.0], "rho": [0.3]}
    yield Case("SVMRegressor", [x], {"coefficients": floats(5), **plain})
    for classes in (1, 2, 3):
        for positive in (False, True):
            weights = [abs(v) if positive else v for v in floats(classes, 5)]
            attrs = {"coefficients": weights, "classlabels_ints": [5 * i + 2 for i in range(classes)], **plain}
            yield Case("SVMClassifier", [x], attrs, (INT, FLOAT))


# ---------------------------------------------------------------- features


def numbers() -> Iterator[Case]:
    x, whole = f32(7, 5), rng.integers(-2, 3, (7, 5))
    zero, gone = x.copy(), x.copy()
    zero[0], gone[1, 2] = 0, np.nan
    yield Case("Scaler", [x], {"offset": [0.3], "scale": [2.0]})
    yield Case("Scaler", [x], {"offset": floats(5), "scale": floats(5)})
    yield Case("Scaler", [f32(2, 3, 5)], {"offset": [0.3], "scale": [2.0]})
    for dtype in (np.float64, np.int64, np.int32):
        yield Case("Scaler", [(x * 3).astype(dtype)], {"offset": floats(5), "scale": floats(5)})
    yield Case("Imputer", [gone], {"imputed_value_floats": floats(5), "replaced_value_float": float("nan")})
    yield Case("Imputer", [zero], {"imputed_value_floats": [9.0], "replaced_value_float": 0.0})
    yield Case("Imputer", [whole], {"imputed_value_int64s": [1, 2, 3, 4, 5], "replaced_value_int64": -1}, (INT,))
    for norm in ("MAX", "L1", "L2"):
        for given in (zero, -np.abs(x), f32(5), whole.astype(np.int32), x.astype(np.float64)):
            yield Case("Normalizer", [given], {"norm": norm})
    yield Case("Binarizer", [x], {"threshold": 0.3})
    yield Case("FeatureVectorizer", [f32(3, 2), f32(3, 4)], {"inputdimensions": [2, 4]})
    yield Case("FeatureVectorizer", [f32(2), f32(4)], {"inputdimensions": [2, 4]})
    yield Case("FeatureVectorizer", [f32(2, 1, 3), f32(2, 2, 2)], {"inputdimensions": [3, 4]})
    yield Case("FeatureVectorizer", [f32(3, 3), f32(3, 4), f32(3, 1)], {"inputdimensions": [2, 6, 1]})
    yield Case("FeatureVectorizer", [f32(2, 4), f32(2, 3)], {"inputdimensions": [0, 3]})
    for given in (x, f32(2, 3, 5), f32(5)):
        yield Case("ArrayFeatureExtractor", [given, np.array([[0, 3, 1]])])
    yield Case("OneHotEncoder", [whole], {"cats_int64s": [-1, 0, 2]})
    yield Case("OneHotEncoder", [x], {"cats_int64s": [-1, 0, 2]})
    yield Case("OneHotEncoder", [whole], {"cats_int64s": [-2, -1, 0, 1, 2], "zeros": 0})


def encoders() -> Iterator[Case]:
    whole = rng.integers(-2, 3, (7, 5))
    real = whole.astype(np.float32)
    real[0, 0] = np.nan
    for opset in (2, 3, 4):
        some = {"keys_int64s": [2, -1, 0], "values_int64s": [10, 20, 30]}
        yield Case("LabelEncoder", [whole], some, (INT,), opset)
        yield Case("LabelEncoder", [whole], {"keys_int64s": [2, -1, 0, 2], "values_floats": floats(4)}, opset=opset)
        keys = {"keys_floats": [2.0, -1.0, float("nan")]}
        yield Case("LabelEncoder", [real], {**keys, "values_floats": floats(3)}, opset=opset)
        yield Case("LabelEncoder", [real], {"keys_floats": [2.0], "values_int64s": [1]}, (INT,), opset)
    many = {"keys_int64s": list(range(-3, 1000, 7)), "values_int64s": list(range(len(range(-3, 1000, 7))))}
    yield Case("LabelEncoder", [np.arange(-10, 1010)], many, (INT,))
    ends = np.array([-(2**63), 1 - 2**63, -1, 0, 2**63 - 2, 2**63 - 1])
    for keys in ([2**63 - 1, 2**63 - 2], [-(2**63), 2 - 2**63, 1 - 2**63], [-(2**63), 2**63 - 1, 0], [0]):
        yield Case("LabelEncoder", [ends], {"keys_int64s": keys, "values_int64s": list(range(len(keys)))}, (INT,))
    tensors = {
        "keys_tensor": np.array([2.0, -1.0]), "values_tensor": np.array([0.3, 0.4]), "default_tensor": np.array([9.0]),
    }  # fmt: skip
    yield Case("LabelEncoder", [whole.astype(np.float64)], tensors, (DOUBLE,), 4)


def with_strings() -> Iterator[Case]:
    words, whole = strings("a", "b", "zz", "a").reshape(2, 2), np.array([[1, 6, 9, -1]])

    def host(op: str, inputs: Sequence[Any], attrs: Mapping[str, Any], out: int, opset: int = 3) -> Case:
        return Case(op, inputs, attrs, (out,), opset, compiled=True)

    yield host("ArrayFeatureExtractor", [strings("a", "b", "c"), np.array([[2, 0]])], {}, STRING)
    yield host("OneHotEncoder", [words], {"cats_strings": ["a", "b"]}, FLOAT)
    yield host("LabelEncoder", [words], {"classes_strings": ["b", "a"]}, INT, 1)
    yield host("LabelEncoder", [whole], {"classes_strings": ["b", "a"]}, STRING, 1)
    keys = {"keys_strings": ["a", "b", "a"]}
    yield host("LabelEncoder", [words], {**keys, "values_int64s": [5, 6, 7], "default_int64": -3}, INT)
    yield host("LabelEncoder", [words], {**keys, "values_strings": ["x", "y", "z"]}, STRING)
    yield host("LabelEncoder", [words], {**keys, "values_floats": [0.5, 0.7, 1.0], "default_float": 2.0}, FLOAT)
    yield host("LabelEncoder", [whole], {"keys_int64s": [6, -1], "values_strings": ["x", "y"]}, STRING)
    real = np.array([1.0, np.nan], np.float32)
    table = {"keys_floats": [1.0, float("nan")], "values_strings": ["one", "none"]}
    yield host("LabelEncoder", [real], table, STRING, 2)
    yield host("LabelEncoder", [real], table, STRING, 4)
    tables = {"cats_strings": ["a", "b", "c"], "cats_int64s": [5, 6, 1]}
    yield host("CategoryMapper", [words], tables, INT)
    yield host("CategoryMapper", [whole], tables, STRING)


def map_type(key: int, value: int) -> onnx.TypeProto:
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(value, None))


def maps() -> Iterator[Case]:
    for labels in ({"classlabels_int64s": [7, 9]}, {"classlabels_strings": ["u", "v"]}):
        out = helper.make_sequence_type_proto(map_type(INT if "classlabels_int64s" in labels else STRING, FLOAT))
        for x in (f32(3, 2), f32(2)):
            yield Case("ZipMap", [x], labels, (out,), compiled=True)
    words, places = {"string_vocabulary": ["c", "b", "a"]}, {"int64_vocabulary": [3, 2, 1]}
    for given, vocabulary, key in (({"a": 1.5, "c": 2.5}, words, STRING), ({1: 1.5, 3: 2.5}, places, INT),
                                   ({"z": 1.0}, words, STRING)):  # fmt: skip
        yield Case("DictVectorizer", [given], vocabulary, compiled=True, types=[map_type(key, FLOAT)])
    for form in ("DENSE", "SPARSE"):
        for to, out_type in (("TO_FLOAT", FLOAT), ("TO_INT64", INT), ("TO_STRING", STRING)):
            attrs = {"cast_to": to, "map_form": form, "max_map": 6 if form == "SPARSE" else 1}
            given = {1: 1.5, 3: 2.25}
            yield Case("CastMap", [given], attrs, (out_type,), compiled=True, types=[map_type(INT, FLOAT)])


FAMILIES = (linear, support_vectors, numbers, encoders, with_strings, maps)
CASES = {f"{family.__name__}-{i}-{case}": case for family in FAMILIES for i, case in enumerate(family())}


def assert_same(got: Any, wanted: Any, atol: float) -> None:
    if isinstance(wanted, (list, dict)):
        assert type(got) is type(wanted) and len(got) == len(wanted)
        pairs = wanted.items() if isinstance(wanted, dict) else enumerate(wanted)
        for key, value in pairs:
            assert_same(got[key], value, atol)
        return
    a, b = np.asarray(got), np.asarray(wanted)
    assert a.shape == b.shape
    if b.dtype.kind in "fc":
        assert not isinstance(wanted, np.ndarray) or a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-4, atol)
    else:
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("name", CASES, ids=str)
def test_operator(name: str) -> None:
    case = CASES[name]
    model = case.model()
    wanted = answers(model, case.inputs)
    if case.compiled:
        outputs = list(onnxc.compile(model)(*case.inputs).values())
    else:
        outputs = interpret(decompose(load(model)), list(case.inputs))
    for got, right in zip(outputs, wanted, strict=True):
        assert_same(got, right, case.atol)


def test_a_pipeline_explains_its_steps_on_the_host() -> None:
    """Scaler, classifier and ZipMap, as converters write them: the numbers are compiled, the maps are not."""
    x = f32(4, 3)
    nodes = [
        helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", offset=[0.1], scale=[2.0]),
        helper.make_node("LinearClassifier", ["s"], ["label", "p"], domain="ai.onnx.ml", coefficients=floats(2, 3),
                         intercepts=floats(2), classlabels_strings=["no", "yes"], post_transform="SOFTMAX"),
        helper.make_node("ZipMap", ["p"], ["z"], domain="ai.onnx.ml", classlabels_strings=["no", "yes"]),
    ]  # fmt: skip
    outputs = [
        helper.make_tensor_value_info("label", STRING, ["N"]),
        helper.make_value_info("z", helper.make_sequence_type_proto(map_type(STRING, FLOAT))),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", FLOAT, ["N", 3])], outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    compiled = onnxc.compile(model)
    import onnxruntime as ort

    wanted = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    got = list(compiled(x).values())
    assert got[0].tolist() == wanted[0].tolist()
    assert_same(got[1], wanted[1], 1e-5)


# ---------------------------------------------------------------- functions of the host


def test_encode_takes_the_first_of_repeated_keys() -> None:
    out = ml.ml_encode(strings("a", "?", "a"), ("a", "a"), (1, 2), -1, "int64")
    assert out.dtype == np.int64 and out.tolist() == [1, -1, 1]
    assert ml.ml_encode(np.array([np.nan, 1.0]), (float("nan"),), ("none",), "", "string").tolist() == ["none", ""]


def test_take_and_extract_check_positions() -> None:
    assert ml.ml_take(np.array([[1], [0]]), ("a", "b")).tolist() == [["b"], ["a"]]
    with pytest.raises(RunError):
        ml.ml_take(np.array([2]), ("a", "b"))
    with pytest.raises(RunError):
        ml.ml_extract(strings("a"), np.array([1]))
    compiled = onnxc.compile(one_op("ArrayFeatureExtractor", [np.arange(3.0), np.array([0])], {}, [DOUBLE]))
    assert compiled(np.arange(3.0), np.array([2]))[0].tolist() == [[2.0]]
    for outside in (3, -1):
        with pytest.raises(RunError, match="out of bounds"):
            compiled(np.arange(3.0), np.array([outside]))


def test_maps_that_are_none() -> None:
    for call in (
        lambda: ml.ml_dict_vectorize([1], ("a",), "float32"), lambda: ml.ml_cast_map({"a": 1}, "float32", 1, 1),
        lambda: ml.ml_cast_map({-1: 1}, "float32", 0, 3), lambda: ml.ml_cast_map({1: "x"}, "int64", 1, 1),
        lambda: ml.ml_zip_map(np.zeros((2, 3), np.float32), ("a", "b")),
        lambda: ml.ml_one_hot(strings("q"), ("a",), 0),
    ):  # fmt: skip
        with pytest.raises(RunError):
            call()


# ---------------------------------------------------------------- hostile

X = np.zeros((2, 5), np.float32)
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "coefficients that do not divide": ("LinearRegressor", {"coefficients": [1.0] * 7, "targets": 2}),
    "no coefficients": ("LinearRegressor", {}),
    "coefficients for another width": ("LinearRegressor", {"coefficients": [1.0] * 4}),
    "targets below one": ("LinearRegressor", {"coefficients": [1.0] * 5, "targets": -1}),
    "intercepts of another number": ("LinearRegressor", {"coefficients": [1.0] * 5, "intercepts": [1.0, 2.0]}),
    "kernel parameters of another number": ("SVMRegressor", {
        "coefficients": [1.0], "n_supports": 1, "support_vectors": [1.0] * 5, "kernel_type": "POLY", "rho": [0.0],
        "kernel_params": [0.5, 1.0],
    }),
    "feature dimensions for other inputs": ("FeatureVectorizer", {"inputdimensions": [5, 2]}),
    "negative feature dimensions": ("FeatureVectorizer", {"inputdimensions": [-1]}),
    "no labels": ("LinearClassifier", {"coefficients": [1.0] * 5}),
    "both labels": ("LinearClassifier", {"coefficients": [1.0] * 5, "classlabels_ints": [1],
                                         "classlabels_strings": ["a"]}),
    "labels of another number": ("LinearClassifier", {"coefficients": [1.0] * 15, "intercepts": [0.0] * 3,
                                                      "classlabels_ints": [1, 2]}),
    "vectors of no class": ("SVMClassifier", {"coefficients": [1.0] * 5, "rho": [0.0], "vectors_per_class": [-1, 5],
                                              "support_vectors": [1.0] * 20, "classlabels_ints": [1, 2]}),
    "very many vectors": ("SVMClassifier", {"coefficients": [1.0] * 5, "rho": [0.0],
                                            "vectors_per_class": [1 << 40, 1 << 40], "support_vectors": [1.0] * 20,
                                            "classlabels_ints": [1, 2]}),
    "few rho": ("SVMClassifier", {"coefficients": [1.0] * 6, "rho": [0.0], "vectors_per_class": [1, 1, 1],
                                  "support_vectors": [1.0] * 15, "classlabels_ints": [1, 2, 3]}),
    "few vectors": ("SVMRegressor", {"coefficients": [1.0], "n_supports": 3, "support_vectors": [1.0] * 15}),
    "an unknown kernel": ("SVMRegressor", {"coefficients": [1.0], "n_supports": 1, "support_vectors": [1.0] * 5,
                                           "kernel_type": "COSINE"}),
    "scales of another number": ("Scaler", {"scale": [1.0, 2.0]}),
    "no imputed values": ("Imputer", {"imputed_value_int64s": [1]}),
    "an unknown norm": ("Normalizer", {"norm": "L3"}),
    "no categories": ("OneHotEncoder", {}),
    "keys without values": ("LabelEncoder", {"keys_floats": [1.0]}),
    "more keys than values": ("LabelEncoder", {"keys_floats": [1.0, 2.0], "values_floats": [1.0]}),
    "a tensor for a map": ("DictVectorizer", {"string_vocabulary": ["a"]}),
    "keys of another number": ("ZipMap", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    op, attrs = HOSTILE[name]
    outputs = (INT, FLOAT) if op.endswith("Classifier") else (FLOAT,)
    with pytest.raises(OnnxcError) as caught:
        onnxc.compile(one_op(op, [X], attrs, outputs))
    assert not isinstance(caught.value, RunError)


def test_an_unknown_category_is_an_error_of_the_run() -> None:
    x = np.array([[1, 2]])
    compiled = onnxc.compile(one_op("OneHotEncoder", [x], {"cats_int64s": [1], "zeros": 0}, [FLOAT]))
    with pytest.raises(RunError):
        compiled(x)
    assert compiled(np.array([[1, 1]]))["y0"].tolist() == [[[1.0], [1.0]]]


@pytest.mark.parametrize("default", [np.array([3, 4]), np.array([0.5])])
def test_a_default_that_is_no_value(default: np.ndarray) -> None:
    attrs = {"keys_tensor": np.array([1.0], np.float32), "values_tensor": np.array([2]), "default_tensor": default}
    with pytest.raises(ModelError, match="default_tensor"):
        decompose(load(one_op("LabelEncoder", [X], attrs, [INT], opset=4)))


def test_errors_are_of_their_kinds() -> None:
    with pytest.raises(UnsupportedError):
        decompose(load(one_op("LinearClassifier", [X], {
            "coefficients": [1.0] * 5, "intercepts": [0.0], "classlabels_ints": [1, 2], "post_transform": "PROBIT",
        }, (INT, FLOAT))))  # fmt: skip
    with pytest.raises(ModelError):
        decompose(load(one_op("Normalizer", [X], {"norm": "L3"}, [FLOAT])))

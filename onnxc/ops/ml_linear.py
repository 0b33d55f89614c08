"""Linear models and support vector machines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from onnxc.errors import ModelError, UnsupportedError
from onnxc.ir import dtypes
from onnxc.ir.graph import Value
from onnxc.ops.common import limited
from onnxc.ops.ml_common import (
    ML,
    as_float32,
    as_rows,
    labelled,
    labels_of,
    logistic_pair,
    row,
    transform_of,
    transformed,
)
from onnxc.ops.registry import Flag, op
from onnxc.primitives.builder import Builder

KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
MOST_PAIRED_CLASSES = 64  # whose probabilities are made from those of pairs
ROUNDS = 100  # of that iteration, at most


def _matrix(values: Sequence[float] | None, rows: int, what: str) -> np.ndarray:
    """Coefficients as float32 [rows, features]."""
    flat = np.asarray(values or (), np.float32)
    if rows < 1 or not flat.size or flat.size % rows:
        raise ModelError(f"{what} has {flat.size} coefficients for {rows} rows")
    return flat.reshape(rows, -1)


def _linear(b: Builder, x: Value, values: Sequence[float] | None, rows: int, what: str) -> Value:
    """x [n, features] by a linear model's coefficients. Of more than there are features for, the first are taken, as
    onnxruntime does (its own example `logreg_iris.onnx` is such a model).
    """
    x = as_float32(b, as_rows(b, x, what))
    if isinstance(features := x.shape[1], int) and len(values or ()) > rows * features > 0:
        values = list(values or ())[: rows * features]
    return _product(b, x, _matrix(values, rows, what))


def _product(b: Builder, x: Value, weights: np.ndarray) -> Value:
    """x [n, features] @ weights' [rows, features]."""
    return b.matmul(x, b.constant(np.ascontiguousarray(weights.T)))


def _finished(b: Builder, scores: Value, transform: str) -> Value:
    """After a post transform; of a single score onnxruntime takes PROBIT alone."""
    return scores if scores.shape[1] == 1 and transform != "PROBIT" else transformed(b, scores, transform)


def _two_classes(b: Builder, score: Value, transform: str, opposite: bool) -> Value:
    """Scores [rows, 2] from that of the second class, [rows, 1]."""
    if transform == "PROBIT":
        raise UnsupportedError("one score for two classes with PROBIT is not supported")
    if transform == "LOGISTIC":
        return logistic_pair(b, score)
    return b.concat([b.neg(score) if opposite else b.sub(1.0, score), score], 1)


# ---------------------------------------------------------------- linear


@op("LinearRegressor", 1, domain=ML)
def linear_regressor(
    b: Builder, x: Value, *, coefficients: list[float] | None = None, intercepts: list[float] | None = None,
    post_transform: str = "NONE", targets: int = 1,
) -> Value:  # fmt: skip
    """x [rows, features] to float32 [rows, targets]."""
    y = _linear(b, x, coefficients, targets, "LinearRegressor")
    if intercepts:
        if len(intercepts) != targets:
            raise ModelError(f"LinearRegressor has {len(intercepts)} intercepts for {targets} targets")
        y = b.add(y, row(b, intercepts))
    return _finished(b, y, transform_of(post_transform, "LinearRegressor"))


@op("LinearClassifier", 1, domain=ML)
def linear_classifier(
    b: Builder, x: Value, *, classlabels_ints: list[int] | None = None, classlabels_strings: list[str] | None = None,
    coefficients: list[float], intercepts: list[float] | None = None, multi_class: int = 0,
    post_transform: str = "NONE",
) -> list[Value]:  # fmt: skip
    """x [rows, features] to labels [rows] and float32 scores [rows, classes]; one score will do for two classes."""
    what = "LinearClassifier"
    strings, ints = labels_of(classlabels_strings, classlabels_ints, what)
    classes, transform = len(strings or ints or ()), transform_of(post_transform, what)
    count = len(intercepts) if intercepts else classes
    if count != classes and (count, classes) != (1, 2):
        raise ModelError(f"{what} has {count} scores for {classes} labels")
    scores = _linear(b, x, coefficients, count, what)
    scores = b.add(scores, row(b, intercepts)) if intercepts else scores
    if count == 1 and classes == 2:
        at = b.cast(b.lt(0.0, b.reshape(scores, (scores.shape[0],))), dtypes.int64)
        return [labelled(b, at, strings, ints), _two_classes(b, scores, transform, False)]
    at = b.one("argmax", scores, axis=1, last=False)
    return [labelled(b, at, strings, ints), transformed(b, scores, transform)]


# ---------------------------------------------------------------- support vectors


def _kernel(b: Builder, x: Value, vectors: np.ndarray, kind: str, parameters: Sequence[float] | None) -> Value:
    """The kernel of each row of x with each vector, [rows, vectors]."""
    if kind not in KERNELS:
        raise ModelError(f"the kernel_type {kind!r} of a support vector machine; {', '.join(KERNELS)} exist")
    if parameters and len(parameters) != 3:
        raise ModelError(f"the kernel_params of a support vector machine are gamma, coef0 and degree, not {parameters}")
    gamma, shift, degree = parameters or (0.0, 0.0, 0.0)
    if kind == "RBF":
        gaps = b.sub(b.reshape(x, (x.shape[0], 1, x.shape[1])), b.constant(vectors))
        return b.exp(b.mul(b.reduce("sum", b.mul(gaps, gaps), [2]), -gamma))
    dot = _product(b, x, vectors)
    if kind == "LINEAR":
        return dot
    inside = b.add(b.mul(dot, gamma), shift)
    return b.tanh(inside) if kind == "SIGMOID" else b.pow(inside, degree)


@op("SVMRegressor", 1, domain=ML)
def svm_regressor(
    b: Builder, x: Value, *, coefficients: list[float] | None = None, kernel_params: list[float] | None = None,
    kernel_type: str = "LINEAR", n_supports: int = 0, one_class: Flag = 0, post_transform: str = "NONE",
    rho: list[float] | None = None, support_vectors: list[float] | None = None,
) -> Value:  # fmt: skip
    """x [rows, features] to float32 [rows, 1]; with `one_class`, 1 inside and -1 outside."""
    what = "SVMRegressor"
    transform_of(post_transform, what)
    x = as_float32(b, as_rows(b, x, what))
    if n_supports > 0:
        vectors = _matrix(support_vectors, n_supports, what)
        weights = _matrix(coefficients, 1, what)
        if weights.size < n_supports:
            raise ModelError(f"{what} has {weights.size} coefficients for {n_supports} support vectors")
        y = _product(b, _kernel(b, x, vectors, kernel_type, kernel_params), weights[:, :n_supports])
    else:
        y = _product(b, x, _matrix(coefficients, 1, what))
    y = b.add(y, float(rho[0])) if rho else y
    return b.where(b.lt(0.0, y), 1.0, b.scalar(-1.0, dtypes.float32)) if one_class else y


@op("SVMClassifier", 1, domain=ML)
def svm_classifier(
    b: Builder, x: Value, *, classlabels_ints: list[int] | None = None, classlabels_strings: list[str] | None = None,
    coefficients: list[float] | None = None, kernel_params: list[float] | None = None, kernel_type: str = "LINEAR",
    post_transform: str = "NONE", prob_a: list[float] | None = None, prob_b: list[float] | None = None,
    rho: list[float] | None = None, support_vectors: list[float] | None = None,
    vectors_per_class: list[int] | None = None,
) -> list[Value]:  # fmt: skip
    """x [rows, features] to labels [rows] and scores: one for each class, or without probabilities for each pair."""
    what = "SVMClassifier"
    strings, ints = labels_of(classlabels_strings, classlabels_ints, what)
    classes, transform = len(strings or ints or ()), transform_of(post_transform, what)
    x = as_float32(b, as_rows(b, x, what))
    if not rho:
        raise ModelError(f"{what} has no rho")
    counts = list(vectors_per_class or ())
    if sum(counts) < 1:
        weights = _matrix(coefficients, classes, what)
        scores = b.add(_product(b, x, weights), float(rho[0]))
        at = _linear_choice(b, scores, bool((weights >= 0).all()))
        return [labelled(b, at, strings, ints), _finished(b, scores, transform)]
    if len(counts) != classes or min(counts) < 0 or classes < 2:
        raise ModelError(f"{what} has {classes} labels and vectors_per_class {counts}")
    limited(classes * (classes - 1) // 2 * sum(counts), what)
    vectors = _matrix(support_vectors, sum(counts), what)
    kernels = _kernel(b, x, vectors, kernel_type, kernel_params)
    pairs = list(combinations(range(classes), 2))
    if len(rho) < len(pairs) or any(len(p) < len(pairs) for p in (prob_a, prob_b) if p):
        raise ModelError(f"{what} needs {len(pairs)} values of rho, prob_a and prob_b for {classes} classes")
    weights = _pair_weights(_matrix(coefficients, classes - 1, what), counts, pairs, what)
    scores = b.add(_product(b, kernels, weights), row(b, rho[: len(pairs)]))
    at = _most_votes(b, scores, pairs, classes)
    if prob_a and prob_b:
        chances = _pair_chances(b, scores, prob_a[: len(pairs)], prob_b[: len(pairs)])
        shown = transformed(b, _class_chances(b, chances, pairs, classes), transform)
    elif classes == 2:
        shown = _two_classes(b, scores, transform, transform == "NONE")
    else:
        shown = transformed(b, scores, transform)
    return [labelled(b, at, strings, ints), shown]


def _linear_choice(b: Builder, scores: Value, positive: bool) -> Value:
    """The best class; of two, the second one where any score is high enough."""
    best = b.one("argmax", scores, axis=1, last=False)
    if scores.shape[1] != 2:
        return best
    top = b.reduce("max", scores, [1])
    enough = b.le(0.5, top) if positive else b.lt(0.0, top)
    return b.where(enough, 1, best)


def _pair_weights(
    coefficients: np.ndarray, counts: Sequence[int], pairs: Sequence[tuple[int, int]], what: str
) -> np.ndarray:
    """The weights of each pair's classifier, [pairs, vectors], from coefficients [classes - 1, vectors]."""
    total = sum(counts)
    if coefficients.shape[1] != total:
        raise ModelError(f"{what} has coefficients for {coefficients.shape[1]} vectors, not {total}")
    ends = np.cumsum(counts)
    parts = [slice(e - n, e) for e, n in zip(ends, counts, strict=True)]
    weights = np.zeros((len(pairs), total), np.float32)
    for k, (i, j) in enumerate(pairs):
        weights[k, parts[i]] = coefficients[j - 1, parts[i]]
        weights[k, parts[j]] = coefficients[i, parts[j]]
    return weights


def _most_votes(b: Builder, scores: Value, pairs: Sequence[tuple[int, int]], classes: int) -> Value:
    """The class that wins most pairs, the first of equals."""
    wins, losses = (np.zeros((len(pairs), classes), np.float32) for _ in range(2))
    for k, (i, j) in enumerate(pairs):
        wins[k, i], losses[k, j] = 1, 1
    positive = b.cast(b.lt(0.0, scores), dtypes.float32)
    votes = b.add(b.matmul(positive, b.constant(wins)), b.matmul(b.sub(1.0, positive), b.constant(losses)))
    return b.one("argmax", votes, axis=1, last=False)


def _pair_chances(b: Builder, scores: Value, slope: Sequence[float], shift: Sequence[float]) -> Value:
    """The probability of each pair's first class: Platt's sigmoid of its score."""
    z = b.add(b.mul(scores, row(b, slope)), row(b, shift))
    return b.clip(b.sub(1.0, b.sigmoid(z)), 1e-7, 1 - 1e-7)


def _class_chances(b: Builder, chances: Value, pairs: Sequence[tuple[int, int]], classes: int) -> Value:
    """Probabilities [rows, classes] from those of pairs, by iteration until a row's error is small.

    T. F. Wu, C. J. Lin, R. C. Weng, Probability estimates for multi-class classification by pairwise coupling (2004),
    algorithm 2, with the steps and the end that libsvm and onnxruntime have.
    """
    if classes > MOST_PAIRED_CLASSES:
        raise UnsupportedError(f"probabilities of {classes} classes; at most {MOST_PAIRED_CLASSES} are supported")
    n = chances.shape[0]
    where = {pair: k for k, pair in enumerate(pairs)}

    def chance(i: int, j: int) -> Value:
        """Of class i against j, [rows, 1]."""
        k = where[(min(i, j), max(i, j))]
        p = b.slice(chances, 1, k, k + 1)
        return p if i < j else b.sub(1.0, p)

    q: list[Value] = []  # rows of the matrix Q, each [rows, classes]
    for i in range(classes):
        others = [b.mul(chance(j, i), chance(j, i)) for j in range(classes) if j != i]
        diagonal = others[0]
        for v in others[1:]:
            diagonal = b.add(diagonal, v)
        cells = [diagonal if j == i else b.neg(b.mul(chance(j, i), chance(i, j))) for j in range(classes)]
        q.append(b.concat(cells, 1))
    start = [b.full((n, classes), 1.0 / classes, dtypes.float32), b.full((n, 1), 1.0, dtypes.float32)]

    def step(inner: Builder, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        p, running = states
        qp = inner.concat([inner.reduce("sum", inner.mul(row_, p), [1], True) for row_ in q], 1)
        total = inner.reduce("sum", inner.mul(p, qp), [1], True)
        error = inner.reduce("max", inner.abs(inner.sub(qp, total)), [1], True)
        running = inner.where(inner.lt(error, 0.005 / classes), 0.0, running)
        after = p
        for i in range(classes):
            own, mine = inner.slice(q[i], 1, i, i + 1), inner.slice(qp, 1, i, i + 1)
            diff = inner.div(inner.sub(total, mine), own)
            grown = inner.add(diff, 1.0)
            bump = inner.constant(np.eye(classes, dtype=np.float32)[i : i + 1])
            after = inner.div(inner.add(after, inner.mul(diff, bump)), grown)
            change = inner.mul(diff, inner.add(inner.mul(diff, own), inner.mul(mine, 2.0)))
            total = inner.div(inner.div(inner.add(total, change), grown), grown)
            qp = inner.div(inner.add(qp, inner.mul(diff, q[i])), grown)
        return [inner.where(inner.lt(0.0, running), after, p), running], []

    (found, _), _ = b.scan(start, [], ROUNDS, step)
    return found

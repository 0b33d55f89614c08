"""For tests: `assert_close` fails with a table where a model's answers are not the reference's.

from onnxc.testing import assert_close

def test_my_export(): assert_close("model.onnx", reference=module)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxc.tools.compare.bounds import Tolerances
from onnxc.tools.compare.core import compare
from onnxc.tools.compare.metrics import measure
from onnxc.tools.compare.pieces import ModelLike
from onnxc.tools.compare.results import Comparison

__all__ = ["assert_arrays_close", "assert_close"]


def assert_close(
    model: ModelLike, inputs: Any = None, *, reference: Any = "onnxruntime", layers: bool = False, **options: Any
) -> Comparison:
    """Compares as :func:`onnxc.compare` does (whose options these are), and returns the result.

    Raises AssertionError, with the table of outputs, where an output differs; with `layers`, also where a layer is at
    fault. The layers are shown wherever an output differs and both sides can show them.
    """
    found = compare(model, inputs, reference=reference, layers=layers, **options)
    if not found.agree or found.faults:
        raise AssertionError(f"\n{found}")
    return found


def assert_arrays_close(
    ours: Mapping[str, Any] | Sequence[Any], theirs: Mapping[str, Any] | Sequence[Any], *, rtol: float = 1e-3,
    atol: float = 1e-5,
) -> None:  # fmt: skip
    """By the same rule for arrays: `rtol` of each element plus `atol` of the largest value; integers are equal.

    Raises AssertionError that names the array, its largest error and where it is.
    """
    tolerances = Tolerances(rtol, atol)
    pairs = _pairs(ours, theirs)
    for name, a, b in pairs:
        assert a.shape == b.shape, f"{name} has the shape {list(a.shape)}, and the reference {list(b.shape)}"
        found = measure(a, b)
        if a.dtype.kind not in "fcV":
            assert not found.mismatches, f"{name}: {found.mismatches} of {a.size} are not equal, first {found.worst}"
            continue
        wide = b.astype(np.complex128 if b.dtype.kind == "c" else np.float64)
        with np.errstate(all="ignore"):
            same = (a == b) | (np.isnan(a.astype(wide.dtype)) & np.isnan(wide))
            close = same | (np.abs(a.astype(wide.dtype) - wide) <= tolerances.allowed(wide))
        assert close.all(), (
            f"{name} differs: {int((~close).sum())} of {a.size} elements, largest {found.max_abs:.3e} "
            f"({found.max_rel:.1e} of the largest value) at {list(found.worst or ())}"
        )


def _pairs(ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(theirs, Mapping):
        missing = [n for n in theirs if n not in ours]
        assert not missing, f"there is no {', '.join(map(repr, missing))}"
        return [(n, np.asarray(ours[n]), np.asarray(b)) for n, b in theirs.items()]
    assert len(ours) == len(theirs), f"there are {len(ours)} arrays, and {len(theirs)} of the reference"
    return [(f"array {k}", np.asarray(a), np.asarray(b)) for k, (a, b) in enumerate(zip(ours, theirs, strict=True))]

"""Cases of the standard's suite whose answers are one draw of numpy's generator: what can be said of any other draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BERNOULLI = {f"test_bernoulli{kind}{form}" for kind in ("", "_double", "_seed") for form in ("", "_expanded")}
DROPOUT = {f"test_training_dropout{kind}{mask}" for kind in ("", "_default") for mask in ("", "_mask")}
DRAWN = BERNOULLI | DROPOUT


def check_drawn(name: str, inputs: Sequence[Array], outputs: Sequence[Array], wanted: Sequence[Array]) -> None:
    """The answer of a case in DRAWN: shapes and dtypes, and for each element what it may be.

    Raises:
        AssertionError: something else came out.
    """
    assert [(y.dtype, y.shape) for y in outputs] == [(y.dtype, y.shape) for y in wanted]
    x, y = inputs[0].astype(np.float64), outputs[0].astype(np.float64)
    if name in BERNOULLI:
        assert np.isin(y, (0, 1)).all()
        assert (y[x <= 0] == 0).all() and (y[x >= 1] == 1).all()
        few = y.sum() - x.sum()  # six deviations of a sum of so many draws
        assert abs(few) <= 6 * np.sqrt((x * (1 - x)).sum())
        return
    ratio = float(inputs[1]) if len(inputs) > 1 else 0.5
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / (1 - ratio), rtol=1e-5)
    assert abs(kept.sum() - (1 - ratio) * x.size) <= 6 * np.sqrt(ratio * (1 - ratio) * x.size)
    for mask in outputs[1:]:
        np.testing.assert_array_equal(mask[x != 0], kept[x != 0])

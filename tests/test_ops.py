"""Every operator against onnxruntime: the tables of cases, `op_cases_*.py`, by family."""

from __future__ import annotations

import pytest

from tests import op_cases_composite as composite
from tests import op_cases_tensors as tensors
from tests import op_cases_windows as windows
from tests.ops_harness import Case, check

pytestmark = pytest.mark.every_target

FAMILIES = [
    tensors.activations,
    tensors.arithmetic,
    tensors.logic,
    tensors.reductions,
    tensors.shapes,
    tensors.slices,
    tensors.casts,
    tensors.indexed,
    windows.contractions,
    windows.convolutions,
    windows.pools,
    windows.experimental,
    windows.norms,
    windows.resizes,
    composite.quantized,
    composite.attentions,
    composite.contrib,
    composite.losses,
    composite.spectra,
    composite.samplings,
    composite.linear_attentions,
    composite.pooled_regions,
]
CASES = [
    pytest.param(case, id=f"{family.__name__}-{i}-{case}") for family in FAMILIES for i, case in enumerate(family())
]


@pytest.mark.parametrize("case", CASES)
def test_operator(case: Case) -> None:
    check(case)

"""The ONNX spelling of each primitive. A family's spellings stand in its own module, as in `onnxc/primitives`."""

from __future__ import annotations

from onnxc.export import attention_gradient, contraction, elementwise, indexing, movement, reduction
from onnxc.export.common import Spelling

SPELLINGS: dict[str, Spelling] = {
    **elementwise.SPELLINGS,
    **movement.SPELLINGS,
    **reduction.SPELLINGS,
    **indexing.SPELLINGS,
    **contraction.SPELLINGS,
    **attention_gradient.SPELLINGS,
}

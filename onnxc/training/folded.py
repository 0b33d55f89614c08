"""Weights of a file that its exporter computed: trained as they stand, they need not be the module's parameters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

_SHOWN = 4  # weights that a warning names


def warn_of_folded(trained: Sequence[str], folded: Mapping[str, Sequence[str]]) -> None:
    """Warns of trained weights that are no parameter of the module in another layout.

    A weight folded from one value is that parameter, transposed say, unless the value has another copy in training:
    then what was one parameter is several. One folded from more values may be a parameter repeated along the batch, a
    table, or a number of a formula.

    Args:
        trained: names of the weights that are trained.
        folded: of each weight that was folded, the values that it was computed from (`metadata["folded"]` of an
            imported graph).
    """
    copies = Counter(source for name in trained for source in {name, *folded.get(name, ())})
    odd = [n for n in trained if len(folded.get(n, ())) > 1 or any(copies[source] > 1 for source in folded.get(n, ()))]
    if odd:
        shown = ", ".join(f"{n!r} (from {', '.join(map(repr, folded[n][:2]))}{', ...' * (len(folded[n]) > 2)})"
                          for n in odd[:_SHOWN])  # fmt: skip
        warnings.warn(
            f"{len(odd)} of the trained weights were computed by the exporter: {shown}{', ...' * (len(odd) > _SHOWN)}. "
            "They are trained as they stand in the file, which is another training than that of the module where they "
            "are copies of a parameter, tables or constants. torch.onnx.export(..., optimize=False) writes the "
            "module's parameters; wrt= names what is to be trained",
            stacklevel=3,
        )

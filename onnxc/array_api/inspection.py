"""What this namespace can do: `__array_namespace_info__`."""

from __future__ import annotations

from typing import Any

from onnxc.array_api.data_types import ALL, DEFAULTS, KINDS, Dtype, checked_device


class Info:
    """What `__array_namespace_info__` returns."""

    def capabilities(self) -> dict[str, Any]:
        """Masks select, and results may have shapes that depend on data: outside of traced functions."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        return "cpu"

    def devices(self) -> list[str]:
        return ["cpu"]

    def default_dtypes(self, *, device: str | None = None) -> dict[str, Dtype]:
        """The dtypes of what is made without a dtype."""
        checked_device(device)
        return dict(DEFAULTS)

    def dtypes(self, *, device: str | None = None, kind: str | tuple[str, ...] | None = None) -> dict[str, Dtype]:
        """The dtypes of these kinds, by name; of all, without."""
        checked_device(device)
        kinds = tuple(KINDS) if kind is None else (kind,) if isinstance(kind, str) else kind
        unknown = [k for k in kinds if k not in KINDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no kind of dtypes; those are {', '.join(KINDS)}")
        return {d.name: d for d in ALL if any(d in KINDS[k] for k in kinds)}


def __array_namespace_info__() -> Info:
    return Info()

"""What every test shares: a private cache, the hypothesis profiles, and the zoo on demand.

``pytest -m "not zoo and not slow"`` is the quick loop. ``HYPOTHESIS_PROFILE=thorough`` looks longer.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from models.zoo import store

IN_CI = os.environ.get("CI") == "true"

# Deadlines would time the compiler's own compiles; benchmarks do the timing here, never tests.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=40, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=40, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that asks for the ``zoo`` fixture carries its marker; exhaustive ones run where they are asked for."""
    for item in items:
        if "zoo" in getattr(item, "fixturenames", ()):
            item.add_marker("zoo")
    if "exhaustive" not in (config.option.markexpr or ""):
        waiting = [item for item in items if item.get_closest_marker("exhaustive") is not None]
        items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]
        config.hook.pytest_deselected(items=waiting)


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``$ONNXC_CACHE`` of this session (of each worker under xdist); child processes inherit it.

    They also inherit the test mode: new memory is full of NaN, and the graph is verified after each pass.
    """
    cache = tmp_path_factory.mktemp("onnxc-cache")
    cache.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXC_CACHE", str(cache))
        patch.setenv("ONNXC_POISON", "1")
        patch.setenv("ONNXC_VERIFY", "1")
        yield cache


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``$ONNXC_CACHE`` for one test, where what is in the cache is the point."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("ONNXC_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def zoo() -> Callable[[str], store.ZooModel]:
    """``zoo("bert")``: that architecture's ONNX file and inputs, exported first if it is missing."""

    def get(name: str) -> store.ZooModel:
        model = store.find(name)
        if model is None and not IN_CI and importlib.util.find_spec("torch") is None:
            pytest.skip(f"{name} is not exported, and there is no torch to do it (pip install onnxc[dev])")
        return model or store.ensure(name)

    return get


@pytest.fixture(scope="session")
def digits() -> Path:
    """The directory with digits.onnx and digits_test.npz (arrays ``image`` and ``label``)."""
    return store.ROOT / "models" / "digits"

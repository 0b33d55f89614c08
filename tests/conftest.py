"""What every test shares: a private cache, the hypothesis profiles, and the zoo on demand.

``pytest -m "not zoo and not slow"`` is the quick loop. ``HYPOTHESIS_PROFILE=thorough`` looks longer. ``--target cuda``
runs the tests of answers on this machine's GPU (`tests/targets.py`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Threads that wait for work by spinning take the time of other test processes: those of OpenMP, which torch has, and
# those of OpenBLAS, for 10 ms after each product of numpy's. Both read this once, when they are imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import onnxruntime
import pytest
from hypothesis import HealthCheck, settings

import onnxc
from models.zoo import store
from tests import compiled_before, cuda_kernels, targets
from tests.fake_cuda import FakeDriver
from tests.triton_simulator import Simulator

IN_CI = os.environ.get("CI") == "true"

# Deadlines would time the compiler's own compiles; benchmarks do the timing here, never tests.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=40, derandomize=True, database=None, print_blob=True, **_COMMON)
settings.register_profile("dev", max_examples=40, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if IN_CI else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", default="cpu", choices=targets.TARGETS, help="what models are compiled for")


def pytest_configure(config: pytest.Config) -> None:
    targets.before_imports(config.getoption("--target"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that asks for the ``zoo`` fixture carries its marker; exhaustive ones run where they are asked for.

    With a GPU as the target, those that are about another one are left out. Of several test processes none is to begin
    with a long test when the others are about to end.
    """
    for item in items:
        if "zoo" in getattr(item, "fixturenames", ()):
            item.add_marker("zoo")
    if "exhaustive" not in (config.option.markexpr or ""):
        waiting = [item for item in items if item.get_closest_marker("exhaustive") is not None]
        items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]
        config.hook.pytest_deselected(items=waiting)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: [item.get_closest_marker(marker) is None for marker in ("slow", "zoo")])
    target = config.getoption("--target")
    if target != "cpu":
        there = [item for item in items if _runs_on_gpu(item, target)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(there)])
        items[:] = there


def pytest_collection_finish() -> None:
    """What is there when the tests begin stays to the end: no later collection of garbage is to look through it."""
    gc.collect()
    gc.freeze()


def _runs_on_gpu(item: pytest.Item, target: str) -> bool:
    if item.get_closest_marker("gpu") is not None:
        return target == "cuda"
    if item.get_closest_marker("every_target") is None or item.get_closest_marker("cpu_only") is not None:
        return False
    levels = getattr(item, "callspec", None)
    return levels is None or levels.indices.get("cpu", 0) == 0  # of several levels of the CPU, one says it all


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A kernel that leaves its buffers ends the use of the GPU by its process: under xdist another one takes over."""
    if report.failed and "GPU's state is lost" in report.longreprtext and "PYTEST_XDIST_WORKER" in os.environ:
        threading.Timer(1.0, os._exit, (3,)).start()  # when the report has been sent


@pytest.fixture(scope="session", autouse=True)
def chosen_target(pytestconfig: pytest.Config, private_cache: Path) -> Iterator[None]:
    """``onnxc.compile`` compiles for what ``--target`` says."""
    with pytest.MonkeyPatch.context() as patch:
        targets.choose(pytestconfig.getoption("--target"), patch)
        yield


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this session, which all workers of xdist share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def private_cache(session_folder: Path) -> Iterator[Path]:
    """``$ONNXC_CACHE`` of this session, of all its workers; child processes inherit it.

    They also inherit the test mode: new memory is full of NaN, and the graph is verified after each pass.
    """
    cache = session_folder / "onnxc-cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONNXC_CACHE", str(cache))
        patch.setenv("ONNXC_POISON", "1")
        patch.setenv("ONNXC_VERIFY", "1")
        yield cache


@pytest.fixture(scope="session", autouse=True)
def machine_code_of_earlier_runs(private_cache: Path) -> Iterator[None]:
    """With ``$ONNXC_TESTS_KEEP``, what an earlier run compiled of the same text is not compiled again."""
    kept = compiled_before.folder()
    with kept.installed() if kept else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session", autouse=True)
def sessions_of_one_thread() -> Iterator[None]:
    """onnxruntime, the oracle, computes in the thread that calls it.

    A session of two threads takes twenty times as long to make and run where the model is one small node.
    """

    class Session(onnxruntime.InferenceSession):
        def __init__(self, model: Any, sess_options: Any = None, *args: Any, **options: Any) -> None:
            sess_options = sess_options or onnxruntime.SessionOptions()
            sess_options.intra_op_num_threads = sess_options.intra_op_num_threads or 1
            super().__init__(model, sess_options, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", Session)
        yield


@pytest.fixture(scope="session")
def simulator() -> Iterator[Simulator]:
    """Runs models' GPU kernels in Triton's interpreter. To start it takes seconds: all modules share it."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("GPU kernels need Triton: pip install 'onnxc[cuda]'")
    worker = Simulator()
    yield worker
    worker.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A GPU that is a driver in memory; at the end nothing of it is left."""
    fake = FakeDriver()
    cuda_kernels.use(fake, monkeypatch)
    yield fake
    gc.collect()
    fake.finish()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``$ONNXC_CACHE`` for one test, where what is in the cache is the point; all is compiled in it."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    compiled_before.compile_anew(monkeypatch)
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


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Functions over arrays that are called outside of traces compile nothing."""
    onnxc.set_eager("interpreted")
    yield
    onnxc.set_eager("compiled")


@pytest.fixture
def interpreted_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs of torch.compile are run by numpy, and a test begins with nothing of another one's."""
    from onnxc.torch import program
    from tests.torch_harness import fresh
    from tests.torch_opinfo import Interpreted

    monkeypatch.setattr(program, "compile", Interpreted)
    with fresh():
        yield


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jitted functions are traced as ever, and interpreted."""
    from onnxc.array import jit

    runner = jit.runner

    def interpreting(graph: Any, options: Any) -> Any:
        onnxc.set_eager("interpreted")
        try:
            return runner(graph)
        finally:
            onnxc.set_eager("compiled")

    monkeypatch.setattr(jit, "runner", interpreting)


@pytest.fixture
def no_trace_is_left() -> Iterator[None]:
    """Whatever a test does with traced functions, none is being traced at its end."""
    from onnxc.frontends.trace import current

    yield
    assert current() is None

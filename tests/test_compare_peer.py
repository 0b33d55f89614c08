"""onnxruntime dies, is killed, or is interrupted: its process, and never the one that compares."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from onnxc.cli import app
from onnxc.errors import RunError
from onnxc.tools import process
from onnxc.tools.compare import compare, onnxruntime_runner
from onnxc.tools.compare.peer import Session, peer
from onnxc.tools.messages import read, write
from tests.own_process import python
from tests.small_models import floats, parse

MODEL = parse("(float[4, 8] x) => (float[4, 8] y) { a = Tanh(x) y = Softmax<axis=-1>(a) }", 20)
GIVEN = {"x": floats(4, 8)}
ENDLESS = parse("""() => (int64 y) {
  n = Constant<value = int64 {1000000000000}> () c = Constant<value = bool {1}> () x = Constant<value = int64 {0}> ()
  y = Loop (n, c, x) <body = b (int64 i, bool go, int64 s) => (bool on, int64 t) { on = Identity(go) t = Add(s, i) }>
}""", 18)  # fmt: skip
SETTINGS = {"level": "disabled", "threads": None, "entries": {}, "written": None}


def recurrent(op: str, gates: int) -> ModelProto:
    """A network of any number of steps and sequences; onnxruntime 1.32 aborts for none of them."""
    weights = [numpy_helper.from_array(floats(1, gates * 8, n), name) for name, n in (("w", 4), ("r", 8))]
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w", "r"], ["y"], hidden_size=8)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", "batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(("op", "gates", "steps", "batch"), [("LSTM", 4, 3, 0), ("GRU", 3, 0, 2)])
@pytest.mark.parametrize("reference", ["onnxruntime", "onnxruntime:all"])
def test_a_model_that_onnxruntime_dies_of(
    op: str, gates: int, steps: int, batch: int, reference: str, tmp_path: Path
) -> None:
    onnx.save(recurrent(op, gates), tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=np.zeros((steps, batch, 4), np.float32))
    arguments = ["compare", str(tmp_path / "m.onnx"), "--inputs", str(tmp_path / "in.npz"), "--layers"]
    found = CliRunner().invoke(app, [*arguments, "--reference", reference])
    if found.exit_code:  # with a version of onnxruntime that has the fault
        assert found.exit_code == 2 and "SIGABRT" in found.output and "m.onnx', the reference" in found.output
    assert CliRunner().invoke(app, [*arguments, "--reference", "float64"]).exit_code == 0
    assert compare(MODEL, GIVEN, reference=reference)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The process is killed with a signal while it does what is in the list."""
    doing: list[str] = []
    send = process.send

    def send_and_kill(stream: Any, line: bytes, arrays: list[Any]) -> None:
        worker = peer()._worker
        hit = worker is not None and doing and f'{{"do": "{doing[0]}"'.encode() in line
        if hit:
            os.kill(worker._process.pid, signal.SIGSTOP)  # so that it does not get further than the command
        with suppress(BrokenPipeError):
            send(stream, line, arrays)
        if hit:
            doing.clear()
            os.kill(worker._process.pid, signal.SIGKILL)

    monkeypatch.setattr(process, "send", send_and_kill)
    return doing


@pytest.mark.parametrize("doing", ["open", "run"])
def test_a_peer_that_is_killed(doing: str, killed: list[str]) -> None:
    killed.append(doing)
    word = {"open": "load", "run": "run"}[doing]
    with pytest.raises(RunError, match=rf"\(SIGKILL\) while it had to {word} a model in memory, the reference.*memory"):
        compare(MODEL, GIVEN)
    assert compare(MODEL, GIVEN, layers=True)


def test_a_session_comes_back_after_the_death_of_its_process(killed: list[str]) -> None:
    run = onnxruntime_runner(MODEL)
    (before,) = run(GIVEN)
    killed.append("run")
    with pytest.raises(RunError, match="SIGKILL"):
        run(GIVEN)
    np.testing.assert_array_equal(run(GIVEN)[0], before)


def test_a_process_that_dies_of_a_model_that_it_opens_again(killed: list[str]) -> None:
    run = onnxruntime_runner(MODEL)
    for doing, word in (("run", "run"), ("open", "load")):
        killed.append(doing)
        with pytest.raises(RunError, match=rf"\(SIGKILL\) while it had to {word} a model in memory"):
            run(GIVEN)


def test_threads_that_ask_at_once(killed: list[str]) -> None:
    """Each gets its own answers; the death of the process is an error in one of them."""
    right = onnxruntime_runner(MODEL)(GIVEN)[0]
    errors: list[Exception] = []
    wrong: list[int] = []
    killed.append("run")

    def work(row: int) -> None:
        run, given = onnxruntime_runner(MODEL), {"x": np.roll(GIVEN["x"], row, axis=0)}
        for _ in range(30):
            try:
                if not np.array_equal(np.roll(run(given)[0], -row, axis=0), right):
                    wrong.append(row)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(errors) == 1 and "SIGKILL" in str(errors[0])


def test_an_interrupt_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process would answer is not taken for the answer to the next question."""

    def interrupted(stream: Any) -> Any:
        raise KeyboardInterrupt

    run = onnxruntime_runner(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(process, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run({"x": GIVEN["x"] + 1})
    np.testing.assert_array_equal(run(GIVEN)[0], onnxruntime_runner(MODEL)(GIVEN)[0])


@pytest.mark.parametrize("given", [{"x": floats(4, 9)}, {"x": floats(4, 8).astype(np.float64)}, {}])
def test_errors_keep_their_class_and_text(given: dict[str, Any]) -> None:
    session = onnxruntime.InferenceSession(MODEL.SerializeToString(), providers=["CPUExecutionProvider"])
    with pytest.raises(Exception) as direct:
        session.run(None, given)
    with pytest.raises(RunError, match="onnxruntime cannot run the model") as told:
        onnxruntime_runner(MODEL)(given)
    assert type(told.value.cause) is type(direct.value) and str(told.value.cause) == str(direct.value)


def test_a_path_is_that_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx.save(MODEL, tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    assert onnxruntime_runner("m.onnx")(GIVEN)[0].shape == (4, 8)


def test_sessions_go_with_their_objects() -> None:
    session = Session(MODEL.SerializeToString(), SETTINGS)
    number = session._number
    assert session.run(GIVEN)[0].shape == (4, 8)
    del session
    gc.collect()
    with pytest.raises(RunError, match=f"KeyError: {number}"):
        peer().ask("run", session=number, names=[], values=[])


def test_a_forked_process_has_a_peer_of_its_own() -> None:
    done = python("""
        import os
        import numpy as np
        from onnxc.tools.compare.peer import peer
        from tests.test_compare_peer import GIVEN, MODEL, onnxruntime_runner
        run = onnxruntime_runner(MODEL)
        before, first = run(GIVEN), peer()._worker
        if not os.fork():
            assert np.array_equal(run(GIVEN)[0], before[0]) and peer()._worker is not first
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
        assert np.array_equal(run(GIVEN)[0], before[0]) and peer()._worker is first
    """)
    assert done.returncode == 0, done.stderr


def is_running(pid: str) -> bool:
    """Whether there is a process of that number, and not only what is left of one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kill", [True, False])
def test_it_does_not_outlive_the_process_that_asked(kill: bool) -> None:
    """Which is killed, or ends, while a model of endless turns runs."""
    code = """
        import sys, threading
        from tests.test_compare_peer import ENDLESS, onnxruntime_runner, peer
        run = onnxruntime_runner(ENDLESS)
        threading.Thread(target=run, args=({},), daemon=True).start()
        print(peer()._worker._process.pid, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        pid = asking.stdout.readline().decode().strip()
        time.sleep(1)
        assert is_running(pid) and asking.poll() is None
        try:
            if not kill:
                asking.stdin.close()
                assert asking.wait(timeout=60) == 0
        finally:
            asking.kill()
    until = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(pid)


def test_an_onnxruntime_that_cannot_be_imported(tmp_path: Path) -> None:
    """It is looked for where this process would find it; what is amiss there is said, and what it prints no answer."""
    (tmp_path / "onnxruntime.py").write_text("print('a line', flush=True)\nraise ImportError('a library is missing')")
    done = python(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from onnxc.errors import RunError
        from onnxc.tools.compare.engines import OnnxRuntime
        try:
            OnnxRuntime().load(b"")
        except RunError as error:
            assert type(error.cause) is ImportError
            print(error)
    """)
    assert "cannot load the model (a library is missing)" in done.stdout, done.stderr


def test_files_in_the_working_directory_are_no_modules(tmp_path: Path) -> None:
    for name in ("json", "ctypes", "numpy", "onnx", "onnxruntime"):
        (tmp_path / f"{name}.py").write_text("import os\nos._exit(3)")
    code = "from tests.test_compare_peer import *; print(onnxruntime_runner(MODEL)(GIVEN)[0].shape)"
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "(4, 8)\n", done.stderr


@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_numbers_that_numpy_lacks(shape: tuple[int, ...]) -> None:
    kinds = [getattr(TensorProto, name) for name in ("BFLOAT16", "FLOAT8E5M2", "FLOAT8E4M3FN", "INT4", "UINT4")]
    nodes = [helper.make_node("Cast", ["x"], [f"y{kind}"], to=kind) for kind in kinds]
    back = [helper.make_node("Cast", [f"x{kind}"], [f"z{kind}"], to=TensorProto.FLOAT) for kind in kinds[:3]]
    graph = helper.make_graph(
        nodes + back,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        + [helper.make_tensor_value_info(f"x{kind}", kind, shape) for kind in kinds[:3]],
        [helper.make_tensor_value_info(n.output[0], kind, shape) for n, kind in zip(nodes, kinds, strict=True)]
        + [helper.make_tensor_value_info(n.output[0], TensorProto.FLOAT, shape) for n in back],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = np.resize(np.array([5, 1, 7, 0, 2, 6], np.float32), shape)
    dtypes = [np.dtype(helper.tensor_dtype_to_np_dtype(kind)) for kind in kinds]
    given = {"x": x, **{f"x{kind}": x.astype(dtype) for kind, dtype in zip(kinds[:3], dtypes, strict=False)}}
    found = onnxruntime_runner(model)(given)
    assert [a.dtype for a in found] == [*dtypes, *[np.dtype(np.float32)] * 3]
    for a, dtype in zip(found, [*dtypes, *dtypes[:3]], strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), x.astype(dtype).astype(np.float32))


def test_what_is_sent_comes_as_it_was() -> None:
    values: list[Any] = [
        floats(3, 5)[:, ::2], floats(2, 3).T, np.zeros((0, 4), np.int8), np.array(True), np.arange(3, dtype=">i4"),
        floats(4).astype(ml_dtypes.bfloat16), np.array([1, -2], ml_dtypes.int4), np.ones(2, ml_dtypes.float8_e5m2),
        np.array([["é", "\n"], ["", "\ud800"]], object), np.array(["ab", "c"]), [floats(2), None, [1.5, np.nan]],
        [{"a": np.float32(0.5)}, {3: 2}], b"bytes\n", "text", np.complex64(1j), None,
    ]  # fmt: skip
    stream = io.BytesIO()
    write(stream, {"do": "run", "values": list(values)})
    write(stream, {"do": "next"})
    stream.seek(0)
    buffered: Any = io.BufferedReader(stream)  # type: ignore[type-var]
    found = read(buffered)["values"]
    assert read(buffered) == {"do": "next"}
    for a, b in zip(values, found, strict=True):
        if isinstance(a, (np.ndarray, np.generic)):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    assert found[10][0].tolist() == values[10][0].tolist() and found[10][1] is None and np.isnan(found[10][2][1])
    assert found[11:14] == [[{"a": 0.5}, {3: 2}], b"bytes\n", "text"]
    with pytest.raises(EOFError):
        read(buffered)
    for value in (b"bytes", np.arange(3)):
        cut = io.BytesIO()
        write(cut, {"values": [value]})
        cut.truncate(len(cut.getvalue()) - 1)
        cut.seek(0)
        with pytest.raises(EOFError):
            read(cut)
    with pytest.raises(TypeError, match="object"):
        write(stream, {"values": [object()]})


@pytest.mark.parametrize(("code", "how"), [(3, "exit status 3"), (-6, "SIGABRT"), (-40, "signal 40")])
def test_how_a_process_ended(code: int, how: str) -> None:
    assert process.DiedError("run", code).how == how

"""The command line: what it prints, where, and its exit codes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner, Result

from onnxc.cli import app
from onnxc.errors import CudaError, RunError
from onnxc.runtime.cuda import driver as driver_module
from onnxc.runtime.cuda.driver import Driver, device
from onnxc.tools.bench import Bench, Timing
from onnxc.tools.process import Worker
from tests.fake_cuda import FakeDriver
from tests.targets import needs_triton

COMMANDS = ("info", "compile", "run", "compare", "explain", "bench")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[N, 4] x) => (float[N, 4] y) { a = Add(x, x)  y = Tanh(a) }'
    )
    path = tmp_path_factory.mktemp("cli") / "model.onnx"
    onnx.save(proto, path)
    return path


@pytest.fixture(scope="module")
def saved(model: Path) -> Path:
    path = model.with_suffix(".onnxc")
    result = invoke("compile", model, "--output", path)
    assert result.exit_code == 0, result.output
    assert "kernel call" in result.stdout
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0 and f"onnxc {command} model.onnx" in result.stdout


def test_no_arguments_is_help() -> None:
    text = invoke().output
    assert all(command in text for command in COMMANDS)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, onnxc.cli\n"
        "try: onnxc.cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('numpy', 'onnx', 'networkx', 'onnxruntime')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_version() -> None:
    assert invoke("--version").exit_code in (0, 1)  # 1 where onnxc runs from a folder, not installed


def test_info(model: Path) -> None:
    text = invoke("info", model).stdout
    assert "x  float32[N, 4]" in text and "dynamic dims: N" in text and "all ops are supported" in text
    data = json.loads(invoke("info", model, "--json").stdout)
    assert data["supported"] and {op["name"]: op["count"] for op in data["ops"]} == {"Add": 1, "Tanh": 1}


def test_info_lists_what_is_not_supported(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Mystery", ["x"], ["y"], domain="com.acme")
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in "xy")
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.acme", 1)]
    proto = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]), opset_imports=opsets, ir_version=8)
    onnx.save(proto, tmp_path / "m.onnx")
    result = invoke("info", tmp_path / "m.onnx")
    assert result.exit_code == 0 and "com.acme.Mystery  not supported at opset 1" in result.stdout
    failed = invoke("run", tmp_path / "m.onnx")
    assert failed.exit_code == 2 and "Mystery-1 (com.acme)" in failed.stderr


def test_info_of_a_saved_model(saved: Path) -> None:
    text = invoke("info", saved).stdout
    assert "1 kernel calls a run" in text and "x  float32[N, 4]" in text
    assert json.loads(invoke("info", saved, "--json").stdout)["entry"]


def test_run_with_files(model: Path, saved: Path, tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    np.savez(tmp_path / "in.npz", x=x)
    for path in (model, saved):
        out = tmp_path / f"{path.suffix}.npz"
        result = invoke("run", path, "--inputs", tmp_path / "in.npz", "--output", out)
        assert result.exit_code == 0 and "y  float32[3, 4]" in result.stdout
        with np.load(out) as stored:
            np.testing.assert_allclose(stored["y"], np.tanh(2 * x), rtol=1e-5)


def test_run_with_random_inputs(model: Path, saved: Path) -> None:
    shown = [invoke("run", path, "--dim", "N=5", "--seed", 3).stdout for path in (model, saved)]
    assert "y  float32[5, 4]" in shown[0] and shown[0] == shown[1]


def test_compare_exit_codes(model: Path) -> None:
    assert invoke("compare", model, "--samples", 2).exit_code == 0
    assert invoke("compare", model, "--rtol", 0, "--atol", 0, "--reference", "float64").exit_code == 1
    assert invoke("compare", model, "--reference", "nothing").exit_code == 2
    assert invoke("compare", model, "nothing").exit_code == 2
    assert [invoke("compare", model, *words).exit_code for words in (("",), ("--reference", ""))] == [2, 2]
    data = json.loads(invoke("compare", model, "--json", "--dim", "N=3").stdout)
    assert data["agree"] and data["outputs"][0]["shape"] == [3, 4]


def test_compare_two_files(model: Path, tmp_path: Path) -> None:
    """The second is the reference, in any engine; what is written does not replace it."""
    other = tmp_path / "other.onnx"
    proto = onnx.load(model)
    proto.graph.node[0].op_type = "Mul"
    onnx.save(proto, other)
    found = invoke("compare", model, other, "--dim", "N=3", "--json")
    assert found.exit_code == 1
    assert (
        json.loads(found.stdout)["outputs"]
        == json.loads(invoke("compare", model, "--reference", other, "--dim", "N=3", "--json").stdout)["outputs"]
    )
    assert invoke("compare", model, model, "--dim", "N=3").exit_code == 0
    assert json.loads(invoke("compare", model, f"{other}@float64", "--json").stdout)["reference"].endswith("float64")
    before = other.read_bytes()
    for reference in (other, f"{other}@float64"):
        refused = invoke("compare", model, reference, "--html", other)
        assert refused.exit_code == 2 and "would replace the model itself" in refused.stderr
    assert other.read_bytes() == before


def test_explain(model: Path, saved: Path) -> None:
    for path in (model, saved):
        assert "n0 Add" in invoke("explain", path).stdout
    assert "function" in invoke("explain", saved, "--kernels").stdout
    assert json.loads(invoke("explain", saved, "--json").stdout)["counts"]["kernels"] == 1
    assert invoke("explain", saved, "--source", "k0").stdout.startswith("static void k0(")
    assert json.loads(invoke("explain", saved, "--source", "k0", "--json").stdout)["k0"].startswith("static void k0(")
    wrong = invoke("explain", saved, "--source", "k9")
    assert wrong.exit_code == 2 and "there are k0" in wrong.stderr


def test_bench(model: Path) -> None:
    result = invoke("bench", model, "--rounds", 2, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert [t["engine"] for t in data["timings"]] == ["onnxc", "onnxruntime"]
    assert data["ratios"]["onnxruntime"]["best"] > 0 and all(t["runs"] >= 2 for t in data["timings"])
    assert "no engine 'torch'" in invoke("bench", model, "--peer", "torch").stderr


def test_texts_and_narrow_numbers(tmp_path: Path) -> None:
    """What an .npz has no types for: the workers of a race get it all the same."""
    for kind, said in (("string", "y  string[2]"), ("bfloat16", "y  bfloat16[2]")):
        proto = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 18]> g ({kind}[2] x) => (y) {{ y = Identity(x) }}'
        )
        onnx.save(proto, tmp_path / "m.onnx")
        assert said in invoke("run", tmp_path / "m.onnx").stdout
        result = invoke("bench", tmp_path / "m.onnx", "--rounds", 1)
        assert result.exit_code == 0 or (kind != "string" and "onnxruntime cannot run the model" in result.stderr)


@pytest.mark.parametrize("command", ["info", "run", "compare", "explain", "bench"])
def test_errors_are_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"\x00 this is no model")
    for path in (tmp_path / "bad.onnx", tmp_path / "missing.onnx"):
        result = invoke(command, path)
        assert result.exit_code == 2 and not result.stdout
        assert result.stderr.startswith("onnxc: error: ") and result.stderr.count("\n") == 1


def test_options_of_a_compile_with_a_saved_model(saved: Path) -> None:
    """They would be ignored without a word."""
    result = invoke("run", saved, "--cpu", "x86-64", "--input-shape", "x=2,3", "--threads", "1", "--no-tuned")
    assert result.exit_code == 2 and "--cpu, --input-shape, --no-tuned would change nothing" in result.stderr


def test_errors_spell_out_what_a_terminal_would_obey(tmp_path: Path) -> None:
    node = helper.make_node("\x1b[31mRelu", ["x"], ["y"], name="\x1b]0;title\x07", domain="\u202edomain")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y]), ir_version=9), tmp_path / "m.onnx")
    result = invoke("run", tmp_path / "m.onnx")
    assert result.exit_code == 2 and r"\x1b[31mRelu" in result.stderr
    assert result.stderr.replace("\n", "").isprintable()


def test_what_was_written_is_spelled_out(saved: Path, model: Path, tmp_path: Path) -> None:
    """Also where it is a file's name that has what a terminal would obey."""
    for command, option in (("compile", "--output"), ("explain", "--html"), ("profile", "--trace")):
        path = tmp_path / "\x9b31m\n\u202ename"
        result = invoke(command, model, option, path)
        assert result.exit_code == 0 and path.stat().st_size
        assert str(tmp_path) + r"/\x9b31m\n\u202ename" in result.stdout


def test_names_stay_on_their_line_and_within_it(tmp_path: Path) -> None:
    """A name can neither say what a command says, nor fill the screen (rich takes a minute for so many lines)."""
    long = "H\nall ops are supported\n" * 40_000
    x = helper.make_tensor_value_info(long + "x", TensorProto.FLOAT, [long, 4])
    y = helper.make_tensor_value_info(long + "y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Neg", [x.name], [y.name], name=long)], long, [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], producer_name=long, ir_version=9)
    onnx.save(proto, tmp_path / "m.onnx")
    for command in ("info", "run", "explain", "profile", "compare"):
        result = invoke(command, tmp_path / "m.onnx")
        assert result.exit_code == 0 and len(result.stdout) < 25_000, command
        assert result.stdout.splitlines().count("all ops are supported") == (command == "info")
    result = invoke("run", tmp_path / "m.onnx", "--dim", "n=2")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and len(result.stderr) < 1000


def test_op_types_are_no_markup(tmp_path: Path) -> None:
    node = helper.make_node("[/]Q[red]\nall ops are supported", ["x"], ["y"], domain="a[/b]")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y]), ir_version=9), tmp_path / "m.onnx")
    result = invoke("info", tmp_path / "m.onnx")
    assert result.exit_code == 0 and r"a[/b].[/]Q[red]\nall ops are supported  not supported at opset" in result.stdout


def test_warnings_are_one_line(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONNXC_CACHE", str(tmp_path / "file"))
    result = invoke("run", model)
    assert result.exit_code == 0 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("onnxc: warning: compiling without a cache: ")


def test_progress_is_for_terminals(saved: Path) -> None:
    """A log that is to have colours is none."""
    done = subprocess.run(
        [sys.executable, "-m", "onnxc", "run", str(saved)], capture_output=True, env={**os.environ, "FORCE_COLOR": "1"}
    )
    assert done.returncode == 0 and not done.stderr


def test_a_name_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux allows any bytes in one. The weights lie beside the model."""
    monkeypatch.chdir(tmp_path)
    w = onnx.numpy_helper.from_array(np.ones(4096, np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4096]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [w])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(proto, "m.onnx", save_as_external_data=True, location="w.bin")
    name = os.fsdecode(b"m\xff.onnx")
    os.rename("m.onnx", name)
    for arguments, says in (
        (["compare", name, "--layers", "--html", name + ".html"], "agrees with onnxruntime"),
        (["bench", name, "--rounds", "1"], "onnxruntime"),
        (["explain", name, "--html", name + ".html"], r"written to m\udcff.onnx.html"),
        (["profile", name, "--runs", "1", "--trace", name + ".json"], r"written to m\udcff.onnx.json"),
        (["compile", name, "-o", name + "c"], r"m\udcff.onnxc: 1 kernel"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 0 and not result.stderr and says in result.stdout, (arguments, result)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = invoke("info", tmp_path / "missing.onnx", "--debug")
    assert result.exception is not None and type(result.exception).__name__ == "ModelError"


@pytest.mark.parametrize(
    "arguments",
    [("--input-shape", "x"), ("--dim", "N=two"), ("--dim", "M=2"), ("--inputs", "/no/file.npz"), ("--seed", "-1")],
)
def test_wrong_options(model: Path, arguments: tuple[str, str]) -> None:
    result = invoke("run", model, *arguments)
    assert result.exit_code == 2 and result.stderr.startswith("onnxc: error: ")


def test_outputs_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    """Said before the work, and a model is not replaced by its own program."""
    before = model.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for command, path, says in (
        ("compile", "/no/folder/m.onnxc", "there is no folder for '/no/folder/m.onnxc'"),
        ("run", "/no/folder/y.npz", "there is no folder for '/no/folder/y.npz'"),
        ("compile", tmp_path, "is a folder"),
        ("run", tmp_path, "is a folder"),
        ("run", tmp_path / "pipe", "is not a regular file"),
        ("explain", tmp_path / "pipe", "is not a regular file"),
        ("compile", model, "would replace the model itself"),
        ("run", model, "would replace the model itself"),
        ("explain", model, "would replace the model itself"),
        ("profile", model, "would replace the model itself"),
        ("compare", model, "would replace the model itself"),
    ):
        result = invoke(command, model, "--output" if command in ("compile", "run") else "--html", path)
        assert result.exit_code == 2 and says in result.stderr and not result.stdout
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rtol", "-1"), "rtol and atol are numbers from 0 on"),
        (("--atol", "nan"), "rtol and atol are numbers from 0 on"),
        (("--tolerance", "Sofmax=1e-3"), "a tolerance is of a dtype or of an operator, and 'Sofmax' is neither"),
        (("--html", "/no/folder/page.html"), "there is no folder for '/no/folder/page.html'"),
        (("--reference", "renamed.onnx"), "renamed.onnx in onnxruntime has the inputs 'z', and the model 'x'"),
        (("longer.onnx", "--reference", "onnx"), "there is one reference, and two are given: 'longer.onnx', and"),
        (("--reference", "longer.onnx"), "1 (y); of longer.onnx in onnxruntime: 2 (y, a)"),
        (("--output", "folder"), "--output is where --bisect nodes writes the smallest model"),
        (("--bisect", "nodes", "--output", "longer.onnx"), "'longer.onnx' is there, and is no folder"),
        (("--inputs", "loader.py:broken"), "raised ZeroDivisionError (division by zero)"),
        (("--inputs", "unreadable.py:load"), "raised SyntaxError"),
    ],
)
def test_wrong_options_of_compare(
    model: Path, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    head = '<ir_version: 8, opset_import: ["" : 18]> g '
    onnx.save(onnx.parser.parse_model(head + "(float[N, 4] z) => (float[N, 4] y) { y = Tanh(z) }"), "renamed.onnx")
    two = "(float[N, 4] x) => (float[N, 4] y, float[N, 4] a) { a = Add(x, x) y = Tanh(a) }"
    onnx.save(onnx.parser.parse_model(head + two), "longer.onnx")
    Path("loader.py").write_text("def broken():\n    return 1 / 0\n")
    Path("unreadable.py").write_text("def load(:\n")
    result = invoke("compare", model, *arguments)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not result.stdout
    assert result.stderr.startswith("onnxc: error: ") and message in result.stderr


def test_inputs_that_are_no_npz(model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "whole.npz", x=np.zeros(300))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:100])
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04junk")
    for name in ("one.npy", "cut.npz", "junk.npz"):
        result = invoke("run", model, "--inputs", tmp_path / name)
        assert result.exit_code == 2 and f"{name}' is not an .npz file" in result.stderr


def test_pipes_are_not_waited_for(model: Path, tmp_path: Path) -> None:
    """As a model, compiled or not, as inputs, and as a record; nor is a file read that is too large for a model."""
    os.mkfifo(pipe := tmp_path / "pipe.onnxc")
    for arguments in (
        ("info", pipe),
        ("run", pipe),
        ("run", model, "--inputs", pipe),
        ("run", model, "--record", pipe),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2 and "not a regular file" in result.stderr
    (tmp_path / "huge.onnx").touch()
    os.truncate(tmp_path / "huge.onnx", 1 << 42)
    result = invoke("run", tmp_path / "huge.onnx")
    assert result.exit_code == 2 and "over 2 GB" in result.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_closed_pipe_ends_quietly(saved: Path, options: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "onnxc", "explain", str(saved), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ),
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 141)


def test_a_full_disk_and_closed_streams(saved: Path) -> None:
    shell = f'"$0" -m onnxc info {shlex.quote(str(saved))}'
    for command, code, said in ((f"{shell} <&- >&-", 0, ""), (f"{shell} >/dev/full", 2, "onnxc: error: "),
                                ('"$0" -m onnxc --help >/dev/full', 2, "onnxc: error: ")):  # fmt: skip
        done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
        assert done.returncode == code and done.stderr.startswith(said), done.stderr
        assert len(done.stderr.splitlines()) == bool(said)
    done = subprocess.run(["sh", "-c", f"{shell} --debug >/dev/full", sys.executable], capture_output=True, text=True)
    assert "Traceback" in done.stderr and "OSError" in done.stderr.splitlines()[-1]


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "onnxc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("onnxc ") and not done.stderr


def test_an_interrupt_before_the_command_is_quiet() -> None:
    code = (
        "import onnxc.cli, onnxc.__main__\ndef stop(): raise KeyboardInterrupt\n"
        "onnxc.cli.main = stop\nonnxc.__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("importing", [True, False])
def test_an_interrupt_ends_an_import_at_once(importing: bool, tmp_path: Path) -> None:
    """An exception out of an import may crash the extension that is imported; elsewhere there is more to put away."""
    (tmp_path / "slow.py").write_text("import os, signal\ndef f(): os.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "slower.py").write_text("import slow\nslow.f()\n")
    code = (
        "import signal, slow\nfrom onnxc.__main__ import interrupted\n"
        "signal.signal(signal.SIGINT, interrupted)\n"
        f"try: {'import slower' if importing else 'slow.f()'}\n"
        "except KeyboardInterrupt: print('put away')\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout) == ((-signal.SIGINT, "") if importing else (0, "put away\n"))
    assert not done.stderr


# ---------------------------------------------------------------- the measuring process


def test_worker_reports_errors_and_lives_on() -> None:
    with Worker() as worker:
        with pytest.raises(RunError, match="ModuleNotFoundError"):
            worker.ask("import", engine="no_such_module")
        assert worker.ask("import", engine="json")["seconds"] >= 0
        assert worker.ask("memory")["pss"] > 0


def test_worker_that_died_says_so() -> None:
    with Worker() as worker:
        worker.ask("import", engine="json")
        worker.kill()
        with pytest.raises(RunError, match="died while it did 'memory'"):
            worker.ask("memory")


def test_ratios_and_printing() -> None:
    timings = (Timing("onnxc", "1", 0.5, (1.0, 2.0, 3.0)), Timing("onnxruntime", "2", 0.5, (2.0, 4.0, 8.0)))
    result = Bench("m.onnx", 2, 3, timings)
    assert result.ratio() == (0.5, 0.5)
    assert "onnxc is 2.00 times as fast as onnxruntime" in str(result)
    slower = Bench("m.onnx", 2, 3, (Timing("onnxc", "1", 0, (3.0,)), Timing("onnxruntime", "2", 0, (2.0,))))
    assert "onnxc takes 1.50 times the time of onnxruntime" in str(slower)


# ---------------------------------------------------------------- GPUs


def test_convert(model: Path) -> None:
    text = invoke("explain", model, "--dtype", "float16", "--json").stdout
    assert "convert-precision" in json.loads(text)["stages"]
    assert "y  float32[2, 4]" in invoke("run", model, "--dtype", "bfloat16", "--dim", "N=2").stdout
    loose = ("--rtol", 1e-2, "--atol", 1e-2)
    assert invoke("compare", model, "--dtype", "float16", *loose).exit_code == 0
    assert "dtype is one of float16, bfloat16" in invoke("run", model, "--dtype", "int8").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", "cuda:90"), "target is 'cpu', 'cuda', or 'cuda:sm_90'"),
        (("--target", "cuda:sm_30"), "older than the oldest"),
        (("--target", "cuda:sm_90", "--precision", "half"), "precision is one of float32, tf32, tf32x3"),
        (("--precision", "tf32"), "for GPUs"),
    ],
)
def test_wrong_targets(model: Path, options: tuple[str, ...], message: str) -> None:
    result = invoke("explain", model, *options)
    assert result.exit_code == 2 and message in result.stderr


@needs_triton
def test_compile_for_a_gpu_that_is_not_there(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpu.onnxc"
    result = invoke("compile", model, "-o", path, "--target", "cuda:sm_80,sm_90", "--dtype", "float16")
    assert result.exit_code == 0, result.output
    assert "gpu sm_80, sm_90" in invoke("info", path).stdout
    assert invoke("explain", path, "--source", "k0").stdout.startswith("def k0(")


def test_info_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Driver:
        raise CudaError("no driver")

    monkeypatch.setattr(driver_module, "load_driver", none)
    assert invoke("info").stdout.splitlines()[-1].split() == ["gpu", "none"]
    assert json.loads(invoke("info", "--json").stdout)["gpus"] == []


def test_info_shows_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver_module, "load_driver", lambda: Driver(fake))
    monkeypatch.setattr(driver_module, "_devices", {})
    gpu = device(0)
    last = invoke("info").stdout.splitlines()[-1]
    assert last.startswith("gpu ") and gpu.name in last and gpu.architecture in last
    (row,) = json.loads(invoke("info", "--json").stdout)["gpus"]
    assert row["name"] == gpu.name and row["memory"] >= row["free"] > 0

"""The system's C++ compiler: found, identified and run.

Compilers are run with argument lists, never through a shell, in a private temporary directory, on files whose
names are ours. A library that does not need them is linked without the start files and the C++ library, which
saves a tenth of the time of a small compile.

>>> library = compile_library([Source("one.cpp", 'extern "C" int one() { return 1; }')])
>>> library[:4]
b'\\x7fELF'
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from onnxc.errors import CacheError, ToolchainError
from onnxc.runtime.cache import Cache, digest
from onnxc.runtime.cpu import JUMPS_APART, available_cpus, machine
from onnxc.runtime.package import is_library

_CANDIDATES = ("g++", "c++", "clang++")
_SOURCE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}\.(cpp|h)")
_FOLDER = "onnxc-compile-"  # how the folders begin that compilers run in
_FOLDER_LIFE = 6 * 3600.0  # seconds
_WAIT = 0.2  # seconds that a wait lasts at most, see `result_of`
_STDERR_KEPT = 6000  # characters of a compiler's complaint that an error shows

# -O3 gains nothing over -O2. Never -ffast-math: NaN, infinities, -0.0 and denormals must behave, and with
# -shared it would switch denormals off for the whole process.
_OPTIMIZE = ("-O2", "-std=c++17", "-fno-math-errno", "-fno-trapping-math")
# For AMD's cores gcc leaves multiplications and additions apart where a loop has few sums: tiles of few rows would give
# other bits than those of many, and other machines other bits than these.
FUSED = "--param=avoid-fma-max-bits=0"
# Vectors of 64-bit lanes take several registers, and gcc copies them through memory, by 16 bytes unless it is told
# otherwise: what reads 32 of them waits until all are in the cache. (A CPU without such moves takes what it has.)
WHOLE_MOVES = ("-mmove-max=512", "-mstore-max=512")
# Nothing of what follows is used by generated code, and each costs compile time or bytes.
_LEAN = (
    "-pipe",
    "-g0",
    "-fPIC",
    "-Wno-psabi",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-stack-protector",
    "-fvisibility=hidden",
    "-fno-asynchronous-unwind-tables",
)
_LINK_BARE = ("-shared", "-nostdlib", "-Wl,--hash-style=gnu,--build-id=none,--as-needed")
_LIBRARIES_BARE = ("-lm", "-lc", "-lgcc")


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Source:
    """One translation unit: a file name of our choice (letters, digits, underscores; .cpp), its text, and flags of its
    own.
    """

    name: str
    text: str
    flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _SOURCE_NAME.fullmatch(self.name):
            raise ValueError(f"not a source file name: {self.name!r}")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the program and the arguments that $CXX gives it.
        kind: ``gcc`` or ``clang``.
        version: the first line of ``--version``.
        identity: a digest of all that tells this compiler from another: part of cache keys.
    """

    command: tuple[str, ...]
    kind: str
    version: str
    identity: str

    @property
    def major(self) -> int:
        """The first number of its version, as in ``g++ (Debian 12.2.0-14) 12.2.0``; 0 where none is found."""
        found = re.search(r"(\d+)\.\d+\S*$", self.version) or re.search(r" (\d+)\.\d", self.version)
        return int(found[1]) if found else 0


def find_compiler(cache: Cache | None = None) -> Compiler:
    """The C++ compiler: $CXX, else g++, c++ or clang++ on the PATH.

    Its version is asked for once: the answer is kept in this process and, with a cache, on the disk under the
    compiler's path, size and time of change, so that later processes start none.

    Raises:
        ToolchainError: there is no compiler (it says what to install), or $CXX does not work.
    """
    return _identify(_command(os.environ.get("CXX", ""), os.environ.get("PATH", "")), cache)


@functools.cache
def _command(cxx: str, path: str) -> tuple[str, ...]:
    if cxx.strip():
        try:
            words = shlex.split(cxx)
        except ValueError as error:  # a quotation that does not end
            raise ToolchainError(f"$CXX is {cxx!r}, which is no command: {error}", cause=error) from error
        found = shutil.which(words[0], path=path)
        if found is None:
            raise ToolchainError(f"$CXX names {words[0]!r}, which is not a program on the PATH")
        return (os.path.abspath(found), *words[1:])  # compilers run in a folder of their own
    for name in _CANDIDATES:
        found = shutil.which(name, path=path)
        if found is not None:
            return (os.path.abspath(found),)
    raise ToolchainError(_install_advice())


def _install_advice() -> str:
    if sys.platform == "darwin":
        how = "xcode-select --install"
    elif shutil.which("apt-get"):
        how = "apt-get install g++"
    elif shutil.which("dnf"):
        how = "dnf install gcc-c++"
    elif shutil.which("apk"):
        how = "apk add g++"
    else:
        how = "g++ 12 or later, or clang++"
    return (
        f"no C++ compiler on this machine: install one ({how}), or set CXX to one. "
        "A model saved with model.save() on a machine that has one loads without"
    )


_identified: dict[str, Compiler] = {}


def _identify(command: tuple[str, ...], cache: Cache | None) -> Compiler:
    key = _fingerprint(command)
    if key not in _identified:
        known = _stored(cache, key) if cache else None
        kind, version = known or _ask(command)
        if cache and not known:
            with contextlib.suppress(CacheError):  # a cache that cannot be written costs time, no more
                cache.put(key, json.dumps([kind, version]).encode())
        identity = digest("compiler", command[1:], version, machine(), key)
        _identified[key] = Compiler(command, kind, version, identity)
    return _identified[key]


def _fingerprint(command: tuple[str, ...]) -> str:
    real = os.path.realpath(command[0])
    try:
        info = os.stat(real)
    except OSError as error:
        raise ToolchainError(f"cannot read the compiler {real}: {error}", cause=error) from error
    return digest("compiler-version", list(command), real, info.st_size, info.st_mtime_ns)


def _stored(cache: Cache, key: str) -> tuple[str, str] | None:
    data = cache.read(key)
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(data) if data else None
        if isinstance(found, list) and len(found) == 2 and all(isinstance(part, str) for part in found):
            return found[0], found[1]
    return None


def _ask(command: tuple[str, ...]) -> tuple[str, str]:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"cannot run the compiler {command[0]}: {error}", cause=error) from error
    if done.returncode or not done.stdout.strip():
        says = (done.stderr or done.stdout).strip()[:500] or "it says nothing"
        raise ToolchainError(f"{command[0]} --version fails (exit status {done.returncode}): {says}")
    return ("clang" if "clang" in done.stdout.lower() else "gcc"), done.stdout.splitlines()[0].strip()


def compile_library(
    sources: Sequence[Source],
    *,
    headers: Mapping[str, str] | None = None,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    objects: Sequence[Future[bytes]] = (),
    bare: bool = True,
    compiler: Compiler | None = None,
    jobs: int | None = None,
    timeout: float = 600.0,
    runs: Runs | None = None,
) -> bytes:
    """Compile sources and link them to one shared library; returns its bytes.

    One source is compiled and linked by one compiler run. Several are compiled side by side, then linked.

    Args:
        sources: the translation units; their names differ.
        headers: more files for the sources to include, by name (letters, digits, underscores; .h).
        include: directories to search for headers.
        flags: more compiler flags, such as those of a :class:`~onnxc.runtime.cpu.Level`.
        link_flags: more flags for the link.
        objects: of :func:`compile_object`, perhaps in the making: of these, what the sources use becomes part of it.
        bare: link without the start files and the C++ library: for code with no constructors at load.
        compiler: default: :func:`find_compiler`.
        jobs: compilers at a time; default: one for each CPU that this process may use.
        timeout: seconds for all of it.
        runs: what may end it from another thread.

    Raises:
        ToolchainError: no compiler, an error in a source (with the compiler's message), or out of time.
    """
    if len({source.name for source in sources}) != len(sources) or not sources:
        raise ValueError("sources need names of their own, and there must be one")
    run = _Run(compiler or find_compiler(), time.monotonic() + timeout)
    with (runs or Runs()).of(run), _private_folder() as folder:
        for source in (*sources, *(Source(name, text) for name, text in (headers or {}).items())):
            (folder / source.name).write_text(source.text, encoding="utf-8")
        options = _options(folder, flags, include, run.compiler)
        link, libraries = _link_options(bare)
        library = folder / "library.so"
        if len(sources) == 1 and all(made.done() for made in objects):
            files = [*options, *sources[0].flags, str(folder / sources[0].name)]
        else:
            files = _compile_objects(run, sources, options, folder, jobs or available_cpus())
        files += _written(objects, folder)
        gather = ["-Wl,--gc-sections"] if objects else []
        run([*link, *gather, *files, *link_flags, *libraries, "-o", str(library)], folder)
        code = _read(run, library)
    if not is_library(code):
        raise ToolchainError(f"{run.compiler.command[0]} made no library: {len(code)} bytes that are none, or cut off")
    return code


def compile_object(
    source: Source,
    *,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    compiler: Compiler | None = None,
    timeout: float = 600.0,
    runs: Runs | None = None,
) -> bytes:
    """Compile a source to an object file, each function in a section of its own; returns its bytes.

    Args, Raises: as :func:`compile_library`.
    """
    run = _Run(compiler or find_compiler(), time.monotonic() + timeout)
    with (runs or Runs()).of(run), _private_folder() as folder:
        (folder / source.name).write_text(source.text, encoding="utf-8")
        options = [*_options(folder, flags, include, run.compiler), "-ffunction-sections"]
        (made,) = _compile_objects(run, [source], options, folder, 1)
        return _read(run, Path(made))


def _read(run: _Run, made: Path) -> bytes:
    try:
        return made.read_bytes()
    except OSError as error:
        raise ToolchainError(f"{run.compiler.command[0]} made no {made.stem}: {error}", cause=error) from error


@functools.cache
def _assembler_takes(command: tuple[str, ...], flag: str) -> bool:
    """Whether the assembler knows the flag: binutils before 2.34 and clang before 10 do not know `JUMPS_APART`."""
    with _private_folder() as folder:
        (folder / "empty.s").touch()
        made = [*command, flag, "-c", str(folder / "empty.s"), "-o", str(folder / "empty.o")]
        try:
            return subprocess.run(made, capture_output=True, timeout=10, check=False).returncode == 0
        except (OSError, subprocess.SubprocessError):
            return False


def _options(folder: Path, flags: Sequence[str], include: Sequence[Path], compiler: Compiler) -> list[str]:
    if JUMPS_APART in flags:  # gcc leaves it to the assembler
        spelled = f"-Wa,{JUMPS_APART}" if compiler.kind == "gcc" else JUMPS_APART
        flags = [spelled if flag == JUMPS_APART else flag for flag in flags]
        if not _assembler_takes(compiler.command, spelled):
            flags.remove(spelled)
    own = [FUSED] if compiler.kind == "gcc" else []
    own += WHOLE_MOVES if compiler.kind == "gcc" and compiler.major >= 12 and machine() == "x86_64" else []
    return [*_OPTIMIZE, *_LEAN, *own, *flags, f"-I{folder}", *(f"-I{path}" for path in include)]


def _written(objects: Sequence[Future[bytes]], folder: Path) -> list[str]:
    paths = [folder / f"object{k}.o" for k in range(len(objects))]
    for path, made in zip(paths, objects, strict=True):
        path.write_bytes(result_of(made))
    return [str(path) for path in paths]


def _link_options(bare: bool) -> tuple[Sequence[str], Sequence[str]]:
    return (_LINK_BARE, _LIBRARIES_BARE) if bare and sys.platform.startswith("linux") else (("-shared",), ())


def _compile_objects(
    run: _Run, sources: Sequence[Source], options: Sequence[str], folder: Path, jobs: int
) -> list[str]:
    """Compile each source, the longest first (a long one at the end would run alone)."""

    def compile_one(source: Source) -> None:
        file = folder / source.name
        run([*options, *source.flags, "-c", str(file), "-o", str(file.with_suffix(".o"))], folder)

    longest_first = sorted(sources, key=lambda source: len(source.text), reverse=True)
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(jobs, len(sources)))) as pool:
        futures: set[Future[None]] = set()
        try:
            for source in longest_first:
                futures.add(pool.submit(compile_one, source))
            while futures:
                done, futures = _first_completed(futures)
                for future in done:
                    future.result()
        except BaseException:
            run.stop()
            raise
    return [str((folder / source.name).with_suffix(".o")) for source in sources]


def result_of(future: Future[_Result]) -> _Result:
    """The result of a future of this program's compiles; an interrupt (Ctrl-C) ends the wait, always.

    Python notes a signal and looks at its notes before and after a wait, but not at what comes just as the wait
    begins: on a busy machine one interrupt in six was seen when the compiler was done. So waits are short.
    """
    while not future.done():
        _first_completed({future})
    return future.result()


def _first_completed(futures: set[Future[_Result]]) -> tuple[set[Future[_Result]], set[Future[_Result]]]:
    """Those that are done, perhaps none yet, and the others."""
    done, others = concurrent.futures.wait(futures, _WAIT, concurrent.futures.FIRST_COMPLETED)
    return done, others


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = None
    try:
        _remove_abandoned(tempfile.gettempdir())
        folder = tempfile.mkdtemp(prefix=_FOLDER)  # mode 0700
        yield Path(folder)
    except OSError as error:  # the disk is full, say
        raise ToolchainError(f"cannot write the sources of a compile: {error}", cause=error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache  # once in a process
def _remove_abandoned(root: str) -> None:
    """Removes the folders of this user's compiles that were killed: no compile takes as long as these are old."""
    if not hasattr(os, "geteuid"):
        return
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(_FOLDER):
                info = entry.stat(follow_symlinks=False)
                old = time.time() - info.st_mtime > _FOLDER_LIFE
                if old and info.st_uid == os.geteuid() and stat.S_ISDIR(info.st_mode):
                    shutil.rmtree(entry.path, ignore_errors=True)


@dataclass(eq=False)
class _Run:
    """Runs a compiler, from several threads; `stop` ends what runs, and what would start later."""

    compiler: Compiler
    deadline: float  # by time.monotonic()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _processes: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _stopped: bool = False

    def __call__(self, arguments: Sequence[str], folder: Path) -> None:
        process = self._start([*self.compiler.command, *arguments], folder)
        try:
            # Reading to the end of the pipe wakes up at once; wait() with a time limit looks every 50 ms.
            complaint, _ = process.communicate(timeout=max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise ToolchainError("the compiler ran out of time", cause=error) from error
        finally:
            self._end(process)
        if process.returncode:
            raise ToolchainError(self._message(process.returncode, complaint, folder))

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                _kill(process)

    def _start(self, command: list[str], folder: Path) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise ToolchainError("stopped, for another compile failed, or the whole was interrupted")
            try:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that the compiler's own children end with it
                    env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
                )
            except OSError as error:
                raise ToolchainError(f"cannot run {command[0]}: {error}", cause=error) from error
            self._processes.add(process)
            return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._processes.discard(process)
            if process.poll() is None:
                _kill(process)
        if process.stdout:
            process.stdout.close()
        process.wait()

    def _message(self, code: int, complaint: bytes, folder: Path) -> str:
        text = complaint.decode("utf-8", "replace").replace(f"{folder}{os.sep}", "").strip()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return f"the C++ compiler failed ({how}; {self.compiler.version}):\n{text[:_STDERR_KEPT]}"


class Runs:
    """The compiler's runs of one compile, in whatever threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: list[_Run] = []
        self._over = False

    @contextlib.contextmanager
    def of(self, run: _Run) -> Iterator[None]:
        """Within it, a run is one of these."""
        with self._lock:
            self._runs.append(run)
            if self._over:
                run.stop()
        try:
            yield
        finally:
            with self._lock:
                self._runs.remove(run)

    @contextlib.contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """An exception ends those that there are, and an interrupt (Ctrl-C) also those that would follow: nobody waits
        for what nobody wants.
        """
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._over = self._over or not isinstance(error, Exception)
                for run in self._runs:
                    run.stop()
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:  # else the number may be another's by now
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

"""A headless Chromium, driven through the DevTools protocol over a pipe: what a page logs, holds and looks like."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
LONGEST = 120.0  # seconds that a page is waited for


def find() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one tab."""

    def __init__(self, executable: str, folder: Path, width: int = 1400, height: int = 900) -> None:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, from_write)]  # clear of 3 and 4
        options = [
            "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'browser'}",
            f"--window-size={width},{height}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [executable, *options], pass_fds=(3, 4), preexec_fn=lambda: [os.dup2(e, 3 + k) for k, e in enumerate(ends)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        for end in (to_read, from_write, *ends):
            os.close(end)
        self._out, self._in = os.fdopen(to_write, "wb", 0), os.fdopen(from_read, "rb")
        self._number, self._left, self.problems = 0, b"", list[str]()
        self._session = ""
        target = next(t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()
        self._in.close()

    # ------------------------------------------------------------ what a test asks

    def open(self, path: Path, fragment: str = "", *, dark: bool = False) -> float:
        """Loads a report's page and waits until it is drawn; seconds from the start of the load until then."""
        self.problems.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url="about:blank")
        self._send("Page.navigate", url=path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        return float(self.wait("document.documentElement?.dataset.drawn || ''")) / 1e3

    def wait(self, expression: str) -> Any:
        """The value of an expression, as soon as it is true."""
        end = time.monotonic() + LONGEST
        while time.monotonic() < end:
            found = self.evaluate(expression)
            if found:
                return found
            if any(problem.startswith("thrown") for problem in self.problems):
                break
            time.sleep(0.05)
        raise TimeoutError(f"{expression} stays {found!r}; {self.problems}")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Another size of the window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)

    # ------------------------------------------------------------ the protocol

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self._event(found.get("method", ""), found.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = self._in.read1(1 << 16)
            if not more:
                raise RuntimeError("the browser ended")
            self._left += more
        text, self._left = self._left.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def _event(self, method: str, found: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(f"thrown: {json.dumps(found['exceptionDetails'])[:1000]}")
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a.get("description"))) for a in found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.problems.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = found["request"]["url"]
            if url.split(":")[0] not in ("file", "data", "about", "blob"):
                self.problems.append(f"asked for {url}")

"""Python code in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env}, cwd=Path(__file__).parent.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip

"""`python -m onnxc.cli`."""

from __future__ import annotations

from onnxc.cli import main

if __name__ == "__main__":
    main()

"""Measurements: `python -m benchmarks.run`. See README.md."""

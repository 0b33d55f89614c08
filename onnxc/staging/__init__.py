"""Graphs that are several programs, with steps on the host between them."""

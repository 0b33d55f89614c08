"""Reverse-mode differentiation: gradients of a graph of primitives, as further nodes of the same graph."""

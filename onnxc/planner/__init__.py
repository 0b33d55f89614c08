"""Decides which nodes share a kernel, how values lie in memory, and where buffers are placed."""

"""Graph passes: each takes a graph and returns a new one."""

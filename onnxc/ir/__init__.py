"""Graph IR: integer expressions, dtypes, tensor types, graphs of nodes over typed values, and their text form."""

"""Python functions over arrays: the array, tracing and compiling of functions, derivatives, control flow."""

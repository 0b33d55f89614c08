"""Code generators, one package for each target."""

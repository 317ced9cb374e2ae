"""Kernels by the names of their bindings."""

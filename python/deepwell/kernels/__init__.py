"""Kernels under the names of other libraries' bindings."""

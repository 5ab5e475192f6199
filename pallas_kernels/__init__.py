"""Pallas kernels for paged attention, usable from any JAX code."""

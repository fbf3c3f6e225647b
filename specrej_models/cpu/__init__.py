"""Kernels for CPUs, compiled by numba: matrix products, attention, layers."""

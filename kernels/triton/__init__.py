"""Kernels in Triton: one module an operation, named like it, with its kernels and launchers."""

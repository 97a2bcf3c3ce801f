"""Attention on the CPU: loops compiled by Numba, and a reader per format."""

from kvfold.kernels.cpu.kernel import CPUKernel

__all__ = ["CPUKernel"]

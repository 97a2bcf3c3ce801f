"""What uses the storage and the kernels."""

"""A model's own operations in decode steps, around attention, as kernels."""

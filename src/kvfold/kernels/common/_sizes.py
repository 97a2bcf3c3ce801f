# mypy: ignore-errors
"""Sizes that storage has, as kernels know them."""

from triton.language import constexpr

from kvfold.formats import paged

PAGE = constexpr(paged.PAGE)
"""Tokens of a page."""

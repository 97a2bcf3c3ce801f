"""Where :func:`kvfold.decoding` was before it had a shorter name."""

from kvfold.engines.transformers.graph import DecodeGraph, Decoding, decoding

__all__ = ["DecodeGraph", "Decoding", "decoding"]

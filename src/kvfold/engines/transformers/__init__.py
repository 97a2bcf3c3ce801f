"""Folded caches for models of Hugging Face Transformers."""

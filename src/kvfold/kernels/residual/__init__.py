"""Residual codes and codes of groups, looked up in tables: VQLLM, GSRQ, and TaSQ where values are codes too."""

"""Folded caches in vLLM, unpatched: a plug-in, an attention backend, and the manager of the recent windows.

vLLM does paging, batching, prefix caching, tensor parallelism and the server. Ours is how a page's bytes lie and the attention
over them. Everything that imports vLLM lies here; ``settings``, ``refusals`` and ``capacity`` do not.
"""

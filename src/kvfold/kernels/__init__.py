"""Attention over packed caches: a registry of implementations; the first that supports a layer serves it, visibly."""

import torch

from kvfold.errors import KVFoldError
from kvfold.formats import Format
from kvfold.kernels.affine.tiles import TilesKernel
from kvfold.kernels.base import AttentionKernel, Choice
from kvfold.kernels.call import AttentionCall, DensePart, NewTokens, Span, Windows
from kvfold.kernels.cpu import CPUKernel
from kvfold.kernels.dense.decode import DenseKernel
from kvfold.kernels.generic.decode import BlocksKernel
from kvfold.kernels.gluon import (
    FragmentsKernel,
    GluonKernel,
    PagesKernel,
    TablesKernel,
)
from kvfold.kernels.merge import Partial
from kvfold.kernels.reference import ReferenceKernel

REGISTRY: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        GluonKernel(),
        PagesKernel(),
        FragmentsKernel(),
        DenseKernel(),
        TilesKernel(),
        TablesKernel(),
        BlocksKernel(),
        CPUKernel(),
        ReferenceKernel(),
    )
}
"""By name, in the order of preference; the reference, which supports everything, comes last."""


def choose(
    key_format: Format,
    value_format: Format,
    device: torch.device,
    pre_rope: bool = False,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    softcap: float | None = None,
    rows: int | None = None,
    rotary: int = 0,
) -> Choice:
    """The kernel for a layer.

    Parameters
    ----------
    name : str or None
        Insist on this one.
    dtype : torch.dtype or None
        Of queries and windows; None leaves it open.
    softcap : float or None
        Of the layer's scores.
    rows : int or None
        Query rows of a KV head in a step of one token; None leaves it, and ``rotary``, open.
    rotary : int
        Channels that are rotated as keys are read.

    Raises
    ------
    KVFoldError
        If the named kernel is unknown or does not support the layer.
    """

    def why_not(kernel: AttentionKernel) -> str | None:
        why = kernel.why_not(key_format, value_format, device, pre_rope)
        if why is None and dtype is not None and kernel.dtypes is not None and dtype not in kernel.dtypes:
            names = sorted(str(d).removeprefix("torch.") for d in kernel.dtypes)
            why = f"dtype={str(dtype).removeprefix('torch.')}; allowed: {', '.join(names)}"
        if why is None and softcap is not None and not kernel.caps_scores:
            why = "soft-capped scores"
        if why is None and rows is not None:
            why = kernel.why_not_queries(key_format, value_format, device, rows, rotary)
        return why

    def chosen(kernel: AttentionKernel, passed_over: dict[str, str]) -> Choice:
        return Choice(kernel, passed_over, kernel.many_tokens(key_format, value_format, pre_rope))

    if name is not None:
        if name not in REGISTRY:
            raise KVFoldError(f"kernel: {name!r} is not known; allowed: {', '.join(REGISTRY)}")
        why = why_not(REGISTRY[name])
        if why:
            raise KVFoldError(f"kernel: {name} does not support this layer: {why}")
        return chosen(REGISTRY[name], {})
    passed_over: dict[str, str] = {}
    for kernel in REGISTRY.values():
        why = why_not(kernel)
        if why is None:
            return chosen(kernel, passed_over)
        passed_over[kernel.name] = why
    raise KVFoldError(f"kernel: none supports this layer; {passed_over}")


__all__ = [
    "REGISTRY",
    "AttentionCall",
    "AttentionKernel",
    "Choice",
    "DensePart",
    "NewTokens",
    "Partial",
    "Span",
    "Windows",
    "choose",
]

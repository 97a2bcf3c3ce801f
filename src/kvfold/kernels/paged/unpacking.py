"""Packed tokens of one sequence to 16 bits, by a kernel where there is one for the format."""

import math

import torch

from kvfold.formats import Fields, Format, Hadamard, Paged, UniformTokens
from kvfold.formats.packing import UNIT, words_per_unit
from kvfold.formats.paged import NORM_STEPS, PAGE
from kvfold.kernels.generic import unpack as unpacking


def unsupported(form: Format) -> str | None:
    """Why no kernel unpacks pages of this format; None if one does."""
    if not isinstance(form, Paged) or not isinstance(form.inner, UniformTokens):
        return f"{form.kind} storage; allowed: uniform levels with statistics per page"
    if form.page != PAGE or not form.mean or form.norm not in ("", "rms", "max") or form.block != UNIT:
        return "pages without a mean, or blocks of more than 32 tokens"
    if form.operand not in ("key", "value"):
        return f"operand={form.operand}; allowed: key, value"
    if not isinstance(form.basis, Hadamard):
        return "basis; allowed: hadamard"
    if form.head_dim not in (16, 32, 64, 128, 256):
        return f"head_dim={form.head_dim}; allowed: 16, 32, 64, 128, 256"
    return None


def why_not(form: Format) -> str | None:
    """Why no kernel unpacks such pages, in place or gathered; None if one does."""
    return unpacking.why_not(form) if unsupported(form) else None


def any_unpack(
    form: Format, fields: Fields, table: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """:func:`unpack`, or of packed bytes that are gathered first, for formats that :func:`why_not` does not refuse."""
    if unsupported(form) is None:
        return unpack(form, fields, table, start, stop, dtype)
    first = start // PAGE
    pages = table[first : -(-stop // PAGE)].long()
    some = {name: t[pages].transpose(0, 1).flatten(1, 2).contiguous().unsqueeze(0) for name, t in fields.items()}
    found = unpacking.unpack(form, some, 0, 0, stop - first * PAGE, dtype)
    return found[0, :, start - first * PAGE :].transpose(0, 1)


def unpack(
    form: Format, fields: Fields, table: torch.Tensor, start: int, stop: int, dtype: torch.dtype
) -> torch.Tensor:
    """Decode tokens ``start`` to ``stop`` of a sequence.

    Parameters
    ----------
    form : Format
        That :func:`unsupported` does not refuse.
    fields : Fields
        Of pages: :meth:`kvfold.kernels.paged.PageLayout.views`.
    table : Tensor, int32 [pages], contiguous
        The sequence's pages.

    Returns
    -------
    Tensor, ``dtype`` [tokens, num_kv_heads, head_dim]
    """
    from kvfold.kernels.paged._unpack import unpack_kernel

    assert isinstance(form, Paged) and isinstance(form.inner, UniformTokens) and isinstance(form.basis, Hadamard)
    heads, dim, bits = fields["scale"].shape[1], form.head_dim, form.inner.bits_per_code
    out = torch.empty(stop - start, heads, dim, dtype=dtype, device=table.device)
    if stop == start:
        return out
    norm = fields["norm"] if form.norm else fields["mean"]
    arguments = [x for t in (fields["codes"], fields["scale"], fields["mean"], norm) for x in (t, *t.stride()[:2])]
    first = start // PAGE
    unpack_kernel[(-(-stop // PAGE) - first, heads)](
        *arguments,
        form.basis.signs(table.device),
        table,
        out,
        *out.stride()[:2],
        first,
        start,
        stop,
        D=dim,
        BITS=bits,
        MIX=form.basis.block,
        VALUE=form.operand == "value",
        HAS_NORM=bool(form.norm),
        WORDS=words_per_unit(dim, bits),
        GAIN=1 / math.sqrt(form.basis.block),
        STEPS=NORM_STEPS,
        num_warps=4,
    )
    return out

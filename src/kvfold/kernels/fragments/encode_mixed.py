"""Encoding on the GPU for blocks in two precisions (ZipCache): one launch finds the salient tokens of a block and stores
keys and values, with the bytes of :class:`kvfold.formats.MixedTokens`."""

import torch
import triton

from kvfold.arithmetic import lasting
from kvfold.formats import Fields, Format, MixedTokens, Paged
from kvfold.kernels.affine.encode import TOLERANCE
from kvfold.kernels.common.encode_source import ORDERS
from kvfold.kernels.common.step import or_any
from kvfold.kernels.fold.encode import _norm_table
from kvfold.kernels.fragments._encode_mixed import mixed_kernel

BLOCK = 128
"""Tokens of a block, which then is a page."""
MIXED = {"num_warps": 8}
FORM = (0, 0, 0, 0, 2, BLOCK, BLOCK)
"""Of values, as :mod:`kvfold.kernels.fold._encode` has it: no mean, norms of the largest."""


MOST_PROBES = 64


def why_not(key_format: Format, value_format: Format, probes: int, device: torch.device) -> str | None:
    """Why the GPU cannot encode these formats; None if it can. The kernel is run once on the device, and compared."""
    if device.type != "cuda":
        return f"device {device.type}: encoding kernels run on cuda"
    if why := unsupported(key_format, value_format, probes):
        return why
    assert isinstance(key_format, MixedTokens) and isinstance(value_format, Paged)
    return self_test(key_format, value_format, device) if torch.cuda.is_available() else None


@lasting(64)
def self_test(key_format: MixedTokens, value_format: Paged, device: torch.device) -> str | None:
    """Run the kernel once as it is compiled on this device; what went wrong, or None. Waits for the device."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32, device="cpu").to(device)

    dim, none = key_format.head_dim, torch.zeros(2, dtype=torch.int64, device=device)
    keys, values, probes = (
        random(1, 2, 2 * BLOCK, dim).half(),
        random(1, 2, 2 * BLOCK, dim).half(),
        random(1, 1, 2, 32, dim),
    )
    stored = key_format.allocate(1, 2, 2, device), value_format.allocate(1, 2, 2, device)
    encode(keys, values, stored[0], stored[1], key_format, value_format, 0, probes.half(), none)
    scores = keys.float().unflatten(2, (-1, BLOCK)) @ probes[:, 0].half().float().mT.unsqueeze(2)
    score = (scores / dim**0.5).softmax(-2).mean(-1).flatten(-2)
    wanted = key_format.encode(keys.float(), score), value_format.encode(values.float(), score=score)
    for form, fields, encoded in zip((key_format, value_format), stored, wanted, strict=True):
        want = form.decode(encoded)
        error = float((form.decode(fields) - want).norm() / want.norm())
        if not error <= TOLERANCE:
            return f"{form.operand}s encoded on this device differ from the format's by {error:.2g} (relative RMS)"
    return None


def unsupported(key_format: Format, value_format: Format, probes: int) -> str | None:
    """Why the kernel cannot encode these formats; None if it can."""
    inner = value_format.inner if isinstance(value_format, Paged) else None
    if not isinstance(key_format, MixedTokens) or not isinstance(inner, MixedTokens):
        return f"{key_format.kind} and {value_format.kind} storage"
    assert isinstance(value_format, Paged)
    statistics = (value_format.mean, value_format.norm, value_format.basis, value_format.page, value_format.seen)
    if (*statistics, value_format.block) != (False, "max", None, BLOCK, BLOCK, BLOCK):
        return f"values with other statistics than norms of largest magnitudes per block of {BLOCK} tokens"
    if (key_format.axis, inner.axis) != ("token", "channel") or key_format.salient != inner.salient:
        return "ranges along other axes than tokens of keys and channels of values"
    for name, value, allowed in (
        ("group", key_format.block, (BLOCK,)),
        ("head_dim", key_format.head_dim, (64, 128)),
        ("probes", probes, range(1, MOST_PROBES + 1)),
        ("bits of keys", key_format.bits_per_code, (1, 2, 4)),
        ("bits of values", inner.bits_per_code, (1, 2, 4)),
    ):
        if value not in allowed:
            return f"{name}={value}; allowed: {allowed[0]} to {allowed[-1]}"
    return None


def encode(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_fields: Fields,
    value_fields: Fields,
    key_format: Format,
    value_format: Format,
    first_block: int,
    probes: torch.Tensor,
    numbers: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks into packed storage.

    Parameters
    ----------
    keys, values : Tensor [batch, num_kv_heads, tokens, head_dim]
        fp16, bf16 or fp32.
    key_fields, value_fields : Fields
        Contiguous storage ``[sequences, num_kv_heads, blocks, ...]``, filled in place.
    first_block : int
        Where in it the first token goes.
    probes : Tensor, float16 [batch, states, num_kv_heads, probes, head_dim]
    numbers : Tensor, int64 [blocks]
        Which state each block takes.
    rows : Tensor or None, integer [batch]
        Which sequence of storage each sequence is; None: the same one.
    """
    if why := unsupported(key_format, value_format, probes.shape[-2]):
        raise ValueError(f"encode: {why}")
    assert isinstance(key_format, MixedTokens) and isinstance(value_format, Paged)
    inner = value_format.inner
    assert isinstance(inner, MixedTokens)
    batch, heads, tokens, dim = keys.shape
    if not batch or not tokens:
        return
    keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, values))
    stored = []
    for fields in (key_fields, value_fields):
        if not all(t.is_contiguous() for t in fields.values()):
            raise ValueError("fields: packed storage must be contiguous")
        stored += [fields["codes"], fields["low"], fields["which"].view(torch.int32), fields["meta"]]
    mixed_kernel[(tokens // BLOCK, heads, batch)](
        keys,
        *keys.stride()[:3],
        values,
        *values.stride()[:3],
        or_any(rows, numbers),
        probes.contiguous(),
        probes.shape[1],
        numbers,
        *stored,
        value_fields["norm"],
        _norm_table(keys.device),
        first_block,
        key_fields["codes"].shape[2],
        heads,
        FORM=FORM,
        B=BLOCK,
        D=dim,
        P=max(16, triton.next_power_of_2(probes.shape[-2])),
        PROBES=probes.shape[-2],
        ROOT=dim**0.5,
        SALIENT=key_format.salient,
        K_BITS=key_format.bits_per_code,
        K_EXTRA=key_format.extra_bits,
        V_BITS=inner.bits_per_code,
        V_EXTRA=inner.extra_bits,
        K_ORDER=ORDERS[key_format.operand],
        V_ORDER=ORDERS[inner.operand],
        PICKED=rows is not None,
        **MIXED,
        num_stages=1,
        enable_fp_fusion=False,
    )

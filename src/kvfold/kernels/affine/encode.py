"""Encoding into affine groups on the GPU: one pass over a block, from the model's keys and values to packed bytes.

Two launches share the code of a tile (32 tokens, or ``group`` tokens where groups run along them):

* :func:`encode_blocks` encodes many blocks of a prompt;
* :func:`append_and_close` is a decode step's share: it encodes the blocks that left the recent window and writes the
  step's tokens into the windows. Everything it decides, it decides from lengths on the device.

The bytes are those of :meth:`kvfold.formats.AffineGroups.encode` on a CPU: divisions are exact, rounding is to nearest even,
nothing is contracted into fused multiply-adds. Two exceptions: hybrid groups whose two errors are equal to within
float32's rounding may choose either mode, and SQuat's products round differently, which may flip a code now and then.

Order of a decode step, per layer::

    append_and_close(key, value, lengths, ...)  # closes what the step before left due, then writes the new tokens
    decode_attention(query, ...)                # reads lengths.sink, .packed, .recent: the new tokens lie in the windows

A block therefore closes one launch later than the host closes it, but attention of every step
reads the same: there, too, a step's tokens are packed after they were attended to. ``append_and_close(None, None, ...)``
closes what is due without new tokens, after which both hold the same content. In two launches, with the same content
after every step: ``append_and_close(..., close=False)``, attention, ``append_and_close(None, None, ...)``.
"""

import math
from dataclasses import dataclass, replace

import torch

from kvfold.arithmetic import lasting
from kvfold.formats import AffineGroups, Fields, Format
from kvfold.formats.packing import UNIT
from kvfold.kernels.common._encode_step import _step_kernel
from kvfold.kernels.common._encode_tile import _encode_kernel
from kvfold.kernels.common.step import Step, or_any
from kvfold.kernels.device import device_info
from kvfold.kernels.lengths import Lengths

MODES = {"asym": 0, "sym": 1, "hybrid": 2}
HEAD_DIMS = (64, 128, 256)
"""Tokens that one step may append."""


@dataclass(frozen=True)
class KeyTransform:
    """What happens to keys before they are encoded, in this order; all of it optional.

    Attributes
    ----------
    inv_freq : Tensor or None, float32 [rotary_dim / 2]
        Un-rotate keys (methods that store them before RoPE), together with ``first_position``.
    first_position : Tensor or None, integer [batch]
        Position of each sequence's first packed token.
    rope_factor : float
        Multiplies what was un-rotated: 1 over the model's scaling.
    mean, norm : Tensor or None, float32 [batch, num_kv_heads, head_dim]
        Subtracted; divided by.
    update : Tensor or None, float32 [batch, num_kv_heads, head_dim - g, head_dim - g]
        SQuat's update matrix for slices of g channels (:func:`kvfold.methods.squat.update_matrix`).
    numbers : Tensor or None, int64 [blocks]
        Blocks have updates of their own: ``update`` is ``[batch, states, num_kv_heads, ...]``, by the sequences of what is
        encoded, and this says which one each block takes.
    """

    inv_freq: torch.Tensor | None = None
    first_position: torch.Tensor | None = None
    rope_factor: float = 1.0
    mean: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    update: torch.Tensor | None = None
    numbers: torch.Tensor | None = None


def why_not(fmt: Format, device: torch.device, width: int | None = None) -> str | None:
    """Why the GPU cannot encode this format; None if it can.

    Parameters
    ----------
    fmt : Format
    device : torch.device
    width : int or None
        Channels of a slice of SQuat's update, if there is one.
    """
    if device.type != "cuda":
        return f"device {device.type}: encoding kernels run on cuda"
    why = unsupported(fmt, width)
    if why is None and width is not None and isinstance(fmt, AffineGroups):
        room = device_info(device).shared_memory
        if _tile(fmt) * fmt.head_dim * 4 > room:
            why = f"head_dim={fmt.head_dim}, group={fmt.group}: a tile does not fit in {room} bytes of shared memory"
    return why


def unsupported(fmt: Format, width: int | None = None) -> str | None:
    """Like :func:`why_not`, whatever the device."""
    if not isinstance(fmt, AffineGroups):
        return f"{fmt.kind} storage"
    if fmt.operand not in ("key", "value"):
        return f"operand={fmt.operand}; allowed: key, value"
    if fmt.head_dim not in HEAD_DIMS:
        return f"head_dim={fmt.head_dim}; allowed: {', '.join(map(str, HEAD_DIMS))}"
    groups = (32, 64, 128) if fmt.mode == "asym" else (32,)
    if fmt.group not in groups:
        return f"group={fmt.group} in mode {fmt.mode}; allowed: {', '.join(map(str, groups))}"
    if width is not None:
        if fmt.axis != "token" or fmt.mode != "asym":
            return f"axis={fmt.axis}, mode={fmt.mode} with an update; allowed: axis=token, mode=asym"
        if width < 16 or width & (width - 1):
            return f"channels={width}: allowed are powers of two from 16"
        if fmt.group * fmt.head_dim > 128 * 128:
            return f"group={fmt.group} with an update of {fmt.head_dim} channels: a tile does not fit into registers"
    return None


# ---- launches --------------------------------------------------------------------------------------------------------


def _tile(fmt: AffineGroups) -> int:
    """Tokens that are encoded together."""
    return fmt.group if fmt.axis == "token" else UNIT


def _warps(*formats: AffineGroups, cut: bool = False) -> int:
    """Warps of a program: a thread has 128 elements of a tile; ``cut``: 32, because it holds all of them at once."""
    return max(1, max(_tile(f) * f.head_dim for f in formats) // (1024 if cut else 4096))


def _stored(fmt: AffineGroups, fields: Fields) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, metadata and sign words as the kernels address them: codes and sign words as int32."""
    names = ("meta",) if fmt.mode == "asym" else ("scale", "aux")
    for name in ("codes", *names):
        if not fields[name].is_contiguous():
            raise ValueError(f"{name}: packed storage must be contiguous, its strides are {fields[name].stride()}")
    codes = fields["codes"].view(torch.int32)
    return codes, fields[names[0]], codes if fmt.mode == "asym" else fields["aux"].view(torch.int32)


def _check(fmt: Format, update: torch.Tensor | None) -> AffineGroups:
    why = unsupported(fmt, None if update is None else fmt.head_dim - update.shape[-1])
    if why:
        raise ValueError(f"encode: {why}")
    assert isinstance(fmt, AffineGroups)
    return fmt


def _constants(fmt: AffineGroups, mode: str | None = None) -> tuple[int, int, int, int, int]:
    """Tokens of a tile, group, axis, mode, bits."""
    chosen = MODES["sym" if mode == "sym" and fmt.mode == "hybrid" else fmt.mode]
    return _tile(fmt), fmt.group, int(fmt.axis == "channel"), chosen, fmt.bits_per_code


def encode_blocks(
    x: torch.Tensor,
    fields: Fields,
    fmt: Format,
    block_offset: int,
    transform: KeyTransform | None = None,
    mode: str | None = None,
    rows: torch.Tensor | None = None,
    first_block: int = 0,
    ring_blocks: int | None = None,
) -> None:
    """Encode whole blocks into packed storage, in one pass and without a float32 copy.

    Parameters
    ----------
    x : Tensor [batch, num_kv_heads, tokens, head_dim]
        fp16, bf16 or fp32 of any strides; ``tokens`` is a multiple of the format's block. With ``ring_blocks``: a ring
        ``[sequences, num_kv_heads, slots, head_dim]``, token t of a sequence in slot ``t % slots``.
    fields : Fields
        Contiguous storage ``[sequences, num_kv_heads, blocks, ...]``, filled in place.
    fmt : Format
        An :class:`AffineGroups` that :func:`why_not` has nothing against.
    block_offset : int
        Where in ``fields`` the first block goes.
    transform : KeyTransform or None
        Its tensors are indexed like ``fields``, by sequence.
    mode : {"sym", None}
        "sym": a hybrid format takes symmetric groups throughout.
    rows : Tensor or None, integer [batch]
        Which sequence of ``fields`` each sequence of ``x`` is; None: the same one.
    first_block : int
        Index of the first block of ``fields`` within the sequence; matters for rings and for un-rotating keys.
    ring_blocks : int or None
        ``x`` is a ring, of which this many blocks are encoded, from token ``(first_block + block_offset) * block`` on.
    """
    how = transform or KeyTransform()
    form = _check(fmt, how.update)
    batch, heads, slots, dim = x.shape
    tokens = slots if ring_blocks is None else ring_blocks * form.block
    if ring_blocks is not None and rows is not None:
        batch = rows.numel()
    blocks = fields["codes"].shape[2]
    if tokens > slots:
        raise ValueError(f"ring_blocks={ring_blocks}: {tokens} tokens do not fit in {slots} slots")
    if tokens % form.block or dim != form.head_dim:
        raise ValueError(f"x: shape {tuple(x.shape)} is not whole blocks of {form.block} tokens by {form.head_dim}")
    if fields["codes"].shape[1] != heads or (rows is None and fields["codes"].shape[0] != batch):
        raise ValueError(f"fields: hold {tuple(fields['codes'].shape[:2])} sequences and heads, x {(batch, heads)}")
    if not 0 <= block_offset <= blocks - tokens // form.block:
        raise ValueError(f"block_offset={block_offset}: {tokens // form.block} blocks do not fit in {blocks}")
    if how.numbers is not None:
        if how.update is None or how.update.dim() != 5 or how.update.shape[0] != batch:
            raise ValueError(
                "numbers: say which update a block takes; there must be some, of each sequence that is encoded"
            )
        if how.numbers.numel() != tokens // form.block:
            raise ValueError(f"numbers: {how.numbers.numel()} of them for {tokens // form.block} blocks")
    if not tokens or not batch:
        return
    per_block = form.block // _tile(form)
    codes, meta, aux = _stored(form, fields)
    tile, group, axis, chosen, bits = _constants(form, mode)
    warps = _warps(form, cut=how.update is not None or how.inv_freq is not None)
    _encode_kernel[(tokens // tile, heads, batch)](
        x,
        *x.stride(),
        or_any(rows, codes),
        codes,
        meta,
        aux,
        block_offset * per_block,
        blocks * per_block,
        heads,
        or_any(how.mean, meta),
        or_any(how.norm, meta),
        or_any(None if how.norm is None else how.norm.reciprocal(), meta),
        or_any(how.update, meta),
        or_any(how.inv_freq, meta),
        or_any(how.first_position, codes),
        (first_block + block_offset) * form.block,
        0 if how.inv_freq is None else how.inv_freq.numel(),
        how.rope_factor,
        slots,
        or_any(how.numbers, codes),
        1 if how.numbers is None or how.update is None else how.update.shape[1],
        per_block,
        T=tile,
        D=dim,
        G=group,
        AXIS=axis,
        MODE=chosen,
        BITS=bits,
        VALUE=form.operand == "value",
        ROWS=rows is not None,
        RING=ring_blocks is not None,
        MEAN=how.mean is not None,
        NORM=how.norm is not None,
        ROPE=how.inv_freq is not None,
        WIDTH=0 if how.update is None else dim - how.update.shape[-1],
        NUMBERS=how.numbers is not None,
        WARPS=warps,
        num_warps=warps,
        num_stages=1,  # nothing to prefetch: a loop over due blocks runs once, if at all
        enable_fp_fusion=False,
    )


def append_and_close(
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    lengths: Lengths,
    sink: tuple[torch.Tensor, torch.Tensor],
    ring: tuple[torch.Tensor, torch.Tensor],
    recent: int,
    key_fields: Fields,
    key_format: Format,
    value_fields: Fields,
    value_format: Format,
    transform: KeyTransform | None = None,
    boundary: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    close: bool = True,
    first_block: int = 0,
) -> None:
    """Close the blocks that are due, write a step's tokens into the windows, advance the lengths: one launch.

    No value is read on the host: fit for capture in a CUDA graph. Sequences may have different lengths. The state of
    every sequence (mean, norms, update) must be fixed already.

    Parameters
    ----------
    key, value : Tensor or None [batch, num_kv_heads, tokens, head_dim]
        The step's 1 to 16 tokens, after RoPE, any strides; None: close only.
    lengths : Lengths
        Before the step.
    sink : pair of Tensor [batch, num_kv_heads, sink, head_dim]
        Contiguous; token t lies in slot t.
    ring : pair of Tensor [batch, num_kv_heads, slots, head_dim]
        Contiguous; token t, counted from the end of the sink, lies in slot ``t % slots``. At least ``recent + block - 1 +
        tokens`` slots.
    recent : int
        A block is closed once ``recent`` tokens newer than it exist.
    key_fields, value_fields : Fields
        Contiguous ``[batch, num_kv_heads, blocks, ...]`` with room for what the sequences grow to; blocks beyond it are
        not closed.
    key_format, value_format : Format
    transform : KeyTransform or None
        Of the keys.
    boundary : Tensor or None, integer [batch]
        Blocks that end after this many packed tokens take symmetric groups (hybrid formats only); None: no limit.
    counts : Tensor or None, integer [batch]
        How many of the step's tokens, from the first, each sequence takes; None: all.
    close : bool
        False: only append.
    first_block : int
        Index of the first block of the fields within the sequences.
    """
    how, step = transform or KeyTransform(), Step(key, value, lengths, sink, ring, recent)
    k_form, v_form = _check(key_format, how.update), _check(value_format, None)
    step.check((k_form.block, v_form.block), (k_form.head_dim, v_form.head_dim))
    k_stored, v_stored = _stored(k_form, key_fields), _stored(v_form, value_fields)
    k_codes = k_stored[0]
    step.check_stored(k_codes.shape[:3], v_stored[0].shape[:3])
    kt, kg, k_axis, k_mode, k_bits = _constants(k_form)
    vt, vg, v_axis, v_mode, v_bits = _constants(v_form)
    warps = _warps(k_form, v_form, cut=how.update is not None or how.inv_freq is not None)
    batch, heads, _, dim = ring[0].shape
    _step_kernel[(2 * heads, batch)](
        *step.new_and_windows(),
        *k_stored,
        *v_stored,
        or_any(how.mean, k_stored[1]),
        or_any(how.norm, k_stored[1]),
        or_any(how.update, k_stored[1]),
        or_any(how.inv_freq, k_stored[1]),
        or_any(how.first_position, k_codes),
        0 if how.inv_freq is None else how.inv_freq.numel(),
        how.rope_factor,
        or_any(boundary, k_codes),
        or_any(counts, k_codes),
        *step.lengths_and_sizes(),
        first_block,
        k_codes.shape[2],
        CLOSE=close,
        COUNTS=counts is not None,
        KT=kt,
        KG=kg,
        K_AXIS=k_axis,
        K_MODE=k_mode,
        K_BITS=k_bits,
        VT=vt,
        VG=vg,
        V_AXIS=v_axis,
        V_MODE=v_mode,
        V_BITS=v_bits,
        MEAN=how.mean is not None,
        NORM=how.norm is not None,
        ROPE=how.inv_freq is not None,
        WIDTH=0 if how.update is None else dim - how.update.shape[-1],
        BOUNDARY=boundary is not None,
        WARPS=warps,
        num_warps=warps,
        num_stages=1,  # nothing to prefetch: a loop over due blocks runs once, if at all
        enable_fp_fusion=False,
        **step.constants(k_form.block),
    )


TOLERANCE = 0.02
"""Of :func:`self_test`, relative RMS: some rounding ties may differ, a misplaced code in a hundred may not."""


@lasting(256)
def self_test(
    key_format: AffineGroups, value_format: AffineGroups, width: int | None, device: torch.device
) -> str | None:
    """Run the kernels once as they are compiled on this device, and compare with the formats' own encoding.

    Compilers err, and wrong bytes would be silent: an earlier version of these kernels, right in the interpreter, was
    compiled to something else for some shapes.

    Parameters
    ----------
    key_format, value_format : AffineGroups
        That :func:`why_not` has nothing against.
    width : int or None
        Channels of a slice of SQuat's update, if there is one.

    Returns
    -------
    str or None
        What went wrong; None if nothing did. Waits for the device, once per process and formats.
    """
    draw = torch.Generator().manual_seed(0)
    heads, block, dim = 2, key_format.block, key_format.head_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(1, heads, *shape, generator=draw, dtype=torch.float32, device="cpu").to(device)

    keys, values = random(2 * block, dim).half(), random(2 * block, dim).half()
    mean, norm = random(dim), random(dim).abs() + 0.5
    # an update of zeros goes the whole way of SQuat and changes nothing
    update, of_blocks = None, KeyTransform()
    if width is not None:
        update = torch.zeros(1, heads, dim - width, dim - width, dtype=torch.float32, device=device)
        numbers = torch.arange(2, device=device)
        of_blocks = KeyTransform(update=torch.stack((update, update), 1), numbers=numbers)
    shifted = (keys.float() - mean.unsqueeze(-2)) / norm.unsqueeze(-2)
    for form, x, how, expected in (
        (key_format, keys, of_blocks, keys.float()),
        (key_format, keys, replace(of_blocks, mean=mean, norm=norm), shifted),
        (value_format, values, None, values.float()),
    ):
        fields = form.allocate(1, heads, 2, device)
        encode_blocks(x, fields, form, 0, how)
        if (error := _difference(form, fields, expected)) > TOLERANCE:
            return f"{form.operand}s encoded on this device differ from the format's by {error:.2g} (relative RMS)"
    stored = [form.allocate(1, heads, 1, device) for form in (key_format, value_format)]
    nothing = keys[:, :, :0].contiguous()
    lengths = Lengths.of([block], [0], 0, device)
    append_and_close(
        None, None, lengths, (nothing, nothing), (keys, values), 0, stored[0], key_format, stored[1], value_format,
        KeyTransform(update=update),
    )  # fmt: skip
    for form, fields, x in ((key_format, stored[0], keys), (value_format, stored[1], values)):
        if (error := _difference(form, fields, x[:, :, :block].float())) > TOLERANCE:
            return f"{form.operand}s closed on this device differ from the format's by {error:.2g} (relative RMS)"
    return None


def _difference(fmt: Format, fields: Fields, x: torch.Tensor) -> float:
    """Relative RMS between what is stored and what the format itself would store; infinite where that is not finite."""
    expected = fmt.decode(fmt.encode(x))
    error = float((fmt.decode(fields) - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    return error if math.isfinite(error) else math.inf

"""Encoding on the GPU for formats with statistics per page: what :mod:`kvfold.kernels.affine.encode` is for affine groups
alone.

Each side, keys or values, is uniform levels, affine groups or codes of a table of vectors, with or without a page's mean and
norms; uniform levels and codes may have a Hadamard basis. Levels of a table come with a rotation, signs with a sketch
(TurboQuant, QJL). Two doors:

* :func:`encode_pages` encodes a call's blocks: one small launch for the statistics of pages that begin, one for the blocks.
  Tokens that were waiting in the ring and tokens of the call are read where they lie.
* :func:`append_and_close` is a decode step's share, keys and values in one launch: it closes the blocks that are due, with the
  statistics of their page, which are made when the page's first block is closed, and writes the new tokens to the windows.
  Everything it decides, it decides from lengths on the device.

Both leave the same bytes. Compared with :meth:`kvfold.formats.Paged.encode` on a CPU, sums have another order: a mean may
differ by its last bit, a norm's code by one, a scale by its last bit, and a code where it was nearly a tie.
"""

from dataclasses import dataclass

import torch
import triton

from kvfold.arithmetic import lasting
from kvfold.formats import (
    AffineGroups,
    Fields,
    Format,
    Hadamard,
    Lookup,
    Paged,
    ResidualCodes,
    Rotation,
    SignSketch,
    Sketch,
    UniformTokens,
)
from kvfold.formats.basis import Basis
from kvfold.formats.packing import UNIT
from kvfold.formats.paged import norms
from kvfold.formats.residual import Codebook
from kvfold.kernels.affine.encode import MODES, TOLERANCE, _difference, _tile
from kvfold.kernels.affine.encode import _warps as affine_warps
from kvfold.kernels.affine.encode import unsupported as affine_unsupported
from kvfold.kernels.common._encode_nearest import SLOTS
from kvfold.kernels.common.encode_source import misfit
from kvfold.kernels.common.step import Step, or_any
from kvfold.kernels.device import device_info
from kvfold.kernels.fold._encode import _blocks_kernel, _statistics_kernel, _step_kernel
from kvfold.kernels.lengths import Lengths

BASES = {UniformTokens: Hadamard, ResidualCodes: Hadamard, Lookup: Rotation, SignSketch: Sketch}
"""Maps that the kernels know before what they store."""
ORDERS = {"key": 0, "value": 1, "plain": 2}
MAX_ROWS = 512
"""Of a sketch."""
FITS = {"least": 0, "size": 1, "unbiased": 2, "rms": 3}
NORMS = {"": 0, "rms": 1, "max": 2}


def why_not(fmt: Format, device: torch.device) -> str | None:
    """Why the GPU cannot encode this format; None if it can."""
    if device.type != "cuda":
        return f"device {device.type}: encoding kernels run on cuda"
    return unsupported(fmt)


def unsupported(fmt: Format) -> str | None:
    """Like :func:`why_not`, whatever the device."""
    inner = fmt
    if isinstance(fmt, Paged):
        inner = fmt.inner
        if not fmt.page:
            return "statistics of a whole sequence beside those of pages"
        if fmt.page % UNIT or fmt.page % fmt.block:
            return f"page={fmt.page}: must be a multiple of {UNIT} tokens and of the block's {fmt.block}"
        if fmt.basis is not None and not isinstance(fmt.basis, BASES.get(type(inner), ())):
            return (
                f"basis {type(fmt.basis).__name__.lower()} before {inner.kind} storage; allowed: hadamard before uniform, "
                "hadamard before residual codes, rotation before lookup, sketch before sign sketch"
            )
    if isinstance(inner, AffineGroups):
        return affine_unsupported(inner)
    if not isinstance(inner, UniformTokens | ResidualCodes | Lookup | SignSketch):
        return f"{inner.kind} storage"
    if not isinstance(inner, UniformTokens | ResidualCodes) and (fmt is inner or getattr(fmt, "basis", None) is None):
        return f"{inner.kind} storage without a basis"
    if isinstance(inner, Lookup) and (inner.scaling != "rms" or inner.bits_per_code > 4):
        return (
            f"{inner.bits_per_code}-bit levels scaled by {inner.scaling}; allowed: up to 4 bits, by the rms of a token"
        )
    if isinstance(inner, SignSketch) and (len(inner.sketches) != 1 or inner.sketches[0] > MAX_ROWS):
        return f"sketches of {'+'.join(map(str, inner.sketches))} rows; allowed: one of up to {MAX_ROWS}"
    if inner.head_dim > 256:
        return f"head_dim={inner.head_dim}; allowed: up to 256"
    return _no_vectors(inner) if isinstance(inner, ResidualCodes) else None


def _no_vectors(fmt: ResidualCodes) -> str | None:
    if fmt.head_dim % 16 or fmt.block % UNIT:
        return f"head_dim={fmt.head_dim}, block={fmt.block}; allowed: multiples of 16 channels and of {UNIT} tokens"
    dtype = torch.float16 if fmt.book is None else fmt.book.codes.dtype
    return misfit(
        ("vector", fmt.vector, (4, 8)),
        ("codes", fmt.codes, (16, 32, 64, 128, 256)),
        ("stages", fmt.stages, (1,)),
        ("strided", fmt.strided, (False,)),
        ("codes of", str(dtype).removeprefix("torch."), ("float16",)),
    )


Inner = UniformTokens | AffineGroups | ResidualCodes | Lookup | SignSketch


@dataclass(frozen=True)
class Side:
    """Keys or values, as the kernels know them.

    Attributes
    ----------
    inner : UniformTokens, AffineGroups, ResidualCodes, Lookup or SignSketch
    form : tuple of int
        Constants of :mod:`kvfold.kernels.fold._encode`.
    basis : Basis or None
    per_page : tuple of str
        Names of what pages store.
    warps : int
        Of a program.
    """

    inner: Inner
    form: tuple[int, ...]
    basis: Basis | None
    per_page: tuple[str, ...]
    warps: int

    @property
    def codes(self) -> str:
        """Name of the field that holds codes."""
        return "signs" if isinstance(self.inner, SignSketch) else "codes"

    @property
    def tile(self) -> int:
        """Tokens that are encoded together."""
        return self.form[1]

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.form[5]


@lasting(256)
def side(fmt: Format, mode: str | None = None) -> Side:
    """What the kernels need to know of a format.

    Raises
    ------
    ValueError
        If :func:`unsupported` has something against it.
    """
    if why := unsupported(fmt):
        raise ValueError(f"encode: {why}")
    paged = fmt if isinstance(fmt, Paged) else None
    inner = fmt if paged is None else paged.inner
    assert isinstance(inner, Inner)
    basis = None if paged is None else paged.basis
    names = () if paged is None else tuple(paged.page_fields())
    statistics = (0, 0, inner.block, inner.block)
    if paged is not None:
        statistics = (int(paged.mean), NORMS[paged.norm], paged.page, paged.seen)
    if isinstance(inner, Lookup | SignSketch):
        bits, width = (1, inner.width) if isinstance(inner, SignSketch) else (inner.bits_per_code, inner.head_dim)
        form = (2 + isinstance(inner, SignSketch), UNIT, bits, *statistics, width, 0, ORDERS[inner.operand])
        return Side(inner, form, basis, names, max(1, triton.next_power_of_2(width) // 16))
    if isinstance(inner, UniformTokens | ResidualCodes):
        turned = basis.block if isinstance(basis, Hadamard) else 0
        if isinstance(inner, UniformTokens):
            form = (1, UNIT, inner.bits_per_code, *statistics, FITS[inner.fit], turned, ORDERS[inner.operand])
        else:
            form = (4, UNIT, inner.vector, *statistics, FITS[inner.fit], turned, inner.codes)
        # 16 elements a thread: with more of them the compiler lays channels out so that sums need seven times the shuffles
        return Side(inner, form, basis, names, max(1, triton.next_power_of_2(inner.head_dim) // 16))
    chosen = MODES["sym" if mode == "sym" and inner.mode == "hybrid" else inner.mode]
    groups = (inner.group, int(inner.axis == "channel"), chosen)
    warps = max(affine_warps(inner), 2 if names else 1)
    return Side(inner, (0, _tile(inner), inner.bits_per_code, *statistics, *groups), basis, names, warps)


def most_registers(*sides: Side) -> int | None:
    """Of a thread of a decode step's kernel; None: as many as the compiler takes.

    Where a side searches for codes it takes up to 190, and a multiprocessor has room for one program of eight warps, though a
    step seldom closes a block. With 128 it has room for two.
    """
    searches = any(isinstance(of.inner, ResidualCodes) for of in sides)
    return 128 if searches and max(of.warps for of in sides) > 4 else None


@lasting(16)
def _norm_table(device: torch.device) -> torch.Tensor:
    """Norms of their codes, as a CPU computes them, and their reciprocals: float32 [512]."""
    table = norms(torch.arange(256, device="cpu"))
    return torch.cat([table, table.reciprocal()]).to(device)


def _stored(of: Side, fields: Fields) -> tuple[torch.Tensor, ...]:
    """:func:`addressed`, of contiguous storage."""
    for name, t in fields.items():
        if not t.is_contiguous():
            raise ValueError(f"{name}: packed storage must be contiguous, its strides are {t.stride()}")
    return addressed(of, fields)


def addressed(of: Side, fields: Fields) -> tuple[torch.Tensor, ...]:
    """Codes, metadata, sign words, means and codes of norms as the kernels address them; what is not there stands for itself
    in another tensor, and is never read."""
    codes = fields[of.codes]
    if isinstance(of.inner, SignSketch | ResidualCodes):
        words, meta, aux = codes, fields["rms"], codes
    elif not isinstance(of.inner, AffineGroups):
        words, meta, aux = codes, fields["scale"], codes
    else:
        names = ("meta",) if of.inner.mode == "asym" else ("scale", "aux")
        words, meta = codes.view(torch.int32), fields[names[0]]
        aux = words if of.inner.mode == "asym" else fields["aux"].view(torch.int32)
    return words, meta, aux, fields.get("mean", meta), fields.get("norm", codes.view(torch.uint8))


def _pages(of: Side, fields: Fields) -> int:
    """Pages that storage has room for."""
    return fields[of.per_page[0]].shape[2] if of.per_page else 0


def constants(fmt: Format, other: torch.Tensor) -> torch.Tensor:
    """What kernels read beside tokens and statistics, on the device of ``other``: signs of a Hadamard rotation, or what
    :func:`_tables` or :func:`_codes` makes; ``other`` where that is nothing."""
    basis, inner = (fmt.basis, fmt.inner) if isinstance(fmt, Paged) else (None, fmt)
    if isinstance(inner, ResidualCodes):  # of this format: formats are equal whatever their codebooks are
        assert inner.book is not None
        return _codes(basis, inner.book, other.device)
    if basis is None:
        return other
    if isinstance(basis, Hadamard):
        return basis.signs(other.device)
    return _tables(basis, inner.levels if isinstance(inner, Lookup) else (), other.device)


@lasting(64)
def _codes(basis: Basis | None, book: Codebook, device: torch.device) -> torch.Tensor:
    """Signs of a Hadamard rotation, if there is one, then what :func:`kvfold.kernels.common._encode_nearest._nearest` reads of
    a codebook: float32, one after the other."""
    (codes,) = book.on(device).codes.float()
    table = codes.new_zeros(len(codes), SLOTS.value)
    table[:, : 2 * codes.shape[1]] = -codes.repeat(1, 2)
    parts = table.flatten(), codes.square().sum(-1) / 2
    return torch.cat((basis.signs(device), *parts) if isinstance(basis, Hadamard) else parts)


@lasting(64)
def _tables(basis: Basis, levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """A dense basis, [head_dim, width], and the borders between levels: float32, one after the other."""
    (matrix,) = basis.tables(device).values()
    between = torch.tensor(levels, dtype=torch.float32, device=device)
    return torch.cat((matrix.T.reshape(-1), (between[1:] + between[:-1]) / 2))


def encode_pages(
    new: torch.Tensor,
    fields: Fields,
    fmt: Format,
    start: int,
    stop: int,
    first_block: int = 0,
    ring: torch.Tensor | None = None,
    old: int = 0,
    mode: str | None = None,
    rows: torch.Tensor | None = None,
) -> None:
    """Encode whole blocks of tokens into packed storage, and the statistics of pages that begin among them.

    Tokens are counted from the end of the sink. Pages that began before ``start`` have their statistics in ``fields``; of those
    that begin here, as many tokens must be there as their statistics are taken of.

    Parameters
    ----------
    new : Tensor [batch, num_kv_heads, tokens, head_dim]
        Tokens from ``old`` on; fp16, bf16 or fp32 of any strides (a copy is made where channels do not lie side by side).
    fields : Fields
        Contiguous storage ``[sequences, num_kv_heads, blocks or pages, ...]``, filled in place.
    fmt : Format
        That :func:`why_not` has nothing against.
    start, stop : int
        Tokens to encode, multiples of the format's block.
    first_block : int
        Index of the first block of ``fields``; begins a page.
    ring : Tensor or None [sequences, num_kv_heads, slots, head_dim], contiguous
        Tokens before ``old``, of ``new``'s dtype: token t lies in slot ``t % slots``. None: ``start`` is not before ``old``.
    old : int
    mode : {"sym", None}
        "sym": a hybrid format takes symmetric groups throughout.
    rows : Tensor or None, integer [batch]
        Which sequence of ``fields`` and ``ring`` each sequence of ``new`` is; None: the same one.
    """
    of = side(fmt, mode)
    batch, heads, tokens, dim = new.shape
    block, blocks = of.inner.block, fields[of.codes].shape[2]
    if start % block or stop % block or dim != of.inner.head_dim:
        raise ValueError(f"tokens {start} to {stop}, {dim} channels: allowed: blocks of {block} by {of.inner.head_dim}")
    if fields[of.codes].shape[1] != heads or (rows is None and fields[of.codes].shape[0] != batch):
        raise ValueError(f"fields: hold {tuple(fields[of.codes].shape[:2])} sequences and heads, new {(batch, heads)}")
    if not first_block * block <= start <= stop <= (first_block + blocks) * block:
        raise ValueError(
            f"tokens {start} to {stop}: storage has those from {first_block * block} to {(first_block + blocks) * block}"
        )
    begun = -(-start // of.page)  # the first page that begins here
    pages = max(-(-stop // of.page) - begun, 0) if of.per_page else 0
    seen = (begun + pages - 1) * of.page + of.form[6] if pages else 0
    if (start < old and ring is None) or max(stop, seen) > old + tokens:
        raise ValueError(
            f"tokens {start} to {max(stop, seen)} are read: those from {old} to {old + tokens} are given, "
            f"and {'no' if ring is None else 'a'} ring"
        )
    if ring is not None and (not ring.is_contiguous() or ring.dtype != new.dtype or old - start > ring.shape[2]):
        raise ValueError(f"ring: {ring.dtype} of strides {ring.stride()}, {ring.shape[2]} slots; new: {new.dtype}")
    if start == stop or not batch:
        return
    if new.stride(-1) != 1:
        new = new.contiguous()
    waiting = new if ring is None or not ring.numel() else ring
    source = (waiting, waiting.stride(0), waiting.stride(1), new, *new.stride()[:3])
    codes, meta, aux, mean, norm = _stored(of, fields)
    slots, picked = max(waiting.shape[2], 1), rows is not None
    rows = or_any(rows, codes)
    if pages:
        _statistics_kernel[(pages, heads, batch)](
            *source,
            rows,
            mean,
            norm,
            begun - first_block * block // of.page,
            _pages(of, fields),
            heads,
            begun * of.page,
            slots,
            old,
            D=dim,
            FORM=of.form,
            PICKED=picked,
            num_warps=4,
            num_stages=1,
            enable_fp_fusion=False,
        )
    per_block = block // of.tile
    _blocks_kernel[((stop - start) // of.tile, heads, batch)](
        *source,
        rows,
        codes,
        meta,
        aux,
        mean,
        norm,
        _norm_table(new.device),
        constants(fmt, meta),
        (start // block - first_block) * per_block,
        blocks * per_block,
        _pages(of, fields),
        heads,
        start,
        slots,
        old,
        D=dim,
        FORM=of.form,
        VALUE=of.inner.operand == "value",
        PICKED=picked,
        WARPS=of.warps,
        num_warps=of.warps,
        num_stages=1,
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
    boundary: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    close: bool = True,
    first_block: int = 0,
    each: int = 1,
) -> None:
    """Close the blocks that are due, write a step's tokens into the windows, advance the lengths: one launch.

    As :func:`kvfold.kernels.affine.encode.append_and_close`, whose parameters these are; formats may be all that
    :func:`why_not` has nothing against. Fields hold those of pages too, and ``first_block`` begins a page. ``each``: heads
    that a program closes, one after the other (:func:`heads_together`); more than one where there are no new tokens.
    """
    k, v = side(key_format), side(value_format)
    step, block = Step(key, value, lengths, sink, ring, recent), k.inner.block
    batch, heads = ring[0].shape[:2]
    step.check((block, v.inner.block), (k.inner.head_dim, v.inner.head_dim))
    if each < 1 or heads % each or (each > 1 and step.tokens):
        raise ValueError(f"each={each}: a program closes 1 of {heads} heads, or a divisor of them where nothing is new")
    seen = max((of.form[6] for of in (k, v) if of.per_page), default=0)
    if seen > recent + block:
        raise ValueError(f"seen={seen}: when a block is closed there are {recent + block} tokens of its page")
    k_stored, v_stored = _stored(k, key_fields), _stored(v, value_fields)
    shape = key_fields[k.codes].shape[:3]
    step.check_stored(shape, value_fields[v.codes].shape[:3])
    warps, any_int = max(k.warps, v.warps), lengths.sink
    _step_kernel[(2 * heads // each, batch)](
        *step.new_and_windows(),
        *k_stored,
        constants(key_format, k_stored[1]),
        *v_stored,
        constants(value_format, v_stored[1]),
        _norm_table(ring[0].device),
        or_any(boundary, any_int),
        or_any(counts, any_int),
        *step.lengths_and_sizes(),
        first_block,
        shape[2],
        _pages(k, key_fields),
        _pages(v, value_fields),
        CLOSE=close,
        COUNTS=counts is not None,
        KEY=k.form,
        VALUE=v.form,
        BOUNDARY=boundary is not None,
        WARPS=warps,
        EACH=each,
        num_warps=warps,
        maxnreg=most_registers(k, v),
        num_stages=1,
        enable_fp_fusion=False,
        **step.constants(block),
    )


def heads_together(batch: int, heads: int, device: torch.device) -> int:
    """How many heads a program of a decode step closes, so that many sequences leave four programs for each multiprocessor.

    A step seldom closes a block, and programs that can do so fill a multiprocessor by twos: with 1,120 sequences of 32 heads,
    271 times. Writing the new tokens is left to a small kernel then.
    """
    programs, least = 2 * heads * batch, 4 * device_info(device).sms
    if programs < 4 * least:
        return 1
    return max(n for n in range(1, heads + 1) if heads % n == 0 and programs // n >= least)


@lasting(256)
def self_test(key_format: Format | None, value_format: Format | None, device: torch.device) -> str | None:
    """Run the kernels once as they are compiled on this device, and compare with the formats' own encoding.

    Parameters
    ----------
    key_format, value_format : Format or None
        None: others encode this side, and blocks are not closed by lengths on the device.

    Returns
    -------
    str or None
        What went wrong; None if nothing did. Waits for the device, once per process and formats.
    """
    draw = torch.Generator().manual_seed(0)
    forms = [form for form in (key_format, value_format) if form is not None]
    block, dim = side(forms[0]).inner.block, side(forms[0]).inner.head_dim
    count = max(side(form).page for form in forms)
    x = [torch.randn(1, 2, 2 * count, dim, generator=draw, dtype=torch.float32, device="cpu") for _ in forms]
    x = [(t * torch.exp(t[:, :, :1]) + 3 * t[:, :, 1:2]).half().to(device) for t in x]
    prompt, closed = ([f.allocate(1, 2, 2 * count // block, device) for f in forms] for _ in "pc")
    for form, side_x, fields in zip(forms, x, prompt, strict=True):
        encode_pages(side_x, fields, form, 0, 2 * count)
    cases = [(prompt, 2 * count, "encoded")]
    if key_format is not None and value_format is not None:
        empty = (x[0][:, :, :0].contiguous(), x[1][:, :, :0].contiguous())
        lengths = Lengths.of([2 * count], [0], 0, device)
        append_and_close(
            None, None, lengths, empty, (x[0], x[1]), count - block, closed[0], key_format, closed[1], value_format
        )  # fmt: skip
        cases.append((closed, count, "closed"))
    for number, (form, side_x) in enumerate(zip(forms, x, strict=True)):
        for stored, tokens, what in cases:
            fields = stored[number]
            some = form.take({n: t.cpu() for n, t in fields.items()}, tokens // block)
            if (error := _difference(form, some, side_x[:, :, :tokens].float().cpu())) > TOLERANCE:
                return f"{form.operand}s {what} on this device differ from the format's by {error:.2g} (relative RMS)"
    return None

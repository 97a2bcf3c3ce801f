"""Packing b-bit codes so that a packed word already is a tensor-core operand.

Codes of one *unit*, 32 tokens by d channels, are cut into 16 x 16 tiles. A stored 16-bit word carries one field of each
of 16/b tiles, so masking field f of a warp's words yields the A operand of tile f of ``mma.m16n8k16`` with no shuffle.

Order of the tiles: channel tile major, then the two token tiles. The codes of all tiles, one tile after the other, form
one stream of 32 d codes; with W = 32 d b / 16 words in a unit, field f of word w holds the code at f W + w of the
stream. For d = 128, b = 2 that is: field f is channel tile f, word array 0 or 1 (256 words each) is the token tile.

Order inside a tile: that of the A fragment, ``[g: 8][t: 4][col_half: 2][row_half: 2][pair: 2]`` with
row = row_half * 8 + g and col = col_half * 8 + t * 2 + pair; a lane (g, t) finds its eight codes in 16 adjacent bytes.
Keys have tokens as rows (the product is K q^T); values have channels as rows (the product is V^T p^T).

Three bits are stored as a 2-bit plane followed by a 1-bit plane.

On a CPU there are no fragments: there operand "plain" leaves the stream in the order of tokens and channels, and its words
are bytes: with B bytes in a unit, field f of byte i holds the code at f B + i. So one shift and one mask of adjacent bytes
give adjacent codes, in vectors of any length.
"""

import torch
import torch.nn.functional as F

from kvfold.arithmetic import lasting

UNIT = 32
"""Tokens in a packed unit."""

PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Bits of a code -> bits of the planes that store it, least significant first."""


def words_per_unit(head_dim: int, bits: int) -> int:
    """Number of int16 words that the codes of 32 tokens of one KV head take."""
    return UNIT * head_dim * bits // 16


def to_stream(x: torch.Tensor, operand: str) -> torch.Tensor:
    """Bring units into the order of the stream.

    Parameters
    ----------
    x : Tensor [..., 32, head_dim]
        ``head_dim`` is a multiple of 16.
    operand : {"key", "value", "plain"}
        Keys: tile rows are tokens. Values: tile rows are channels. Plain: no tiles.

    Returns
    -------
    Tensor [..., 32 * head_dim]
    """
    if operand == "plain":
        return x.flatten(-2)
    if x.shape[-1] % 16:
        raise ValueError(f"head_dim={x.shape[-1]}: packed formats need a multiple of 16")
    if operand == "key":  # token tile, row_half, g, channel tile, col_half, t, pair
        return _permute(x.unflatten(-1, (-1, 2, 4, 2)).unflatten(-5, (2, 2, 8)), (3, 0, 2, 5, 4, 1, 6)).flatten(-7)
    # token tile, col_half, t, pair, channel tile, row_half, g
    return _permute(x.unflatten(-1, (-1, 2, 8)).unflatten(-4, (2, 2, 4, 2)), (4, 0, 6, 2, 1, 5, 3)).flatten(-7)


def from_stream(stream: torch.Tensor, operand: str) -> torch.Tensor:
    """Inverse of :func:`to_stream`: [..., 32 * head_dim] -> [..., 32, head_dim]."""
    if operand == "plain":
        return stream.unflatten(-1, (UNIT, -1))
    tiles = stream.unflatten(-1, (-1, 2, 8, 4, 2, 2, 2))  # channel tile, token tile, g, t, col_half, row_half, pair
    if operand == "key":
        return _permute(tiles, (1, 5, 2, 0, 4, 3, 6)).flatten(-4).flatten(-4, -2)
    return _permute(tiles, (1, 4, 3, 6, 0, 5, 2)).flatten(-3).flatten(-5, -2)


def _permute(x: torch.Tensor, last: tuple[int, ...]) -> torch.Tensor:
    lead = x.ndim - len(last)
    return x.permute(*range(lead), *(lead + i for i in last))


def pack(codes: torch.Tensor, bits: int, operand: str) -> torch.Tensor:
    """Pack codes into words.

    Parameters
    ----------
    codes : Tensor, integer [..., tokens, head_dim]
        Values in [0, 2^bits). ``tokens`` is a multiple of 32.
    bits : {1, 2, 3, 4, 8}
    operand : {"key", "value", "plain"}

    Returns
    -------
    Tensor, int16 [..., tokens / 32, 2 * head_dim * bits]
    """
    stream = to_stream(codes.unflatten(-2, (-1, UNIT)).to(torch.int32), operand)
    planes, shift = [], 0
    for width in PLANES[bits]:
        field = (stream >> shift) & ((1 << width) - 1)
        fields = (8 if operand == "plain" else 16) // width  # of a byte, or of a word
        weight = (1 << (width * torch.arange(fields, device=codes.device, dtype=torch.int32))).unsqueeze(-1)
        words = (field.unflatten(-1, (fields, -1)) * weight).sum(-2, dtype=torch.int32)
        # words wrap to the same 16 bits
        planes.append(words.to(torch.uint8).view(torch.int16) if operand == "plain" else words.to(torch.int16))
        shift += width
    return torch.cat(planes, dim=-1) if len(planes) > 1 else planes[0]


def unpack(
    words: torch.Tensor, bits: int, operand: str, head_dim: int, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Inverse of :func:`pack`.

    Parameters
    ----------
    words : Tensor, int16 [..., units, 2 * head_dim * bits]
    bits, operand, head_dim
        As given to :func:`pack`.
    dtype : torch.dtype

    Returns
    -------
    Tensor, ``dtype`` [..., units * 32, head_dim]
    """
    streams = []
    start, shift = 0, 0
    for width in PLANES[bits]:
        count = words_per_unit(head_dim, width)
        plane = words[..., start : start + count]
        if operand == "plain":
            plane = plane.contiguous().view(torch.uint8)
        shifts = torch.arange(0, 8 * plane.itemsize, width, device=words.device, dtype=plane.dtype).unsqueeze(-1)
        field = (plane.unsqueeze(-2) >> shifts) & ((1 << width) - 1)
        streams.append((field << shift if shift else field).to(torch.uint8).flatten(-2))
        start += count
        shift += width
    stream = streams[0] if len(streams) == 1 else streams[0] + streams[1]
    return from_stream(stream, operand).flatten(-3, -2).to(dtype)


@lasting()
def group_order(operand: str, axis: str, groups: int) -> torch.Tensor:
    """Order in which the scales (zero-points, sign words) of a row of groups are stored.

    What a lane (g, t) of the tensor-core fragment needs lies together, and what the lanes of one g, or of one t, need
    in common is read by all of them at once.

    Parameters
    ----------
    operand : {"key", "value", "plain"}
    axis : {"token", "channel"}
        Along what a group runs.
    groups : int
        Groups in a row: the channels (axis "token"), or 32 tokens times the groups of a token (axis "channel").

    Returns
    -------
    Tensor, int64 [groups]
        Index into the row in plain order: channels, or ``[token, group of the token]``.
    """
    index = torch.arange(groups, device="cpu")
    if operand == "plain":
        return index
    if axis == "token":
        tiles = groups // 16
        if operand == "value":  # channels are rows of the fragment: [g, tile, row_half]
            return index.view(tiles, 2, 8).permute(2, 0, 1).reshape(-1)
        two = 2 if tiles % 2 == 0 else 1  # channels are its columns: [tiles by two, t, tile of the two, col_half, pair]
        return index.view(tiles // two, two, 2, 4, 2).permute(0, 3, 1, 2, 4).reshape(-1)
    index = index.view(UNIT, -1)
    if operand == "key":  # tokens are rows: [g, token tile, row_half, group]
        return index.view(2, 2, 8, -1).permute(2, 0, 1, 3).reshape(-1)
    return (
        index.view(2, 2, 4, 2, -1).permute(0, 1, 2, 4, 3).reshape(-1)
    )  # columns: [token tile, col_half, t, group, pair]


@lasting()
def _sign_order(group: int, operand: str, device: torch.device, inverse: bool = False) -> torch.Tensor:
    """Bit that holds the sign of member i of a group, or the member of bit i, copied to a device once.

    For 32 members a lane of the A fragment finds its eight signs at ``t + 4 (col_half + 2 k_step) + 16 pair``, so one shift
    and one mask put two of them on the operand's sign bits.
    """
    i = torch.arange(group, device="cpu")
    k_step, col_half, t, pair = i // 16, i % 16 // 8, i % 8 // 2, i % 2
    order = i if group != 32 or operand == "plain" else pair * 16 + k_step * 8 + col_half * 4 + t
    return (torch.argsort(order) if inverse else order).to(device)


def pack_signs(negative: torch.Tensor, operand: str = "key") -> torch.Tensor:
    """Pack sign bits of groups: bool [..., group] -> int16 [..., group / 16] (group a multiple of 16)."""
    group = negative.shape[-1]
    order = _sign_order(group, operand, negative.device, inverse=True)
    bits = negative[..., order].unflatten(-1, (-1, 16)).to(torch.int32)
    weight = 1 << torch.arange(16, device=negative.device, dtype=torch.int32)
    return (bits * weight).sum(-1, dtype=torch.int32).to(torch.int16)


def unpack_signs(words: torch.Tensor, operand: str = "key") -> torch.Tensor:
    """Inverse of :func:`pack_signs`: int16 [..., group / 16] -> bool [..., group]."""
    if operand == "plain":
        return signs(words, operand) < 0
    shifts = torch.arange(16, device=words.device, dtype=torch.int32)
    bits = ((words.to(torch.int32).unsqueeze(-1) >> shifts) & 1).bool().flatten(-2)
    return bits[..., _sign_order(bits.shape[-1], operand, words.device)]


@lasting()
def _sign_table(device: torch.device) -> torch.Tensor:
    """Signs that a byte's bits stand for: float32 [256, 8]."""
    return (1 - 2 * ((torch.arange(256)[:, None] >> torch.arange(8)) & 1)).to(dtype=torch.float32, device=device)


def _lookup(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of a 256-row table for the bytes of int16 words [..., n]: [..., n * 2 * columns]."""
    return F.embedding(words.contiguous().view(torch.uint8).int(), table).flatten(-2)


def signs(words: torch.Tensor, operand: str) -> torch.Tensor:
    """Packed sign bits as factors: int16 [..., group / 16] -> float32 [..., group], -1 where the bit is set."""
    if operand == "plain":
        return _lookup(words, _sign_table(words.device))
    return 1.0 - 2.0 * unpack_signs(words, operand).float()

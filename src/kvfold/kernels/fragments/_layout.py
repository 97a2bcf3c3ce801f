# mypy: ignore-errors
"""Where things lie in the shared memory of a program of :mod:`kvfold.kernels.fragments._decode`."""

from triton.experimental import gluon

from kvfold.kernels.affine._keys import query_exponent
from kvfold.kernels.fragments._codes import places
from kvfold.kernels.fragments._lookup import PLACES_BYTES
from kvfold.kernels.fragments._mixed import scratch_bytes
from kvfold.kernels.fragments._mixed_bytes import byte_scratch
from kvfold.kernels.fragments._wide import bent, operand_bytes


@gluon.constexpr_function
def layout(k, v, dim, k_width, pair, blocks, bytewise=False, wide=False):
    """Where sides, norms in fp16, and sums of means or scores of salient tokens begin in a warp's stage; its bytes; and where
    weights of salient tokens, or (``wide``) operands of four pages, begin. A side is (kind, bits, mode, group, mean, norm,
    through a matrix, factor of codes, level table, rank, salient tokens or elements)."""
    keys = places(k[0], dim, k_width, k[1], k[2], k[3], k[9], k[4], pair * k[5], blocks)
    values = places(v[0], dim, dim, v[1], v[2], v[3], v[9], v[4], v[5], blocks)
    scratch = keys[-1] + values[-1]
    means = scratch + 2 * dim * (2 if k[0] == 5 else min(pair, 2))
    replaced = PLACES_BYTES.value + 512 if k[0] == 5 or v[0] == 6 else 0
    own = byte_scratch if bytewise else scratch_bytes
    weights = means + ((16 if bytewise else 32) * dim if v[4] else own(k[9])[0] if k[0] == 4 else replaced)
    more = own(v[9])[1] if v[0] == 4 else operand_bytes(k_width, bent(k[0], k[1])) if wide else 0
    return keys, values, keys[-1], scratch, means, weights + more, weights


@gluon.constexpr_function
def _lift(kind, bits):
    """log2 of the factor that probabilities carry, so that small ones are not subnormal: as much as the product with any scale
    allows where scales of groups multiply them, nothing where it follows a token's scales."""
    return 0 if kind >= 2 else query_exponent(bits, kind == 0) + 1


@gluon.constexpr_function
def column_share(k, pair):
    """Columns of a product that a query row takes: one of each of ``pair`` pages, or of each part of a query."""
    return 2 if k[0] == 5 else min(pair, 2)


@gluon.constexpr_function
def shared_bytes(k, v, dim, k_width, pair, blocks, warps, bytewise=False, wide=False):
    """Bytes of shared memory of a program: (``wide``) a matrix of keys; stages and queries; and, later, sums."""
    stages = warps * layout(k, v, dim, k_width, pair, blocks, bytewise, wide)[5]
    size = matrix_bytes(dim, k_width, wide) + max(stages + 16 * dim * (1 + _lightened(k)), warps * dim * 32)
    return (size + 1023) // 1024 * 1024 if wide else size


@gluon.constexpr_function
def matrix_bytes(dim, k_width, wide):
    """Bytes of a matrix in a program's shared memory."""
    return 2 * dim * k_width if wide else 0


@gluon.constexpr_function
def _lightened(k):
    """Whether queries also lie in shared memory times 2^-k of their channel's codes, apart from norms."""
    return int(k[0] < 2)

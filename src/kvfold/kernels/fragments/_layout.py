# mypy: ignore-errors
"""Where things lie in the shared memory of a program of :mod:`kvfold.kernels.fragments._decode`."""

from triton.experimental import gluon

from kvfold.kernels.affine._keys import query_exponent
from kvfold.kernels.fragments._codes import places
from kvfold.kernels.fragments._wide import operand_bytes


@gluon.constexpr_function
def layout(k, v, dim, k_width, pair, blocks, wide=False):
    """A warp's stage: places in keys and in values, where values and norms in fp16 begin, its bytes, where (``wide``) operands
    of four pages begin. A side is (kind, bits, mode, group, mean, norm, factor of codes)."""
    keys = places(k[0], dim, k_width, k[1], k[2], k[3], k[4], pair * k[5], blocks)
    values = places(v[0], dim, dim, v[1], v[2], v[3], v[4], v[5], blocks)
    scratch = keys[-1] + values[-1]
    operands = scratch + 2 * dim * min(pair, 2)
    return keys, values, keys[-1], scratch, operands + (operand_bytes(k_width) if wide else 0), operands


@gluon.constexpr_function
def _lift(kind, bits):
    """log2 of the factor that probabilities carry, so that small ones are not subnormal: as much as the product with any scale
    allows."""
    return query_exponent(bits, kind == 0) + 1


@gluon.constexpr_function
def column_share(pair):
    """Columns of a product that a query row takes: one of each of ``pair`` pages."""
    return min(pair, 2)


@gluon.constexpr_function
def shared_bytes(k, v, dim, k_width, pair, blocks, warps, wide=False):
    """Bytes of shared memory of a program: (``wide``) a matrix of keys; stages and queries; and, later, sums."""
    stages = warps * layout(k, v, dim, k_width, pair, blocks, wide)[4]
    size = matrix_bytes(dim, k_width, wide) + max(stages + 16 * dim * (1 + _lightened(k)), warps * dim * 32)
    return (size + 1023) // 1024 * 1024 if wide else size


@gluon.constexpr_function
def matrix_bytes(dim, k_width, wide):
    """Bytes of a matrix in a program's shared memory."""
    return 2 * dim * k_width if wide else 0


@gluon.constexpr_function
def _lightened(k):
    """Whether queries also lie in shared memory times 2^-k of their channel's codes, apart from norms."""
    return int(k[0] == 0)

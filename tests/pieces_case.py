"""Kernels over pieces of pages whose launches PyTorch runs, and their answers by decoding."""

from dataclasses import replace

import torch

import lanes
from kvfold.kernels import paged
from kvfold.kernels.paged import Workspace


class Emulated:
    """A kernel whose launches PyTorch runs."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg=None, **constants):
            lanes.run(self.kernel, grid, arguments, constants, num_warps, 227 << 10)

        return launch


def error_of_pieces(server, tokens, launch, pages=1):
    """Relative error of attention over the packed tokens of two sequences of two KV heads, that of the worse one.

    ``launch`` as :func:`kvfold.kernels.paged.tables.pieces`; a piece is so many ``pages``, of which a sequence's first one may
    begin with the sink and the last one may not be full. What is not written is NaN.
    """
    lengths, per_head = server.lengths, server.per_head
    paged.store(server.step([n - tokens for n in lengths]))
    call = server.step([tokens] * len(lengths), in_place=True)
    space = Workspace.make(len(lengths) + 1, 8, 512, 2 * per_head, server.dim, "cpu", short=2, piece_pages=1)
    for x in (space.out, space.top, space.total):
        x.fill_(float("nan"))
    pieces = []
    for i in range(len(lengths)):
        stop = -(-call.step.host[i].packed // 128)
        pieces += [(i, page, min(page + pages, stop)) for page in range(0, stop, pages)]
    for at, (i, first, stop) in enumerate(pieces):
        row = call.step.host[i]
        line = (i, first, stop, row.packed, row.sink, row.start, row.count, 0)
        space.item_list[at] = torch.tensor(line, dtype=torch.int32)
    space.items[call.step.seqs] = len(pieces)
    rows = per_head * tokens
    launch(call, call.query, rows, replace(space, processors=2), torch.empty_like(call.query))
    whole = space.top.shape[0] // (2 * rows) * 2 * rows
    parts = [x[:whole].view(-1, 2, rows, *x.shape[1:]) for x in (space.out[:, : server.dim], space.top, space.total)]
    errors = []
    for i, row in enumerate(call.step.host[: len(lengths)]):
        own = [at + i + 1 for at, piece in enumerate(pieces) if piece[0] == i]
        sums, top, total = (x[own] for x in parts)
        weight = torch.exp2(top - top.amax(0))
        got = (sums * weight.unsqueeze(-1)).sum(0) / (total * weight).sum(0).unsqueeze(-1)
        keys, values = paged.reference.unpacked(call, row, row.sink, row.packed)
        query = call.query[row.start : row.start + tokens].transpose(0, 1).unflatten(0, (2, -1)).flatten(1, 2)
        want = (query @ keys[0].mT * call.scale).softmax(-1) @ (call.unproject(values) if call.unproject else values)[0]
        errors.append(float((got - want).norm() / want.norm()))
    return max(errors) if all(e == e for e in errors) else float("nan")

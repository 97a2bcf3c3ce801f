"""A server's pages in small: who has which page and window block, step by step, and what must come out."""

import math

import torch

from kvfold.formats import PagedFormat
from kvfold.formats.paged import PAGE
from kvfold.kernels.paged import PagedCall, PagedStep, PageLayout
from kvfold.methods import LayerSpec, get

WINDOW_BLOCK = 16


def formats_of(method, head_dim, heads=2, per_head=2, fragments=False):
    """Both formats of a method, given by name."""
    method = get(method) if isinstance(method, str) else method
    spec = LayerSpec(0, 1, heads * per_head, heads, head_dim, fragments=fragments)
    return method.key_format(spec), method.value_format(spec)


class Server:
    """Sequences over shuffled pages. What is free, or not written yet, is NaN (or ones).

    Parameters
    ----------
    method : str
    lengths : tuple of int
        How long each sequence becomes.
    recent, sink : int or None
        None: the method's.
    fragments : bool
        Whether codes are packed for tensor cores.
    layer : Stored or None
        Formats and maps of a method with an artefact (:func:`books_case.layer`).
    """

    def __init__(
        self, method, lengths, head_dim=64, heads=2, per_head=2, recent=None, sink=None, fragments=False, dtype=torch.float32,
        device="cpu", seed=0, spare_rows=1, layer=None,
    ):  # fmt: skip
        draw = torch.Generator().manual_seed(seed)
        self.method = get(method) if isinstance(method, str) else method
        self.recent = self.method.recent if recent is None else recent
        self.sink = self.method.sink if sink is None else sink
        self.formats = layer.formats if layer else formats_of(self.method, head_dim, heads, per_head, fragments)
        self.maps = layer.maps(torch.device(device)) if layer else {}
        self.on_cpu = layer.maps(torch.device("cpu")) if layer else {}
        self.block, self.dtype, self.device, self.draw = self.formats[0].block, dtype, device, draw
        self.heads, self.per_head, self.dim, self.lengths = heads, per_head, head_dim, list(lengths)
        self.layout = PageLayout(*self.formats)

        def tokens(count, scale=1.0):
            x = torch.randn(count, heads, head_dim, generator=draw)
            mean = torch.randn(1, heads, head_dim, generator=draw)
            size = torch.exp(0.7 * torch.randn(1, heads, head_dim, generator=draw))
            return ((x * size + mean) * scale).to(dtype)

        self.keys, self.values = ([tokens(n) for n in lengths] for _ in "kv")
        self.queries = [torch.randn(n, heads * per_head, head_dim, generator=draw).to(dtype) for n in lengths]
        self.now = [0] * len(lengths)
        pages = sum(-(-n // PAGE) for n in lengths) + 3
        each = (self.recent + 2 * self.block) // WINDOW_BLOCK + 2 + self.sink // WINDOW_BLOCK
        blocks = len(lengths) * each + 2 + sum(-(-n // WINDOW_BLOCK) for n in lengths) // 2
        region = torch.full((pages, heads, self.layout.bytes + 16), 255, dtype=torch.uint8, device=device)
        self.region = region[:, :, : self.layout.bytes]
        self.views = self.layout.views(self.region)
        for side in self.views:
            for t in side.values():
                if t.is_floating_point():
                    t.fill_(float("nan"))
        # strides of their own: keys and values of a block beside each other, as vLLM has them
        both = torch.full((blocks, heads, WINDOW_BLOCK, 3 * head_dim), float("nan"), dtype=dtype, device=device)
        *self.windows, self.window_queries = (t.transpose(1, 2) for t in both.split(head_dim, -1))
        self.following = None
        self.rows = len(lengths) + spare_rows
        most = max(lengths)
        self.table = torch.zeros(self.rows, -(-most // PAGE) + 1, dtype=torch.int32)
        self.window_table = torch.zeros(self.rows, -(-most // WINDOW_BLOCK) + 1, dtype=torch.int32)
        self.table[:, -1] = self.window_table[:, -1] = 1 << 30  # never to be followed
        self.free_pages = (1 + torch.randperm(pages - 1, generator=draw)).tolist()  # page 0 is nobody's
        self.free_blocks = (1 + torch.randperm(blocks - 1, generator=draw)).tolist()
        self.held = [{} for _ in lengths]

    def step(self, counts, in_place=False):
        """The call that appends ``counts`` tokens to the sequences; window blocks nobody needs any more are freed."""
        before, self.now = self.now, [n + c for n, c in zip(self.now, counts, strict=True)]
        for i, (n0, n) in enumerate(zip(before, self.now, strict=True)):
            for page in range(-(-n0 // PAGE), -(-n // PAGE)):
                self.table[i, page] = self.free_pages.pop()
            self._window_blocks(i, n0, n)
        live = [i for i, c in enumerate(counts) if c]
        device = self.device
        lens = torch.zeros(self.rows, dtype=torch.int32)
        starts = torch.full((self.rows + 1,), sum(counts), dtype=torch.int32)
        starts[0] = 0
        for i, c in enumerate(counts):
            starts[i + 1] = starts[i] + c
            lens[i] = self.now[i] if c else 0
        step = PagedStep(
            starts.to(device), lens.to(device), self.table.to(device), self.window_table.to(device), max(counts),
            self.recent, self.sink, self.block, WINDOW_BLOCK,
        )  # fmt: skip

        def new(source):
            return torch.cat([source[i][before[i] : self.now[i]] for i in live]).to(device)

        keys, values = new(self.keys), new(self.values)
        self.call = PagedCall(
            step, *self.formats, *self.views, *self.windows, 1 / math.sqrt(self.dim), new(self.queries),
            None if in_place else keys, None if in_place else values, following=self.following,
            window_queries=None if self.following is None else self.window_queries, **self.maps,
        )  # fmt: skip
        return self.call

    def _window_blocks(self, i, n0, n):
        """Blocks for the last tokens of a chunk; what came before is given back and poisoned."""
        held, table = self.held[i], self.window_table[i]
        for at in [at for at in held if self.sink <= at and at + WINDOW_BLOCK <= n0 - self.recent - self.block]:
            block = held.pop(at)  # its number stays in the table: a worker's tables are not cleaned
            self.free_blocks.insert(0, block)
            for window in (*self.windows, self.window_queries):
                window[block] = float("nan")
        first = max(n - self.recent - self.block, 0) // WINDOW_BLOCK * WINDOW_BLOCK
        for at in range(n0 // WINDOW_BLOCK * WINDOW_BLOCK, n, WINDOW_BLOCK):
            if at not in held:
                wanted = at < self.sink or at >= first
                table[at // WINDOW_BLOCK] = self.free_blocks.pop() if wanted else 0
                if wanted:
                    held[at] = int(table[at // WINDOW_BLOCK])

    # ---- what must come out ------------------------------------------------------------------------------------------

    def encoded(self, i, form, x, closed):
        """Fields of the first ``closed`` tokens of a sequence, by the format itself, [1, heads, blocks or pages, ...]."""
        x = x[i].float().transpose(0, 1).unsqueeze(0)
        of_pages = (
            isinstance(form, PagedFormat) and form.page_fields()
        )  # statistics are of what is packed, without the sink
        name = "encode_keys" if form is self.formats[0] else "encode_values"
        if name in self.on_cpu and not of_pages:
            return self.on_cpu[name](x[:, :, :closed], torch.arange(closed).view(1, 1, -1), None)
        if not of_pages:
            return form.encode(x[:, :, :closed])
        parts = []
        for first in range(0, closed, PAGE):
            start = first or self.sink
            page = form.statistics(x[:, :, start : first + form.seen].unsqueeze(2))
            parts.append(form.encode(x[:, :, first : min(first + PAGE, closed)], page=page) | page)
        return {name: torch.cat([part[name] for part in parts], 2) for name in parts[0]}

    def closed(self, i):
        """Tokens of a sequence whose blocks are closed."""
        n, seen = self.now[i], self.call.seen
        whole = n // self.block * self.block
        return whole if n - n // PAGE * PAGE >= seen else n // PAGE * PAGE

    def stored(self, i, side):
        """What the pages of a sequence hold, [1, heads, blocks or pages, ...]."""
        pages = self.table[i, : -(-self.closed(i) // PAGE)].long().to(self.device)
        return {n: t[pages].transpose(0, 1).flatten(1, 2).unsqueeze(0).cpu() for n, t in self.views[side].items()}

    def read(self, form, fields):
        """Keys after RoPE, or values, of the first tokens of a sequence, by the method itself."""
        x = form.decode(fields)
        if form is self.formats[1]:
            return self.on_cpu["unproject"](x) if "unproject" in self.on_cpu else x
        return self.on_cpu["rope"].rotate(x, torch.arange(x.shape[2]).view(1, 1, -1)) if "rope" in self.on_cpu else x

    def expected(self):
        """Attention of the last step's tokens, float32, computed without pages: packed tokens as their formats decode them."""
        out = []
        for i, n in enumerate(self.now):
            count = int(self.call.step.query_start[i + 1] - self.call.step.query_start[i])
            if not count:
                continue
            n0 = n - count
            sink = min(self.sink, n0)
            packed = max((n0 - self.recent) // self.block * self.block, sink)
            sides = []
            for form, source in zip(self.formats, (self.keys, self.values), strict=True):
                x = source[i][:n].float().transpose(0, 1).clone()
                if packed > sink:
                    fields = self.encoded(i, form, source, packed)
                    x[:, sink:packed] = self.read(form, fields)[0, :, sink:packed]
                sides.append(x)
            q = self.queries[i][n0:n].float().transpose(0, 1).unflatten(0, (self.heads, -1))
            scores = q @ sides[0].unsqueeze(1).mT / math.sqrt(self.dim)
            scores += torch.full((count, n), float("-inf")).triu(n0 + 1)
            out.append((scores.softmax(-1) @ sides[1].unsqueeze(1)).flatten(0, 1).transpose(0, 1))
        return torch.cat(out)


def cuts(lengths, most, draw):
    """Random steps in which sequences grow to their lengths: of one token, or of up to ``most``; some wait."""
    left = list(lengths)
    while any(left):
        counts = []
        for n in left:
            kind = int(torch.randint(4, (), generator=draw))
            size = (0, 1, 1 + int(torch.randint(most, (), generator=draw)), most)[kind]
            counts.append(min(n, size))
        if any(counts):
            left = [n - c for n, c in zip(left, counts, strict=True)]
            yield counts

"""Unpacking and calls that unpack, with their answers by formats and by the float32 reference.

``python unpacked_case.py NAME...`` runs cases by name, under Triton's interpreter where TRITON_INTERPRET is set.
"""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

import blocks_case
from blocks_case import Case, affine, by_groups, commvq, kvquant, lookups, mixed, of_method, residuals, unproject
from interpreter import quicken
from kvfold.formats.paged import plain
from kvfold.kernels import AttentionCall, NewTokens, Span, Windows
from kvfold.kernels.generic import unpack
from kvfold.kernels.long import attend as unpacked
from kvfold.kernels.long import join as joining
from kvfold.kernels.reference import ReferenceKernel
from kvfold.kernels.stored import basis_matrix, rotation_of
from kvfold.methods import LayerSpec, get

LIMIT = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


# ---- unpacking ---------------------------------------------------------------------------------------------------------


def fragments(spec, head_dim=64):
    """Formats of a method in the order of tensor cores."""

    def formats(d, device):
        method, layer = get(spec), LayerSpec(0, 1, 2, 4, d)
        return plain(method.key_format(layer)), method.value_format(layer)

    return formats


def of_values(spec):
    """On both sides the format of a method's values in plain order: keys may need an artefact."""

    def formats(d, device):
        form = get(spec).formats(LayerSpec(0, 1, 2, 4, d, fragments=False))[1]
        return form, form

    return formats


def packed_apart(of):
    """Formats of levels and elements in the order of tensor cores."""

    def formats(d, device):
        return tuple(
            replace(form, operand=side, inner=replace(form.inner, operand=side))
            for side, form in zip(("key", "value"), of(d, device), strict=True)
        )

    return formats


SLABS = (5,)
FORMATS = {
    "turboquant-3bit": {"method": "turboquant:bits=3"},
    "turboquant-d128": {"method": "turboquant:bits=2", "head_dim": 128, "slabs": (6,)},
    "turboquant-d80": {"method": "turboquant:bits=2,center=false,normalize=false", "head_dim": 80},
    "fold-plain-d96": {"method": "fold", "head_dim": 96, "slabs": (4, 2)},
    "qjl": {"method": "k=qjl+v=turboquant"},
    "innerq": {"method": "innerq"},
    "gear": {"method": "gear"},
    "gear-rope": {"method": blocks_case.low_rank(affine("token", "channel", "asym")), "rotary": 40, "head_dim": 96},
    "zipcache": {"method": "zipcache", "slabs": (2,)},
    "mixed-rope": {"method": mixed(2, 2, 60, 128), "rotary": 40, "head_dim": 80, "slabs": (1,)},
    "lookup-range": {"method": lookups(3, 2, values="range")},
    "lookup-channel-rope": {"method": lookups(3, keys="channel", values="range"), "rotary": 64},
    "lookup-block128": {"method": lookups(2, block=128), "slabs": (2,)},
    "kivi-rope-d80": {"method": affine("token", "channel", "asym", 2, 16), "rotary": 40, "head_dim": 80},
    "kvquant": {"method": kvquant(2), "rotary": 64},
    "kvquant-d128-part": {"method": kvquant(3, 2), "rotary": 64, "head_dim": 128, "scaling": 1.1, "slabs": (3,)},
    "kvquant-fragments": {"method": packed_apart(kvquant(2)), "rotary": 64},
    "kvquant-fragments-d128": {"method": packed_apart(kvquant(3)), "rotary": 128, "head_dim": 128, "scaling": 1.1},
    "commvq": {"method": commvq(5), "rotary": 64, "unproject": unproject},
    "commvq-d96": {"method": commvq(4, 32, 96, block=128), "rotary": 96, "head_dim": 96, "unproject": unproject, "slabs": (2,)},
    "commvq-odd-rope": {"method": commvq(3, 256, 48, 24), "rotary": 24, "unproject": unproject},
    "groups-8-mean": {"method": by_groups((8, True), (8,), mean=2.0), "rotary": 64},
    "groups-8-mean-part-of-rope": {"method": by_groups((8, True), (8,), mean=2.0), "rotary": 32, "head_dim": 80},
    "groups-4-mean": {"method": by_groups(mean=2.0)},
    "residual": {"method": residuals(), "rotary": 64},
    "residual-part-of-rope": {"method": residuals(), "rotary": 32, "head_dim": 128, "scaling": 1.1, "slabs": (3,)},
    "residual-odd-rope": {"method": residuals((3, 16, 128)), "rotary": 24},
    "residual-no-rope-d96": {"method": residuals((4, 16, 256)), "head_dim": 96},
    **{f"fold-{bits}bit": {"method": fragments(f"fold:bits={bits}")} for bits in (1, 2, 3, 4, 8)},
    "fold-codebook": {"method": fragments("fold:codebook=true")},
    "fold-2bit-codes": {"method": fragments("fold:bits=2,codebook=true"), "slabs": (4, 2)},
    "fold-2bit-codes-d256": {"method": fragments("fold:k_bits=2,v_bits=1,codebook=true"), "head_dim": 256},
    "fold-d128": {"method": fragments("fold"), "head_dim": 128, "slabs": (4, 2)},
    "kivi": {"method": fragments("kivi"), "slabs": (3, 2)},
    "kivi-g64-d128": {"method": fragments("kivi:group=64,bits=4"), "head_dim": 128, "slabs": (3,)},
    "turboquant-fragments": {"method": fragments("turboquant:bits=3")},
    "turboquant-fragments-d128": {"method": fragments("turboquant:bits=2"), "head_dim": 128},
    "qjl-fragments": {"method": fragments("qjl")},
    "innerq-fragments": {"method": fragments("innerq")},
    "gear-fragments": {"method": fragments("gear"), "slabs": (4, 2)},
    "zipcache-fragments": {"method": fragments("zipcache"), "slabs": (1, 2)},
    "zipcache-fragments-group32": {"method": fragments("zipcache:group=32,salient_bits=3"), "slabs": (4, 2)},
    **{f"innerq-{mode}": {"method": fragments(f"innerq:paper=true,mode={mode}")} for mode in ("asym", "sym", "hybrid")},
    **{
        f"fold-{bits}bit-d128": {"method": fragments(f"fold:bits={bits}"), "head_dim": 128, "slabs": (4, 2)} for bits in (1, 4)
    },
    "fold-d256": {"method": fragments("fold"), "head_dim": 256},
    "fold-plain-d80": {"method": "fold", "head_dim": 80},
    "fold-rotation32-d128": {"method": fragments("fold:rotation=32"), "head_dim": 128},
    "fold-rotation128-d128": {"method": fragments("fold:rotation=128"), "head_dim": 128},
    "fold-2bit-codes-d128": {"method": fragments("fold:bits=2,codebook=true"), "head_dim": 128, "slabs": (4, 2)},
    "fold-1bit-codes-d128": {
        "method": fragments("fold:bits=1,codebook=true,rotation=32,normalize=false"), "head_dim": 128
    },
    "turboquant-3bit-fragments-d128": {"method": fragments("turboquant:bits=3"), "head_dim": 128, "slabs": (4, 2)},
    "qjl-fragments-d128": {"method": fragments("qjl"), "head_dim": 128},
    "qjl-plain-d96": {"method": "k=qjl+v=turboquant:bits=4", "head_dim": 96},
    "innerq-fragments-d128": {"method": fragments("innerq"), "head_dim": 128, "slabs": (4, 2)},
    "innerq-fragments-d256": {"method": fragments("innerq"), "head_dim": 256, "slabs": (4,)},
    "innerq-plain-d96": {"method": "innerq", "head_dim": 96},
    "kivi-d256": {"method": fragments("kivi"), "head_dim": 256},
    "zipcache-plain-d128": {"method": "zipcache", "head_dim": 128, "slabs": (1, 1)},
    "gear-plain-d128": {"method": "gear", "head_dim": 128},
    "kvarn": {"method": "kvarn", "slabs": (2, 1)},
    "kvarn-d128": {"method": "kvarn", "head_dim": 128, "slabs": (2, 1)},
    "kvarn-rotation32-d128": {"method": "kvarn:rotation=32", "head_dim": 128, "slabs": (2,)},
    "nova": {"method": of_values("nova")},
    "nova-d128": {"method": of_values("nova"), "head_dim": 128, "slabs": (6,)},
    "commvq-rounded-d128": {
        "method": commvq(11, 64, 128, rounded=True), "rotary": 128, "head_dim": 128, "unproject": unproject
    },
    "commvq-2bit-d128": {
        "method": commvq(21, 64, 256, rounded=True), "rotary": 128, "head_dim": 128, "unproject": unproject
    },
    "groups-8-mean-d128": {
        "method": by_groups((8, True), (8,), mean=2.0), "rotary": 128, "head_dim": 128, "scaling": 1.1, "slabs": (6,)
    },
    "groups-4-mean-d128": {
        "method": by_groups((4, True), (4,), mean=2.0), "rotary": 128, "head_dim": 128, "scaling": 1.1, "slabs": (3, 2)
    },
    "residual-rounded-d128": {
        "method": residuals(rounded=True), "rotary": 128, "head_dim": 128, "scaling": 1.1, "slabs": (3, 2)
    },
    "residual-2bit-d128": {
        "method": residuals((8, 32, 256), (8, 32, 256), rounded=True), "rotary": 128, "head_dim": 128
    },
}  # fmt: skip


def stored(name, device="cpu", dtype=torch.float32):
    """A case whose sequences fill their slabs."""
    how = {"slabs": SLABS, "head_dim": 64, **FORMATS[name]}
    method = how["method"]
    form = (method(how["head_dim"], device) if callable(method) else of_method(method, how["head_dim"]))[0]
    return Case(**how | {"packed": (sum(how["slabs"]) * form.block,) * 2, "device": device, "dtype": dtype})


def unpacking_error(name, device="cpu", dtype=torch.float16):
    """Largest relative RMS error of keys and values of every span, from its first token and from its second page on."""
    call, worst = stored(name, device).call, 0.0
    for span in call.spans:
        for form, fields in ((call.key_format, span.keys), (call.value_format, span.values)):
            keys = fields is span.keys
            rope = call.rope if keys else None
            assert unpack.why_not(form, rope is not None) is None
            want = form.decode(fields)
            turn = None
            if not keys and call.unproject is not None:
                want, turn = call.unproject(want), unpack.Turn.of(call.unproject, form, 2, want.device)
            if rope is not None:
                place = span.start + torch.arange(want.shape[2], device=want.device)
                want = rope.rotate(want, (call.first_position.unsqueeze(-1) + place)[:, None])
            for first in (0, 128):
                count = want.shape[2] - first
                if count > 0:
                    got = unpack.unpack(form, fields, span.start, first, count, dtype, rope, call.first_position, turn)
                    whole = want[:, :, first:]
                    assert got.dtype == dtype and got.shape == whole.shape
                    worst = max(worst, float((got.float() - whole).norm() / whole.norm()))
    return worst


SIZED = "kvarn-d128", "nova-d128", "fold-d128", "fold-2bit-codes-d128"
"""Pages whose numbers pass a basis."""


def sized_error(name):
    """Largest relative RMS error of small and large numbers, which are decoded as fp16."""
    how, worst = FORMATS[name], 0.0
    method = how["method"]
    forms = method(128, "cpu") if callable(method) else of_method(method, 128)
    draw = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e3):
        x = size * (torch.randn(1, 2, 256, 128, generator=draw) + torch.randn(1, 2, 1, 128, generator=draw))
        for form in forms:
            fields = form.encode(x)
            want = form.decode(fields)
            got = unpack.unpack(form, fields, 0, 0, 256, torch.float16)
            worst = max(worst, float((got.float() - want).norm() / want.norm()))
    return worst


def huge_error(name):
    """0 where scales near fp16's largest number decode to no infinity, and to the largest number somewhere."""
    how = FORMATS[name]
    method = how["method"]
    forms = method(128, "cpu") if callable(method) else of_method(method, 128)
    for form in forms:
        fields = form.encode(torch.randn(1, 1, 256, 128, generator=torch.Generator().manual_seed(0)))
        for field in {"scale", "meta", "factor", "rms"} & set(fields):
            fields[field].fill_(60000.0)
        got = unpack.unpack(form, fields, 0, 0, 256, torch.float16)
        if not torch.isfinite(got).all() or got.abs().max() != 65504:
            return float("nan")
    return 0.0


# ---- calls -------------------------------------------------------------------------------------------------------------


def call(
    device, method="fold", batch=2, tokens=20, packed=(320, 96), dim=64, heads=4, kv_heads=2, dtype=torch.float16, **how
):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    spec = LayerSpec(0, 1, heads, kv_heads, dim, dtype, fragments=how.pop("fragments", True))
    forms = get(method).key_format(spec), get(method).value_format(spec)
    spans, start = [], 0
    for n in packed:
        fields = [form.encode(random(batch, kv_heads, n, dim) + random(1, kv_heads, 1, dim)) for form in forms]
        spans.append(Span(start, *fields))
        start += n
    sinks, ring = how.pop("slots", (32, 64))
    recent = how.pop("recent", 50)
    sides = [random(batch, kv_heads, slots, dim).to(dtype) for slots in (sinks, sinks, ring, ring)]

    def full(n):
        return torch.full((batch,), n, dtype=torch.int32, device=device)

    windows = Windows((sides[0], sides[1]), (sides[2], sides[3]), full(sinks), full(start), full(recent))
    new = NewTokens(*(random(batch, kv_heads, tokens, dim).to(dtype) for _ in range(2)), how.pop("valid", None))
    query = random(batch, heads, tokens, dim).to(dtype)
    sharp = how.pop("sharp", "")
    if sharp:  # most of every other query's attention is on a key of those that are copied
        newest = sides[2][:, :, (start + recent - 32 + torch.arange(32, device=device)) % ring]
        last = forms[0].decode(spans[-1].keys)[:, :, -32:] if sharp == "packed" else newest
        last = last.repeat_interleave(heads // kv_heads, 1)
        query[:, :, ::2] = last[:, :, torch.arange(0, tokens, 2, device=device) % 32].to(dtype)
    return AttentionCall(
        query, dim**-0.5, kv_heads, *forms, spans, full(start), windows, new, how.pop("uniform", True), **how
    )


def shifted(device, batch=2, heads=2, dim=64):
    """Statistics of whole sequences, which queries carry."""
    norm = 1 + torch.rand(batch, heads, 1, dim, generator=torch.Generator().manual_seed(1)).to(device)
    return lambda q, dtype: ((q * norm).to(dtype), (q * norm).sum(-1))


def padded(device):
    valid = torch.ones(2, 20, dtype=torch.bool, device=device)
    valid[1, :7] = False
    return valid


CALLS = {
    **{name: lambda device, name=name: {"method": name} for name in ("fold", "kivi", "none")},
    "turboquant": lambda device: {"method": "turboquant", "fragments": False},
    "statistics of sequences": lambda device: {"method": "kivi", "project": shifted(device)},
    "padding and sinks": lambda device: {
        "valid": padded(device),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device),
    },
    "nothing packed": lambda device: {"packed": ()},
    "sharp": lambda device: {"sharp": "packed"},
    "sharp without sinks": lambda device: {"sharp": "packed", "slots": (0, 64)},
    "sharp on recent ones": lambda device: {"sharp": "recent", "packed": (320, 32)},
    "few sinks": lambda device: {"slots": (8, 64)},
    "few in the windows": lambda device: {"packed": (320, 32), "recent": 3},
    **{
        f"sharp and filled up: {where}": lambda device, where=where: {
            "sharp": where,
            "tokens": 520,
            "packed": (3200, 288),
            "dim": 128,
            "heads": 16,
            "batch": 4,
        }
        for where in ("packed", "recent")
    },
}


def attention_error(name, device="cpu", dtype=torch.float16):
    given = call(device, **CALLS[name](device), dtype=dtype)
    assert unpacked.serves(given)
    got, want = unpacked.attend_unpacked(given).float(), ReferenceKernel().attend(given).float()
    if given.new.valid is not None:
        got, want = (x.transpose(1, 2)[given.new.valid] for x in (got, want))
    return float((got - want).norm() / want.norm())


@contextmanager
def cudnn_of_a_cpu(step=128, few=32, stay=None):
    """Within it a function of the same arguments takes the place of cuDNN's attention, and is given multiples of ``step`` keys.
    Gives the numbers of keys."""
    taken = []

    def cudnn(query, keys, values, bias, wants_total, dropout, causal, debug, scale):
        taken.append(keys.shape[2])
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, total = flash(query, keys, values, 0.0, False, scale=scale)
        return out, total.unsqueeze(-1)

    instead = {
        "STEP": step,
        "FEW": few,
        "takes_cudnn": lambda rows: True,
        "_stay": lambda *given: stay,
    }
    before = {name: getattr(unpacked, name) for name in instead}
    theirs = torch.ops.aten._scaled_dot_product_cudnn_attention
    for name, x in instead.items():
        setattr(unpacked, name, x)
    torch.ops.aten._scaled_dot_product_cudnn_attention = cudnn
    try:
        yield taken
    finally:
        for name, x in before.items():
            setattr(unpacked, name, x)
        torch.ops.aten._scaled_dot_product_cudnn_attention = theirs


def cut_error(name):
    """Of a call that gives multiples of 128 keys to cuDNN: filled up, or, of what is stored as such, the rest to flash
    attention."""
    with cudnn_of_a_cpu(stay=3 if name == "sharp on recent ones" else None) as taken:
        error = attention_error(name)
    return error if sum(taken) == (256 if name == "none" else 512) else float("nan")  # of 320 and 96 tokens


def late_error(how):
    """Of a call whose queries pass something that is launched aside: they are there once they are waited for."""
    given = call(
        torch.device("cpu"), tokens=128, packed=(96,), **CALLS["statistics of sequences"]("cpu")
    )  # one piece, rows as cuDNN takes them
    rows, shift = given.project(given.grouped(given.query), given.query.dtype)

    class Late(unpacked.Aside):
        def __init__(self, device, number=0):
            super().__init__(device, number)
            self.late = number == 2

        def meet(self, *made):
            if self.late and made:
                made[0].copy_(rows)
                made[1].copy_(shift)

    nothing = torch.full_like(rows, float("nan")), torch.full_like(shift, float("nan"))
    before, unpacked.Aside = unpacked.Aside, Late
    try:
        with cudnn_of_a_cpu() if how == "cut" else nullcontext():
            got = unpacked.attend_unpacked(replace(given, project=lambda *_: nothing)).float()
    finally:
        unpacked.Aside = before
    want = ReferenceKernel().attend(given).float()
    return float((got - want).norm() / want.norm())


def few_error(sinks):
    """Of a call that fills 992 places, whose windows are ``sinks`` tokens: queries see hardly more than the first, in fp16 of
    what cuDNN gives."""
    given = call(torch.device("cpu"), tokens=32, packed=(1056,), slots=(int(sinks), 64), recent=0)
    keys, values = given.windows.sink
    noise = torch.randn(given.query.shape, generator=torch.Generator().manual_seed(3))
    query = keys[:, :, :1].repeat_interleave(2, 1).float() * 12 + 0.5 * noise
    values = values.clone()
    values[:, :, 0] *= 0.02
    given = replace(given, query=query.half(), windows=replace(given.windows, sink=(keys, values)))
    with cudnn_of_a_cpu(1024, 256) as taken:
        got, want = unpacked.attend_unpacked(given).float(), ReferenceKernel().attend(given).float()
    return float((got - want).norm() / want.norm()) if taken[-1] == 1024 else float("nan")


def tables_error(name):
    """0 where a call finds all tables that it reads made before, as launches aside need it."""
    case = stored(name)
    caches = basis_matrix, rotation_of
    for cache in caches:
        cache.cache_clear()
    unpack.make_constants(case.call.key_format, torch.device("cpu"), case.call.rope)
    made = [cache.cache_info().misses for cache in caches]
    span = case.call.spans[0]
    unpack.unpack(
        case.call.key_format, span.keys, span.start, 0, 32, torch.float16, case.call.rope, case.call.first_position
    )
    after = [cache.cache_info().misses for cache in caches]
    return 0.0 if any(made) and after == made else float("nan")


def stored_call_error(name, device="cpu", dtype=torch.float16):
    """Of a call of 20 tokens on a case of :data:`FORMATS`."""
    how = {"slabs": SLABS, **FORMATS[name], "tokens": 20}
    method, dim = how["method"], how.get("head_dim", 64)
    form = (method(dim, device) if callable(method) else of_method(method, dim))[0]
    packed = (sum(how.get("slabs", SLABS)) * form.block,) * 2
    given = Case(**how | {"packed": packed, "device": device, "dtype": dtype})
    uniform = replace(given.call, uniform=True)
    got, want = unpacked.attend_unpacked(uniform).float(), given.expected().float()
    return float((got - want).norm() / want.norm())


LENGTHS = {
    "turboquant": {"method": "turboquant", "packed": (64, 160), "slabs": (3, 4)},
    "nothing packed of one": {"method": "turboquant", "packed": (0, 96), "slabs": (4,)},
    "commvq": {"method": commvq(5), "rotary": 64, "unproject": unproject, "packed": (96, 32), "slabs": (4,)},
    "kivi": {"method": fragments("kivi"), "packed": (32, 96), "slabs": (2, 2)},
}
"""Sequences of different length; what they do not fill is full of NaN."""


def ragged_error(name):
    """The same where cuDNN is given multiples of 128 keys, and tokens of the windows fill up."""
    with cudnn_of_a_cpu() as taken:
        error = lengths_error(name, sink=32)
    return error if taken else float("nan")


def lengths_error(name, device="cpu", dtype=torch.float16, **how):
    given = Case(**LENGTHS[name] | {"tokens": 20, "device": device, "dtype": dtype} | how)
    given.call = replace(given.call, packed=LENGTHS[name]["packed"])
    assert unpacked.serves(given.call)
    got, want = unpacked.attend_unpacked(given.call).float(), given.expected().float()
    return float((got - want).norm() / want.norm())


if __name__ == "__main__":
    quicken()
    unpacked.PIECE = 256 * 2 * 4 * 64  # several pieces
    joining.JOIN = 1
    wrong = {}
    for name in sys.argv[1:]:
        kind, _, case = name.partition("/")
        error = {
            "unpack": unpacking_error,
            "sized": sized_error,
            "huge": huge_error,
            "call": attention_error,
            "cut": cut_error,
            "few": few_error,
            "late": late_error,
            "ragged": ragged_error,
            "tables": tables_error,
            "stored": stored_call_error,
            "lengths": lengths_error,
        }[kind](case)
        if not error < (1e-3 if kind in ("unpack", "sized") else LIMIT[torch.float16]):
            wrong[name] = error
    for name, error in wrong.items():
        print(f"{name}: {error:.2e}", file=sys.stderr)
    sys.exit(bool(wrong))

"""Layers, models and calls that the tests share."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from interpreter import quicken
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.engines.transformers.names import passing
from kvfold.errors import MethodError
from kvfold.formats import Fields, Format, PagedFormat
from kvfold.kernels.device import DeviceInfo, device_info
from kvfold.methods import LayerSpec, Method, get
from kvfold.plan import packed_for
from kvfold.rope import Rope
from targets import current

Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Keys, values and queries of a sequence of tokens."""


OF_FIRST_PACKING = {
    "squat:paper=true": "the paper's subspace is that of the whole prompt's queries",
    "squat_pre:paper=true": "the paper's subspace is that of the whole prompt's queries",
    "innerq:paper=true": "the paper's norms are those of the whole prompt's keys",
    "qjl_outliers": "the paper's outlier channels are those of the whole prompt's keys",
    "gear:paper=true": "the paper's basis is that of the whole prompt's residual",
    "zipcache:paper=true": "the paper's probes and norms are those of the whole prompt",
}
"""Methods whose content depends, by definition, on which tokens there are when a sequence packs first, and why.

test_cache.py has a test that this list is complete and that nothing is on it without need."""


def dividing(method: str, head_dim: int) -> str:
    """A method's string whose groups divide ``head_dim``: of 16 elements where 32 do not, if it has such groups."""
    smaller = f"{method}{',' if ':' in method else ':'}group=16"
    try:
        get(smaller)
    except MethodError:
        return method
    return smaller if head_dim % 32 else method


def until_packed(method: str, cuts: Sequence[int]) -> int:
    """How many of the calls there are until a sequence has packed something; all of them where nothing packs."""
    of, at = layer(method), 0
    for count, size in enumerate(cuts):
        at += size
        if of.packed_length(at):
            return count + 1
    return len(cuts)


def stored_bytes(form: Format, blocks: int) -> int:
    """Bytes of blocks of one KV head and of the statistics of their pages."""
    pages = form.page_bytes * form.pages(blocks) if isinstance(form, PagedFormat) and form.page else 0
    return form.block_bytes * blocks + pages


def rope(head_dim: int = 64) -> Rope:
    return Rope(10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim))


def spec(head_dim: int = 64, heads: int = 4, kv_heads: int = 2, **options: object) -> LayerSpec:
    options = {"layer_idx": 0, "num_layers": 2, "dtype": current().dtype, "rope": rope(head_dim), **options}
    return LayerSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **options)  # type: ignore[arg-type]


def layer(method: str | Method, shape: LayerSpec | None = None, **options: object) -> FoldedLayer:
    """A layer of its own; on a GPU packed as the kernel reads that would serve it in a model."""
    method, shape = get(method), shape or spec()
    if current().is_gpu:
        shape = packed_for(method, shape, current().device, None)
    return FoldedLayer(method, shape, **options)  # type: ignore[arg-type]


def tokens(batch: int, count: int, seed: int = 0, shape: LayerSpec | None = None, dtype=None) -> Tokens:
    """Random keys with channels of their own mean and size (as real keys have), values and queries; the same everywhere."""
    shape = shape or spec()
    generator = torch.Generator().manual_seed(seed)

    def randn(heads: int, n: int = count) -> torch.Tensor:
        return torch.randn(batch, heads, n, shape.head_dim, generator=generator)

    keys = randn(shape.num_kv_heads) * (1 + randn(shape.num_kv_heads, 1).abs()) + 2 * randn(shape.num_kv_heads, 1)
    new = (keys, randn(shape.num_kv_heads), randn(shape.num_heads))
    return tuple(t.to(current().device, dtype or current().dtype) for t in new)  # type: ignore[return-value]


def left_padding(lengths: Sequence[int], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns before each sequence's first token, int64 [batch], and which columns are real, bool [batch, width]."""
    offset = width - torch.tensor(lengths, device=current().device)
    return offset, torch.arange(width, device=current().device) >= offset.unsqueeze(-1)


def feed(
    to: FoldedLayer,
    new: Tokens,
    cuts: Sequence[int] | None = None,
    valid: torch.Tensor | None = None,
    start: int = 0,
    offset: torch.Tensor | None = None,
) -> FoldedLayer:
    """Append tokens in calls of ``cuts`` tokens each; ``start`` is the position of the first column."""
    keys, values, queries = new
    count = keys.shape[-2]
    positions = torch.arange(start, start + count, device=keys.device).expand(keys.shape[0], -1)
    if offset is not None:
        positions = positions - offset.unsqueeze(-1)
    at = 0
    for size in cuts or [count]:
        part = slice(at, at + size)
        k, v = to.update(keys[:, :, part].clone(), values[:, :, part].clone())
        ok = None if valid is None or bool(valid[:, part].all()) else valid[:, part]
        to.append(k, v, queries[:, :, part], ok, positions[:, part])
        at += size
    assert at == count
    return to


def packed_fields(of: FoldedLayer, row: int) -> list[Fields]:
    """The packed bytes of one sequence: keys' and values' fields over all of its blocks."""
    blocks = of.packed[row] // of.block
    sides = []
    for side, form in (("keys", of.key_format), ("values", of.value_format)):
        names = getattr(of.slabs[0], side) if len(of.slabs) and blocks else {}
        whole = {n: torch.cat([getattr(s, side)[n] for s in of.slabs], 2) for n in names}
        sides.append({n: t[row] for n, t in form.take(whole, blocks).items()})
    return sides


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


DENSE = ("qjl", "turboquant", "gear", "vqllm", "gsrq", "zipcache")
"""Methods that kernels encode, but for some of their variants: those, Torch encodes by products."""


def difference(a: FoldedLayer, b: FoldedLayer, row_a: int = 0, row_b: int = 0) -> str | None:
    """What of one sequence's content is not the same in both layers to the last bit; None if all of it is.

    On a GPU the last bit of a library's matrix product may depend on how many tokens it is given. So what such a product
    encodes (not what kvfold's kernels encode) may differ there in a few elements, by no more than rounding does.
    """
    if (a.lens[row_a], a.packed[row_a]) != (b.lens[row_b], b.packed[row_b]):
        return f"{a.lens[row_a]} tokens, {a.packed[row_a]} packed; {b.lens[row_b]} tokens, {b.packed[row_b]} packed"
    multiplied = a.encoder.name != "triton" and any(name in str(a.method) for name in DENSE)
    multiplied |= "commvq" in str(a.method)  # its values' kernels begin with a library's products
    rounds = current().is_gpu and (multiplied or not a.method.kernel_encodes)
    for left, right in zip(packed_fields(a, row_a), packed_fields(b, row_b), strict=True):
        assert left.keys() == right.keys()
        for name in left:
            if rounds and left[name].shape == right[name].shape:
                same = (left[name] != right[name]).sum() <= max(4, left[name].numel() // 1000)
            else:
                same = same_bytes(left[name], right[name])
            if not same:
                return f"packed {name} differ"
    if not a.lens[row_a]:
        return None
    for name, left, right in zip(("keys", "values"), a.decoded(row_a), b.decoded(row_b), strict=True):
        assert not left.isnan().any(), f"{name} hold NaN"
        if not (relative(left, right) < 1e-2 if rounds else torch.equal(left, right)):
            return f"decoded {name} differ by {(left - right).abs().max():.3g}"
    return None


def assert_same_content(a: FoldedLayer, b: FoldedLayer, row_a: int = 0, row_b: int = 0) -> None:
    """One sequence's content is the same in both layers: see :func:`difference`."""
    found = difference(a, b, row_a, row_b)
    assert found is None, found


BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(model_class: type, config_class: type, implementation: str | None = None, **options: object):
    """A tiny model of random weights, the same on every target."""
    torch.manual_seed(0)
    config = config_class(**{**BASE, **options})
    if implementation:
        config._attn_implementation = implementation
    model = model_class(config).eval().to(current().device)
    for parameter in model.parameters():  # not the rotary frequencies, which models keep in float32
        parameter.data = parameter.data.to(current().dtype)
    return model


def llama(**options: object) -> LlamaForCausalLM:
    return build(LlamaForCausalLM, LlamaConfig, **options)


def prompt(batch: int, count: int, seed: int = 0, vocab: int = 96) -> torch.Tensor:
    ids = torch.randint(3, vocab, (batch, count), generator=torch.Generator().manual_seed(seed))
    return ids.to(current().device)


@torch.no_grad()
def logits(model, cache, ids: torch.Tensor, cuts: Sequence[int] | None = None, mask: torch.Tensor | None = None):
    """Logits of ``ids`` passed through ``cache`` in calls of ``cuts`` tokens; position ids count real tokens."""
    out, at = [], 0
    for size in cuts or [ids.shape[1]]:
        extra = {}
        if mask is not None:
            positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
            extra = {"attention_mask": mask[:, : at + size], "position_ids": positions[:, at : at + size]}
        out.append(model(ids[:, at : at + size], **passing(model, cache), use_cache=True, **extra).logits)
        at += size
    return torch.cat(out, 1)


def dynamic(model) -> DynamicCache:
    return DynamicCache(config=model.config)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """RMS of the difference relative to that of ``b``."""
    a, b = a.cpu().double(), b.cpu().double()
    return float((a - b).norm() / b.norm())


def multiprocessors(count: int) -> Callable[[torch.device], DeviceInfo]:
    """``device_info`` of devices that have ``count`` multiprocessors, and else are what they are."""
    return lambda device: replace(device_info(device), sms=count)


ENCODING = (
    *(f"kvfold.kernels.common._encode_{room}" for room in ("groups", "words", "tile", "step")),
    *("kvfold.kernels.fold._encode_codes", "kvfold.kernels.common._encode_nearest"),
)
"""Rooms whose kernels :mod:`kvfold.kernels.affine.encode` launches, in the order of their imports."""


def interpreted_module(name: str, *uses: str) -> ModuleType:
    """A second copy of a module whose Triton kernels run in the interpreter; the imported one keeps kernels that compile.

    ``uses``: modules whose kernels it imports, in the order of their imports; they are copied alike.
    """
    import triton

    quicken()
    kept = {one: sys.modules.get(one) for one in uses}
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        for one in uses:
            sys.modules[one] = _copy_of_module(one)
        return _copy_of_module(name)
    finally:
        triton.knobs.runtime.interpret = before
        for one, module in kept.items():
            sys.modules.pop(one, None)
            if module is not None:
                sys.modules[one] = module


def _copy_of_module(name: str) -> ModuleType:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None and found.loader is not None
    alias = name.replace(".", "_") + "_interpreted"
    copy = importlib.util.spec_from_file_location(alias, found.origin)
    assert copy is not None and copy.loader is not None
    module = importlib.util.module_from_spec(copy)
    sys.modules[alias] = module  # the interpreter looks kernels up by their module's name
    copy.loader.exec_module(module)
    return module

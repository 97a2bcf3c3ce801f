"""What attends to a layer and what encodes it: decided by its method, its shapes and the device, once, and read by explain."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kvfold import kernels
from kvfold.errors import KVFoldError
from kvfold.formats import (
    AffineGroups,
    Balanced,
    Dense,
    Format,
    GroupCodes,
    LowRank,
    MixedTokens,
    Outliers,
    Paged,
    Projected,
)
from kvfold.formats.binary import BinaryCodes
from kvfold.formats.codebook import AdditiveCodes
from kvfold.formats.paged import plain
from kvfold.formats.residual import ResidualCodes
from kvfold.kernels import Choice
from kvfold.kernels.compiling import compiling
from kvfold.kernels.device import launching
from kvfold.methods import LayerSpec, Method


@contextmanager
def _trying(device: torch.device) -> Iterator[None]:
    """Within, kernels are compiled and compared with the reference on a device; that they are compiled is said."""
    if device.type == "cuda":
        compiling.listen()
    with launching(device):
        yield


def choose_kernel(
    method: Method, spec: LayerSpec, device: torch.device, kernel: str | None = None, dtype: torch.dtype | None = None
) -> Choice:
    """What attends to a layer on a device.

    Parameters
    ----------
    kernel : str or None
        Insist on this one.
    dtype : torch.dtype or None
        Of queries and windows; None: the spec's.

    Raises
    ------
    KVFoldError
        If the named kernel is unknown or does not support the layer.
    """
    formats = plain(method.key_format(spec)), method.value_format(spec)
    rows = spec.num_heads // spec.num_kv_heads
    rotary = 2 * spec.rope.inv_freq.numel() if method.pre_rope and spec.rope is not None else 0
    with _trying(device):
        return kernels.choose(
            *formats, device, method.pre_rope, kernel, dtype or spec.dtype, spec.softcap, rows, rotary
        )


def packed_for(method: Method, spec: LayerSpec, device: torch.device, kernel: str | None) -> LayerSpec:
    """The spec with codes packed for tensor cores or in plain order, whichever the better kernel reads; where it makes no
    difference, plain on a CPU. Kernels that rotate keys packed for tensor cores rotate all of their channels."""
    if spec.rope is not None and 2 * spec.rope.inv_freq.numel() < spec.head_dim:
        return replace(spec, fragments=False)
    on_cpu = device.type == "cpu"
    orders = (replace(spec, fragments=fragments) for fragments in (not on_cpu, on_cpu))
    return min(orders, key=lambda spec: _rank(method, spec, device, kernel))


def wants_plain_order(method: Method, spec: LayerSpec, device: torch.device, kernel: str | None) -> bool:
    """Whether a kernel reads a layer's codes in plain order, and at most the reference those packed for tensor cores. On a CPU
    codes keep their order, for they may go back to a GPU."""
    if device.type == "cpu":
        return False
    fused, plain_order = (
        _rank(method, replace(spec, fragments=fragments), device, kernel) for fragments in (True, False)
    )
    return plain_order < list(kernels.REGISTRY).index("reference") <= fused


def _rank(method: Method, spec: LayerSpec, device: torch.device, kernel: str | None) -> int:
    """Place in the registry of what attends to a layer."""
    try:
        choice = choose_kernel(method, spec, device, kernel)
    except KVFoldError:  # the named kernel does not read this order
        return len(kernels.REGISTRY)
    return list(kernels.REGISTRY).index(choice.kernel.name)


@dataclass(frozen=True)
class Encoder:
    """What encodes a layer, and why: the kernels of :mod:`kvfold.kernels.affine.encode` and :mod:`kvfold.kernels.fold.encode`
    ("triton") or the method's and formats' own operations ("torch")."""

    name: str
    reason: str
    closes: bool = True

    @property
    def in_graphs(self) -> bool:
        """Whether a decode graph's steps close blocks themselves, by lengths on the device (its kernels ``closes`` them so); if
        not, blocks are closed between two steps."""
        return self.name == "triton" and self.closes

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_encoder(method: Method, spec: LayerSpec, device: torch.device, plain: bool = False) -> Encoder:
    """What encodes a layer on this device; ``plain``: not a kernel, wherever it is."""
    if plain:
        return Encoder("torch", "no kernel was asked for")
    if device.type == "cpu":
        return Encoder("torch", "encoding kernels run on cuda")
    if not method.kernel_encodes:
        return Encoder("torch", f"{method.name} transforms what it stores in a way that no kernel computes")
    with _trying(device):
        why = _why_not(method, spec, device)
    formats = method.key_format(spec), method.value_format(spec)
    closes = not any_searched(formats) and not is_mixed(formats) and not any(isinstance(f, LowRank) for f in formats)
    return Encoder("torch", why) if why else Encoder("triton", "first choice", closes)


def _why_not(method: Method, spec: LayerSpec, device: torch.device) -> str | None:
    """Why kernels cannot encode a layer; None if they can."""
    from kvfold.kernels.affine import encode
    from kvfold.kernels.dense import encode as encode_dense

    formats = method.key_format(spec), method.value_format(spec)
    if is_mixed(formats):
        from kvfold.kernels.fragments import encode_mixed

        return encode_mixed.why_not(*formats, method.most_probes, device)
    if is_dense(formats):
        return next((why for form in formats if (why := encode_dense.why_not(form, device))), None)
    width = method.slice_width(spec.head_dim)
    if any_searched(formats) or has_pages(formats):
        if width is not None:
            return "keys: an update of following channels beside statistics per page"
        if method.pre_rope and not is_searched(formats[0]):
            return f"keys: {formats[0].kind} storage before RoPE"
        return _neither(formats, device)
    keys, values = plain(formats[0]), formats[1]
    for side, form, cut in (("keys", keys, width), ("values", values, None)):
        if why := encode.why_not(form, device, cut):
            return f"{side}: {why}"
    assert isinstance(keys, AffineGroups) and isinstance(values, AffineGroups)
    return encode.self_test(keys, values, width, device) if torch.cuda.is_available() else None


def _neither(formats: tuple[Format, Format], device: torch.device) -> str | None:
    """Why not each side has kernels of :mod:`kvfold.kernels.searched.encode` or :mod:`kvfold.kernels.fold.encode`."""
    from kvfold.kernels.fold import encode as encode_pages
    from kvfold.kernels.fragments import encode_rank
    from kvfold.kernels.searched import encode as encode_search

    for side, form in zip(("keys", "values"), formats, strict=True):
        if is_searched(form):
            why = encode_search.why_not(form, device)
        elif isinstance(form, LowRank):
            why = encode_rank.unsupported(form)
        else:
            why = encode_pages.why_not(form, device)
        if why:
            return f"{side}: {why}"
    if not torch.cuda.is_available():
        return None
    whys = [encode_rank.self_test(form, device) for form in formats if isinstance(form, LowRank)]
    keys, values = (None if is_searched(form) or isinstance(form, LowRank) else form for form in formats)
    if any(whys) or (keys is None and values is None):
        return next(filter(None, whys), None)
    return encode_pages.self_test(keys, values, device)


def is_dense(formats: tuple[Format, Format]) -> bool:
    """Whether vectors are stored as they are."""
    return all(isinstance(form, Dense) for form in formats)


def is_searched(form: Format) -> bool:
    """Whether the kernels of :mod:`kvfold.kernels.searched.encode` are those that may encode a side."""
    return isinstance(
        form, ResidualCodes | GroupCodes | Outliers | AdditiveCodes | BinaryCodes | Projected
    ) or _is_tile(form)


def any_searched(formats: tuple[Format, Format]) -> bool:
    """Whether they may encode either side; those of :mod:`kvfold.kernels.fold.encode` then encode the other."""
    return any(map(is_searched, formats))


def _is_tile(form: Format) -> bool:
    """Whether tiles are rotated, or balanced, before their affine groups: :mod:`kvfold.kernels.searched.tiles`."""
    inner = form.inner if isinstance(form, Paged) and not form.page_fields() else form
    return isinstance(inner, Balanced) or (isinstance(inner, AffineGroups) and inner is not form)


def is_mixed(formats: tuple[Format, Format]) -> bool:
    """Whether blocks have two precisions: :mod:`kvfold.kernels.fragments.encode_mixed`."""
    return isinstance(formats[0], MixedTokens)


def has_pages(formats: tuple[Format, Format]) -> bool:
    """Whether the kernels for affine groups alone, whose statistics belong to a sequence, cannot serve these formats."""
    return not all(isinstance(plain(form), AffineGroups) for form in formats)

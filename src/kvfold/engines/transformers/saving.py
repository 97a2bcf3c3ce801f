"""Folded caches as files: what a prompt's prefill computed, kept for another process or another day.

A file is safetensors, with one JSON text in its metadata: the method, the model's hashes, the versions, and what a layer
counts. Only tokens are stored, no spare capacity. A checksum covers metadata and tensors. Nothing in a file is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
import transformers
from safetensors.torch import save_file

from kvfold import files
from kvfold.arithmetic import storing
from kvfold.artefact import checksum, config_hash, first_line, load_cached, read_checked, weights_hash
from kvfold.engines.transformers.hybrid import FoldedHybridLayer
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import CacheFileError, CacheStateError
from kvfold.formats import Format, PagedFormat
from kvfold.formats.order import reorderable, reordered
from kvfold.methods import Method
from kvfold.methods.learned import places
from kvfold.plan import wants_plain_order
from kvfold.storage.sequences import COUNTS
from kvfold.storage.slabs import Slab
from kvfold.version import __version__

SCHEMA = 1
"""Raised whenever a file's layout, or the meaning of any format's bytes, changes."""

KEY = "kvfold_cache"

SIDES = ("key", "value")

Tensors = dict[str, torch.Tensor]


class Cache(Protocol):
    """A folded cache, as far as a file asks."""

    @property
    def layers(self) -> Sequence[Any]: ...

    @property
    def method(self) -> Method: ...

    @property
    def model(self) -> torch.nn.Module | None: ...


# ---- entry points ----------------------------------------------------------------------------------------------------


def save(cache: Cache, path: str | os.PathLike[str]) -> None:
    """Write a folded cache to a file, in one step; see :meth:`kvfold.FoldedCache.save`."""
    model = cache.model
    if model is None:
        raise CacheStateError(
            "cache: the model that it was folded for is gone, so the file could not say whose it is; save while the model "
            "exists"
        )
    layers, tensors = contents(cache)
    fields = {
        "schema": SCHEMA,
        "method": str(cache.method),
        "artefacts": _artefacts(cache),
        "model": identity(model),
        "versions": {
            "kvfold": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "layers": layers,
    }
    fields["sha256"] = checksum(fields, tensors)
    _write(path_of(path), tensors, {KEY: json.dumps(fields, sort_keys=True)})


def contents(cache: Cache) -> tuple[list[dict[str, Any]], Tensors]:
    """What a cache holds: a layer's counts as plain data, one dict each, and tensors on the CPU."""
    tensors: Tensors = {}
    layers = [_described(layer, f"layers.{i}.", tensors) for i, layer in enumerate(cache.layers)]
    return layers, {name: t.contiguous() for name, t in tensors.items()}


@storing
def fill(
    cache: Cache, layers: list[dict[str, Any]], tensors: Tensors, devices: list[torch.device], max_length: int = 0
) -> None:
    """Make a fresh cache what :func:`contents` saw, each layer on its device; ``max_length``: see :func:`kvfold.load_cache`."""
    for i, (layer, told) in enumerate(zip(cache.layers, layers, strict=True)):
        _restore(layer, told, f"layers.{i}.", tensors, devices[i], max_length)


@storing
def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of a file that is whole.

    Raises
    ------
    CacheFileError
        If it is missing, not a cache, of a newer schema, cut short or changed.
    """
    return read_checked(
        path, KEY, SCHEMA, "cache", "cache.save wrote", "upgrade kvfold, or prefill again", CacheFileError
    )


# ---- whose it is -----------------------------------------------------------------------------------------------------


def identity(model: torch.nn.Module) -> dict[str, str]:
    """What must agree for a cache to mean the same to another model."""
    config: Any = model.config
    if any(parameter.is_meta for parameter in model.parameters()):
        raise CacheFileError(
            "cache: some of the model's weights are not in memory (meta tensors), so a file could not say whose it is; "
            "load the model without offloading"
        )
    return {
        "name": str(getattr(config, "_name_or_path", "") or type(model).__name__),
        "dtype": str(model.dtype).removeprefix("torch."),
        "config_hash": config_hash(config),
        "weights_hash": weights_hash(model),
        "adapters": ",".join(_adapters(model)),
    }


def _adapters(model: torch.nn.Module) -> list[str]:
    """PEFT's adapters that take part in the model's calls; those of which there are weights only do not."""
    tuned: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)]
    return sorted({name for m in tuned if not m.disable_adapters for name in m.active_adapters})


def _artefacts(cache: Cache) -> list[str]:
    """Checksums of what the method learned."""
    return [load_cached(place).metadata()["sha256"] for place in places(cache.method)]


# ---- layers ----------------------------------------------------------------------------------------------------------


def _described(layer: Any, at: str, tensors: Tensors) -> dict[str, Any]:
    """A layer as plain data; its tensors go into ``tensors`` under names that begin with ``at``."""
    if isinstance(layer, FoldedHybridLayer):
        return _folded(layer, at, tensors) | {"states": _plain_data(layer.states(), f"{at}states", tensors)}
    if isinstance(layer, FoldedLayer):
        return _folded(layer, at, tensors)
    attributes = {name: _plain_data(value, at + name, tensors) for name, value in vars(layer).items()}
    return {"class": type(layer).__name__, "attributes": attributes}


def _restore(
    layer: Any, told: dict[str, Any], at: str, tensors: Tensors, device: torch.device, max_length: int
) -> None:
    """Make a fresh layer what :func:`_described` saw."""
    kind = "folded" if isinstance(layer, FoldedLayer) else type(layer).__name__
    if told["class"] != kind:
        raise CacheFileError(
            f"cache: {at.rstrip('.')} is of class {told['class']} in the file and {kind} here; "
            "load it with the versions that wrote it"
        )
    if isinstance(layer, FoldedLayer):
        _refold(layer, told, at, tensors, device, max_length)
        if isinstance(layer, FoldedHybridLayer):
            for name, value in _revived(told["states"], tensors, device).items():
                setattr(layer, name, value)
        return
    for name, value in told["attributes"].items():
        setattr(layer, name, _revived(value, tensors, device))


def _folded(layer: FoldedLayer, at: str, tensors: Tensors) -> dict[str, Any]:
    layer.own()
    if layer.pending:
        raise CacheStateError("cache: a call is under way; save between calls")
    told: dict[str, Any] = {
        "class": "folded",
        "max_length": layer.max_length,
        "initialized": layer.is_initialized,
        **_counts(layer),
    }
    if not layer.is_initialized:
        return told
    tokens = [n - min(n, layer.method.sink) - p for n, p in zip(layer.lens, layer.packed, strict=True)]
    first = min(layer.method.sink, max(layer.lens, default=0))
    for side, sink, form in zip(SIDES, layer.sink, layer.layout.formats, strict=True):
        tensors[f"{at}{side}.sink"] = _rows(sink, [min(n, first) for n in layer.lens], first)
        for name, tensor in _packed(layer, side, form).items():
            tensors[f"{at}{side}.{name}"] = tensor
    recent = [layer.ring.read(slice(i, i + 1), layer.packed[i], layer.packed[i] + n) for i, n in enumerate(tokens)]
    for i, side in enumerate(SIDES):
        tensors[f"{at}{side}.recent"] = _stacked([pair[i] for pair in recent])
    for side, shared in zip(SIDES, layer.slabs.shared, strict=True):
        tensors.update({f"{at}{side}.shared.{name}": t.cpu() for name, t in shared.items()})
    cut = [row.values() for row in layer.writer.cuts.rows]
    for i, side in enumerate(SIDES):
        if parts := [pair[i] for row in cut for pair in row]:
            tensors[f"{at}{side}.cut"] = torch.cat(parts, 1).cpu()
    if masks := layer.columns.tensors():
        tensors[f"{at}valid"] = torch.cat(masks, -1).cpu()
    following = layer.following
    tensors.update({f"{at}state.{name}": t.cpu() for name, t in following.state.items()})
    slots = None
    if following.ring is not None:
        ring, slots = following.ring, following.ring.shape[2]
        held = [torch.arange(k, max(n, k), device=ring.device) % slots for k, n in _spans(layer)]
        tensors[f"{at}queries"] = _stacked([ring[i : i + 1, :, at_] for i, at_ in enumerate(held)])
    return {
        **told,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "fragments": layer.spec.fragments,
        "rotary": _rotary(layer),
        "formats": [_layout(form) for form in layer.layout.formats],
        "ring": layer.ring.slots,
        "slabs": [[slab.first, slab.blocks] for slab in layer.slabs],
        "calls": [[n, valid is not None] for n, valid in layer.columns.calls],
        "shared": [sorted(side) for side in layer.slabs.shared],
        "cuts": [[[start, keys.shape[1]] for start, (keys, _) in row.items()] for row in layer.writer.cuts.rows],
        "state": sorted(following.state),
        "made": following.made,
        "kept": following.kept,
        "slots": slots,
    }


def _rotary(layer: FoldedLayer) -> int:
    """Channels of keys that are rotated as they are read; 0: they are stored as attention meets them."""
    rope = layer.spec.rope
    return 0 if rope is None else 2 * rope.inv_freq.numel()


def _refold(
    layer: FoldedLayer, told: dict[str, Any], at: str, tensors: Tensors, device: torch.device, max_length: int
) -> None:
    if not told["initialized"]:
        _count(layer, told)
        return
    layer.layout.pack_as(told["fragments"])
    layer.layout.store_in(getattr(torch, told["dtype"]))
    if told["formats"] != [_layout(form) for form in layer.layout.formats]:
        raise CacheFileError(f"cache: {at.rstrip('.')} has other storage formats than {layer.method} has here")
    # files of before say nothing: they had keys of layers without positions un-rotated, though nothing had rotated them
    if told.get("rotary", -1 if layer.method.pre_rope and not _rotary(layer) else _rotary(layer)) != _rotary(layer):
        raise CacheFileError(
            f"cache: keys of {at.rstrip('.')} are stored by another rotation than {layer.method} has here; prefill again"
        )
    if (
        told["fragments"]
        and all(map(reorderable, layer.layout.formats))
        and wants_plain_order(layer.method, layer.spec, device, layer.kernel_name)
    ):
        tensors = _in_plain_order(layer, at, tensors)
    layer.following.spec = layer.spec
    batch = len(told["lens"])
    layer.start(batch, getattr(torch, told["dtype"]), device)
    _count(layer, told)
    sinks, recents = ([tensors[f"{at}{side}.{name}"].to(device) for side in SIDES] for name in ("sink", "recent"))
    layer.sink.fit(sinks[0].shape[2])
    for window, sink in zip(layer.sink, sinks, strict=True):
        window[:, :, : sink.shape[2]] = sink
    layer.ring.widen(told["ring"])
    for row in range(batch):
        start, stop = layer.packed[row], max(layer.lens[row] - layer.method.sink, 0)
        if stop > start:
            layer.ring.write(slice(row, row + 1), start, stop, *(t[row : row + 1] for t in recents))
    _fill(layer, told["slabs"], at, tensors, max_length)
    keys, values = (
        {name: tensors[f"{at}{side}.shared.{name}"].to(device, copy=True) for name in names}
        for side, names in zip(SIDES, told["shared"], strict=True)
    )
    layer.slabs.shared = (keys, values)
    _recut(layer, told.get("cuts", []), at, tensors)
    layer.columns.calls, column = [], 0
    for count, masked in told["calls"]:
        valid = tensors[f"{at}valid"][:, column : column + count].to(device, copy=True) if masked else None
        column += count if masked else 0
        layer.columns.calls.append((count, valid))
    following = layer.following
    following.made, following.kept = told["made"], told["kept"]
    following.state = {name: tensors[f"{at}state.{name}"].to(device, copy=True) for name in told["state"]}
    following.ring = None
    if told["slots"] is not None:
        queries = tensors[f"{at}queries"].to(device)
        following.ring = torch.empty(
            batch, queries.shape[1], told["slots"], queries.shape[3], dtype=queries.dtype, device=device
        )
        for row, (kept, length) in enumerate(_spans(layer)):
            slots = torch.arange(kept, max(length, kept), device=device) % told["slots"]
            following.ring[row, :, slots] = queries[row, :, : len(slots)]


def _in_plain_order(layer: FoldedLayer, at: str, tensors: Tensors) -> Tensors:
    """A file's tensors, with a layer's codes in plain order, which the layer then has."""
    old = layer.layout.formats
    layer.layout.pack_as(False)
    found = dict(tensors)
    for side, was, now in zip(SIDES, old, layer.layout.formats, strict=True):
        stored = {n: tensors[f"{at}{side}.{n}"] for n in was.fields() if f"{at}{side}.{n}" in tensors}
        if stored:
            found |= {f"{at}{side}.{n}": t for n, t in reordered(stored, was, now).items()}
    return found


def _recut(layer: FoldedLayer, cuts: list[list[list[int]]], at: str, tensors: Tensors) -> None:
    """What the layer remembers of blocks that were cut; files of before have nothing of it."""
    used = 0
    for row, told in zip(layer.writer.cuts.rows, cuts, strict=False):
        for start, count in told:
            keys, values = (
                tensors[f"{at}{side}.cut"][:, used : used + count].to(layer.device, copy=True) for side in SIDES
            )
            row[start], used = (keys, values), used + count


def _counts(layer: FoldedLayer) -> dict[str, Any]:
    """What a layer counts on the host."""
    return {
        **{name: getattr(layer.sequences, name) for name in COUNTS},
        "columns": layer.columns.count,
        "newest": layer.columns.newest,
        "fixed": layer.slabs.fixed,
        "longest": layer.ring.longest,
        "recording": layer.writer.recording,
    }


def _count(layer: FoldedLayer, told: dict[str, Any]) -> None:
    """Inverse of :func:`_counts`."""
    for name in COUNTS:
        setattr(layer.sequences, name, told[name])
    layer.columns.count, layer.columns.newest = told["columns"], told["newest"]
    layer.slabs.fixed, layer.ring.longest = told["fixed"], told["longest"]
    layer.writer.recording = told["recording"]


def _fill(layer: FoldedLayer, slabs: list[list[int]], at: str, tensors: Tensors, max_length: int) -> None:
    """Packed storage with the capacity it had; with a ``max_length`` in one piece."""
    have = max(layer.packed) // layer.block
    if max_length and slabs:
        wanted = max(have, layer.packed_length(max_length) // layer.block)
        slabs = [[0, -(-wanted // layer.layout.page_blocks) * layer.layout.page_blocks]]
    for first, blocks in slabs:
        sides = []
        for side, form in zip(SIDES, layer.layout.formats, strict=True):
            fields = form.allocate(len(layer.sequences), layer.spec.num_kv_heads, blocks, layer.device)
            used = max(min(first + blocks, have) - first, 0)
            if used:
                stored = {name: tensors[f"{at}{side}.{name}"] for name in fields}
                for name, part in form.take(stored, used, first).items():
                    fields[name][:, :, : part.shape[2]] = part.to(layer.device)
            sides.append(fields)
        layer.slabs.slabs.append(Slab(first, blocks, *sides))


def _packed(layer: FoldedLayer, side: str, form: Format) -> Tensors:
    """Fields of the packed blocks of all sequences, slabs joined; zero beyond a shorter sequence's."""
    blocks = [n // layer.block for n in layer.packed]
    have = max(blocks, default=0)
    used = [
        form.take(slab.keys if side == "key" else slab.values, min(slab.blocks, have - slab.first))
        for slab in layer.slabs
        if slab.first < have
    ]
    if not used:
        return {}
    pages = form.page_fields() if isinstance(form, PagedFormat) and form.page else {}
    found = {}
    for name in used[0]:
        whole = torch.cat([fields[name].cpu() for fields in used], 2)
        counts = [form.pages(n) if name in pages and isinstance(form, PagedFormat) else n for n in blocks]
        found[name] = _rows(whole, counts, whole.shape[2])
    return found


def _layout(form: Format) -> dict[str, list[Any]]:
    """Names, shapes and dtypes of what a format stores, per block and per page."""
    fields = dict(form.fields())
    if isinstance(form, PagedFormat):
        fields |= {f"page.{name}": what for name, what in form.page_fields().items()}
    return {name: [list(shape), str(dtype).removeprefix("torch.")] for name, (shape, dtype) in fields.items()}


def _spans(layer: FoldedLayer) -> list[tuple[int, int]]:
    """First and last-but-one token of each sequence whose query is kept."""
    return list(zip(layer.following.kept, layer.lens, strict=True))


def _rows(tensor: torch.Tensor, counts: list[int], width: int) -> torch.Tensor:
    """The first ``width`` entries of dimension 2, on the CPU; zero beyond each row's count."""
    part = tensor[:, :, :width].cpu()
    if any(count < width for count in counts):
        part = part.clone()
        for row, count in enumerate(counts):
            part[row, :, count:] = 0
    return part


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """One sequence after the other, [1, heads, n, d] each, on the CPU; zeros follow shorter ones."""
    longest = max(part.shape[2] for part in parts)
    whole = parts[0].new_zeros(len(parts), parts[0].shape[1], longest, parts[0].shape[3], device="cpu")
    for row, part in enumerate(parts):
        whole[row, :, : part.shape[2]] = part[0]
    return whole


# ---- layers of Transformers' own -------------------------------------------------------------------------------------


def _plain_data(value: Any, at: str, tensors: Tensors) -> Any:
    """An attribute as JSON; tensors beside it, under ``at``."""
    if isinstance(value, torch.Tensor):
        tensors[at] = value.detach().cpu()
        return {"tensor": at}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, dict) and all(isinstance(key, int | str) for key in value):
        return {"dict": [[key, _plain_data(item, f"{at}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_plain_data(item, f"{at}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CacheFileError(f"cache: {at} is a {type(value).__name__}, which cannot be saved")


def _revived(value: Any, tensors: Tensors, device: torch.device) -> Any:
    """Inverse of :func:`_plain_data`, on ``device``."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner].to(device, copy=True)
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "device":
        return device
    if kind == "dict":
        return {key: _revived(item, tensors, device) for key, item in inner}
    return [_revived(item, tensors, device) for item in inner]


# ---- places ----------------------------------------------------------------------------------------------------------


def path_of(given: str | os.PathLike[str]) -> Path:
    try:
        return files.expanded(given)
    except TypeError:
        plain = given is None or isinstance(given, bool | int | float | bytes)
        what = f"{given!r:.80}" if plain else f"{type(given).__name__} object"  # a model's text is a page
        raise CacheFileError(f"cache: {what} is not a file name; allowed: text, or a path") from None


def _write(path: Path, tensors: Tensors, metadata: dict[str, str]) -> None:
    try:
        files.write(path, lambda name: save_file(tensors, name, metadata=metadata))
    except (OSError, safetensors.SafetensorError) as error:  # safetensors wraps the system's errors
        raise CacheFileError(f"cache: cannot write {path}: {first_line(error)}") from error


__all__ = ["SCHEMA", "read", "save"]

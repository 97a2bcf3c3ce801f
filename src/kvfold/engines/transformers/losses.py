"""What a model loses when one layer's keys, or values, are quantized alone: of every layer, side and number of bits at once.

The loss of a small change of what a layer has stored is half of the change's square under the Fisher information of the
predictions, ``d' F d / 2`` nats (the second order of the KL divergence). ``F = J' (diag(p) - p p') J`` is not formed: with
``e`` normal, ``u = sqrt(p) e - p (sqrt(p) . e)`` has the covariance ``diag(p) - p p'``, and the gradient of ``u . logits`` with
respect to the stored keys is ``J' u``. So the mean of ``(J' u . d)^2 / 2`` over a few draws of ``e`` is the loss, and one
backward pass serves all layers and all numbers of bits. Errors of different pages and KV heads are taken to be independent: a
page's own statistics are all that is common to a page's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, PreTrainedModel

from kvfold.engines.transformers import names, originals, restarts
from kvfold.engines.transformers.making import make_cache
from kvfold.engines.transformers.probes import Probe
from kvfold.engines.transformers.shared import SharedPrompt, Taken, taking
from kvfold.errors import KVFoldError
from kvfold.formats import PAGE
from kvfold.methods import Method, get
from kvfold.methods.losses import SIDES, Key, Losses, Side

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvfold.engines.transformers.cache import FoldedCache

DRAWS = 8
"""Gradients per prompt."""

Variants = Mapping[Side, Mapping[int, Method]]
"""Side and bits to a method that stores that side with so many."""


def measure(
    model: PreTrainedModel,
    probes: Sequence[Probe],
    variants: Variants,
    on_step: Callable[[str], None] | None = None,
) -> dict[str, Losses]:
    """Losses by kind of prompt, nats per predicted token.

    Parameters
    ----------
    model
        Not folded; afterwards it is not folded either.
    probes
        Prompts; those of a kind are averaged.
    variants
        What is compared.
    on_step
        Called after each of :func:`steps` steps, with what was done.

    Raises
    ------
    KVFoldError
        Nothing is packed of a prompt, or a loss is not finite.
    """
    kinds = list(dict.fromkeys(probe.kind for probe in probes))
    sums: dict[str, dict[Key, float]] = {kind: {} for kind in kinds}
    cost: dict[Key, float] = {}
    elements: dict[int, int] = {}
    say = on_step or (lambda what: None)
    with _evaluating(model):
        for number, probe in enumerate(probes, 1):
            what = f"prompt {number} of {len(probes)}"
            stored = _Stored(model, probe.ids[:, : probe.prefilled].to(model.device))
            elements |= stored.elements
            say(f"{what}: read")
            changes: dict[Key, torch.Tensor] = {}
            for method, wanted in _by_method(variants).items():
                changes |= stored.changes(method, wanted, cost)
                say(f"{what}: {method}")
            found = dict.fromkeys(changes, 0.0)
            for gradients in stored.gradients(probe, DRAWS):
                for key, change in changes.items():
                    found[key] += _square(gradients[key[:2]], change) / 2 / DRAWS
                say(f"{what}: gradients")
            share = len(probe.predicted) * sum(other.kind == probe.kind for other in probes)
            for key, loss in found.items():
                sums[probe.kind][key] = sums[probe.kind].get(key, 0.0) + loss / share
    for kind in kinds:
        if wrong := [key for key, loss in sums[kind].items() if not loss < float("inf")]:
            layer, side, bits = wrong[0]
            raise KVFoldError(
                f"model: what layer {layer} loses with {_NAMES[side]} at {bits} bits is not finite; load it in float32 or "
                "bfloat16"
            )
    return {kind: Losses(sums[kind], cost, elements) for kind in kinds}


def steps(probes: Sequence[Probe], variants: Variants) -> int:
    """How often :func:`measure` calls ``on_step``."""
    return len(probes) * (1 + len(_by_method(variants)) + DRAWS)


_NAMES = {"k": "keys", "v": "values"}


def _by_method(variants: Variants) -> dict[Method, list[tuple[Side, int]]]:
    """Sides and bits by what stores them: a method that is named for both sides stores both at once."""
    found: dict[Method, list[tuple[Side, int]]] = {}
    for side in SIDES:
        for bits, method in variants[side].items():
            found.setdefault(method, []).append((side, bits))
    return found


def _square(gradient: torch.Tensor, change: torch.Tensor) -> float:
    """Sum over KV heads and pages of the squares of ``gradient . change``, ``[1, num_kv_heads, tokens, head_dim]``."""
    along = (gradient.float() * change.float()).sum(-1)[0]
    tokens = along.shape[-1]
    pages = torch.nn.functional.pad(along, (0, -tokens % PAGE)).unflatten(-1, (-1, PAGE)).sum(-1)
    return float(pages.square().sum())


class _Stored:
    """A prompt's keys and values in every layer that folds, and what methods make of them. Other layers stay the model's."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model, self.ids, self.shared = model, ids, SharedPrompt()
        cache, _ = self._filled(get("none"))
        self.elements = {layer.spec.layer_idx: layer.spec.num_kv_heads * layer.spec.head_dim for layer in cache.folded}

    def _filled(self, method: Method) -> tuple[FoldedCache, dict[int, Taken]]:
        """A cache that holds the prompt, and what its layers were given. Formats encode and decode themselves: a method's ten
        kinds of storage are looked at once each, and kernels would take a minute to compile."""
        cache = make_cache(self.model, method, "reference", self.ids.shape[1])
        for layer in cache.folded:
            layer.plain_encoder = True
        try:
            with taking(cache.folded) as taken:
                self.shared.prefill(self.model, self.ids, cache)
        finally:
            originals.restore(self.model)
            restarts.end(self.model)
        return cache, taken

    def changes(
        self, method: Method, wanted: Sequence[tuple[Side, int]], cost: dict[Key, float]
    ) -> dict[Key, torch.Tensor]:
        """What a method adds to the wanted sides of every layer, in the model's dtype; effective bits go into ``cost``."""
        found = {}
        cache, taken = self._filled(method)
        with torch.no_grad():
            for layer in cache.folded:
                if not any(layer.packed):
                    raise KVFoldError(f"method: {method} packs nothing of {self.ids.shape[1]} tokens")
                formats, decoded = (layer.key_format, layer.value_format), layer.decoded(0)
                given = taken[layer.spec.layer_idx]
                exact = given.key, given.value
                for side, bits in wanted:
                    i, key = SIDES.index(side), (layer.spec.layer_idx, side, bits)
                    found[key] = (decoded[i][None] - exact[i].float()).to(exact[i].dtype)
                    cost[key] = float(formats[i].bits)
        return found

    def own(self) -> Cache:
        """The prompt in the model's own cache: what layers that do not fold hold is of their own kind."""
        with torch.no_grad():
            found = names.given(self.model(self.ids, use_cache=True, logits_to_keep=1))
        assert isinstance(found, Cache)
        return found

    def gradients(self, probe: Probe, draws: int) -> Iterator[dict[tuple[int, Side], torch.Tensor]]:
        """``J' u`` of a few draws of ``u``, by layer and side; see the module."""
        asked: dict[tuple[int, Side], torch.Tensor] = {}
        cache = self.own()
        for index in self.elements:
            layer: Any = cache.layers[index]
            layer.keys, layer.values = (x.detach().clone().requires_grad_() for x in (layer.keys, layer.values))
            asked |= {(index, "k"): layer.keys, (index, "v"): layer.values}
        rest = probe.ids[:, probe.prefilled :].to(self.model.device)
        rows = torch.tensor([at - probe.prefilled - 1 for at in probe.predicted], device=rest.device)
        with torch.enable_grad():
            logits = self.model(rest, **names.passing(self.model, cache), use_cache=True).logits[0, rows].float()
        share = logits.detach().softmax(-1)
        generator = torch.Generator().manual_seed(0)
        for draw in range(draws):
            # drawn on the CPU, so that every device has the same ones
            noise = torch.randn(share.shape, generator=generator).to(share.device) * share.sqrt()
            u = noise - share * noise.sum(-1, keepdim=True)
            found = torch.autograd.grad((u * logits).sum(), list(asked.values()), retain_graph=draw < draws - 1)
            yield dict(zip(asked, found, strict=True))


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """The model out of train mode, whatever stands around it."""
    trained: Any = [module for module in model.modules() if module.training]
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        model.eval()
        try:
            yield
        finally:
            for module in trained:
                module.training = True

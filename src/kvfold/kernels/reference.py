"""The plain implementation: decode blocks, multiply, softmax. Float32 throughout; the truth for every kernel."""

import torch

from kvfold.kernels.base import AttentionKernel
from kvfold.kernels.call import AttentionCall, DensePart, NewTokens
from kvfold.kernels.merge import Partial


class ReferenceKernel(AttentionKernel):
    """Supports every format on every device."""

    name = "reference"
    caps_scores = True

    def why_not(self, key_format: object, value_format: object, device: torch.device, pre_rope: bool) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        parts = [self._packed(call, i) for i in range(len(call.spans))]
        parts += [self._dense(call, part) for part in call.parts()]
        if call.new is not None:
            parts.append(self._newest(call, call.new))
        if call.sinks is not None:
            parts.append(Partial.of_sinks(call.sinks, parts[-1]))
        return call.ungrouped(Partial.merge(parts))

    def _packed(self, call: AttentionCall, index: int) -> Partial:
        span = call.spans[index]
        queries, bias = call.projected
        keys = call.key_format.decode(span.keys)
        positions = torch.arange(keys.shape[-2], device=keys.device) + span.start  # within the packed part
        if call.rope is not None:
            assert call.first_position is not None
            keys = call.rope.rotate(keys, (call.first_position.unsqueeze(-1) + positions).unsqueeze(1))
        if not call.uniform:
            keys = _seen(call, keys, positions < call.packed_len.unsqueeze(-1))
        scores = queries @ keys.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias.unsqueeze(-1)
        valid = None if call.uniform else (positions < call.packed_len.unsqueeze(-1))[:, None, None]
        part = Partial.of(_capped(scores * call.scale, call.softcap), valid, call.value_format.decode(span.values))
        if call.unproject is not None:
            part.out = call.unproject(part.out)
        return part

    def _dense(self, call: AttentionCall, part: DensePart) -> Partial:
        valid = part.valid if part.valid.ndim == 3 else part.valid.unsqueeze(1)
        keys = _seen(call, part.keys.float(), valid.any(1))
        scores = _capped(call.rows @ keys.transpose(-1, -2) * call.scale, call.softcap)
        return Partial.of(scores, _of_rows(call, valid), part.values.float())

    def _newest(self, call: AttentionCall, new: NewTokens) -> Partial:
        scores = _capped(call.rows @ new.keys.float().transpose(-1, -2) * call.scale, call.softcap)
        valid = torch.ones(1, call.tokens, call.tokens, dtype=torch.bool, device=scores.device).tril()
        if new.valid is not None:
            valid = valid & new.valid.unsqueeze(1)
        return Partial.of(scores, _of_rows(call, valid), new.values.float())


def _of_rows(call: AttentionCall, valid: torch.Tensor) -> torch.Tensor:
    """What query tokens see, bool [batch or 1, tokens or 1, n], as rows of query heads and tokens see it."""
    if valid.shape[1] > 1:
        valid = valid.repeat(1, call.query.shape[1] // call.num_kv_heads, 1)
    return valid.unsqueeze(1)


def _seen(call: AttentionCall, keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """For gradients, keys [batch, num_kv_heads, n, d] with 0 in what may hold anything: 0 x NaN would be NaN."""
    return keys.masked_fill(~valid[:, None, :, None], 0.0) if call.rows.requires_grad else keys


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else (scores / softcap).tanh() * softcap

"""The plain implementation: decode blocks, multiply, softmax. Float32 throughout; the truth for every kernel."""

import torch

from kvfold.kernels.base import AttentionCall, AttentionKernel, Partial


class ReferenceKernel(AttentionKernel):
    """Supports every format on every device."""

    name = "reference"
    caps_scores = True

    def why_not(self, key_format: object, value_format: object, device: torch.device, pre_rope: bool) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        parts = [self._packed(call, i) for i in range(len(call.spans))]
        parts += [self._dense(call, d.keys, d.values, d.valid) for d in call.dense]
        parts.append(self._newest(call))
        if call.sinks is not None:
            parts.append(Partial.of_sinks(call.sinks, parts[-1]))
        return Partial.merge(parts)

    def _packed(self, call: AttentionCall, index: int) -> Partial:
        span = call.spans[index]
        assert call.packed_queries is not None
        keys = call.key_format.decode(span.keys)
        positions = torch.arange(keys.shape[-2], device=keys.device) + span.start  # within the packed part
        if call.rope is not None:
            keys = call.rope.rotate(keys, (call.first_position.unsqueeze(-1) + positions).unsqueeze(1))
        if not call.uniform:
            keys = _seen(call, keys, positions < call.packed_len.unsqueeze(-1))
        scores = call.packed_queries @ keys.transpose(-1, -2)
        if call.packed_bias is not None:
            scores = scores + call.packed_bias.unsqueeze(-1)
        valid = None if call.uniform else (positions < call.packed_len.unsqueeze(-1))[:, None, None]
        part = Partial.of(_capped(scores * call.scale, call.softcap), valid, call.value_format.decode(span.values))
        if call.unproject is not None:
            part.out = call.unproject(part.out)
        return part

    def _dense(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor) -> Partial:
        keys = _seen(call, keys.float(), valid)
        scores = _capped(call.rows @ keys.transpose(-1, -2) * call.scale, call.softcap)
        return Partial.of(scores, valid[:, None, None], values.float())

    def _newest(self, call: AttentionCall) -> Partial:
        tokens = call.new_keys.shape[-2]
        scores = _capped(call.rows @ call.new_keys.float().transpose(-1, -2) * call.scale, call.softcap)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).tril()
        causal = causal.repeat(scores.shape[-2] // tokens, 1)  # rows are query heads x tokens
        valid = causal if call.new_valid is None else causal & call.new_valid[:, None, None]
        return Partial.of(scores, valid, call.new_values.float())


def _seen(call: AttentionCall, keys: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """For gradients, keys [batch, num_kv_heads, n, d] with 0 in what may hold anything: 0 x NaN would be NaN."""
    return keys.masked_fill(~valid[:, None, :, None], 0.0) if call.rows.requires_grad else keys


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else (scores / softcap).tanh() * softcap

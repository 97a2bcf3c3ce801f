"""Attention over part of the tokens, and all parts together."""

from dataclasses import dataclass

import torch


@dataclass
class Partial:
    """Attention over part of the tokens: unnormalized output, row maxima and row sums of exp(score - maximum)."""

    out: torch.Tensor
    top: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, scores: torch.Tensor, valid: torch.Tensor | None, values: torch.Tensor) -> "Partial":
        """From scores float32 [batch, heads, rows, n], their validity (broadcastable) and values [batch, heads, n, d].

        Invalid tokens may hold anything, NaN included. None: all are valid.
        """
        if valid is None:
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp_()
            return cls(weights @ values, top, weights.sum(-1, keepdim=True))
        scores = scores.masked_fill(~valid, float("-inf"))
        top = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
        weights = (scores - top).exp()
        seen = valid.any(-2).unsqueeze(-1)  # what no row may see is set to 0, for 0 x NaN would be NaN
        return cls(weights @ values.masked_fill(~seen, 0.0), top, weights.sum(-1, keepdim=True))

    @classmethod
    def of_sinks(cls, sinks: torch.Tensor, like: "Partial") -> "Partial":
        """Learned sinks, float [num_heads], as a part: one score per query head, whose value is 0."""
        _, heads, rows, _ = like.top.shape
        top = sinks.float().view(heads, -1, 1).expand(-1, -1, rows * heads // sinks.numel()).reshape(1, heads, rows, 1)
        return cls(torch.zeros_like(like.out), top.expand_as(like.top), torch.ones_like(like.total))

    @staticmethod
    def join(a: "Partial", b: "Partial") -> "Partial":
        """Two parts as one."""
        top = torch.maximum(a.top, b.top)
        of_a, of_b = (a.top - top).exp(), (b.top - top).exp()
        return Partial(a.out * of_a + b.out * of_b, top, a.total * of_a + b.total * of_b)

    @staticmethod
    def merge(parts: "list[Partial]") -> torch.Tensor:
        """Normalized attention over all parts together (log-sum-exp)."""
        top = torch.stack([p.top for p in parts]).amax(0)
        factors = [(p.top - top).exp() for p in parts]
        total = sum((f * p.total for f, p in zip(factors, parts, strict=True)), torch.zeros_like(top))
        out = sum((f * p.out for f, p in zip(factors, parts, strict=True)), torch.zeros_like(parts[0].out))
        return out / total.clamp_min(torch.finfo(total.dtype).tiny)  # a padding row sees nothing and gets 0

"""What rounding weights to fp16 costs where scales multiply them: 2-bit values of KIVI and SQuat in the fused GPU kernel.

usage: python scripts/value_weights.py [MODEL]

A weight 2^room * exp(score - maximum) times a group's scale is an fp16 number. The kernel's arithmetic is repeated on the CPU,
as if one warp summed all tokens, against float64 weights: without a factor, with a factor of 16, and with the one that the
kernel chooses, which follows the scales of 128 tokens. First on random values of different size, then on queries, keys and
values of a model (default: the embedded one).
"""

import math
import sys
from pydoc_data.topics import topics

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvfold import models
from kvfold.formats.affine import quantize_asym

GROUP, PROMPT, ROWS = 32, 1500, 64
STAGE = 128
WAYS = {"x 1": 0, "x 16": 4, "follows": None}


def room_of(scale: torch.Tensor) -> torch.Tensor:
    """log2 of the factor that the kernel's probabilities carry (``_headroom``), per head and stage, float64 [heads, stages];
    ``scale`` [heads, tokens, groups, 1]."""
    tokens = scale.shape[1]
    largest = (
        torch.nn.functional.pad(scale.flatten(2).amax(-1), (0, -tokens % STAGE)).unflatten(-1, (-1, STAGE)).amax(-1)
    )
    return (14 - largest.clamp_min(2.0**-14).log2().floor()).clamp_max(15)


def errors(scores: torch.Tensor, values: torch.Tensor, lift: int | None) -> torch.Tensor:
    """Relative RMS error per head; scores float32 [heads, rows, tokens], values float32 [heads, tokens, channels].

    ``lift`` is log2 of the factor; None: it follows the scales.
    """
    scores = scores.double()
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    codes, scale, zero = (x.double() for x in quantize_asym(values.unflatten(-1, (-1, GROUP)), 2))
    decoded = (codes * scale + zero).flatten(-2)
    exact = weights @ decoded / weights.sum(-1, keepdim=True)
    if lift is None:  # the exponent is the maximum less the room, or that of a stage before if it is higher
        rooms = room_of(scale)
        tops = (
            torch.nn.functional.pad(scores, (0, -scores.shape[-1] % STAGE), value=-1e30)
            .unflatten(-1, (-1, STAGE))
            .amax(-1)
        )
        running = (tops / math.log(2) - rooms.unsqueeze(-2)).cummax(-1).values
        each = running.repeat_interleave(STAGE, -1)[..., : scores.shape[-1]]
        lifted = (scores / math.log(2) - each).exp2().half().double()
        back = (each - running[..., -1:]).exp2()  # what a stage's sums are multiplied with later
    else:
        lifted, back = (weights * 2.0**lift).half().double(), torch.ones_like(weights)
    sums = []
    for group in range(codes.shape[-2]):
        products = (lifted * scale[..., group, 0].unsqueeze(-2)).half().double() * back
        zeros = zero[..., group, :].expand_as(codes[..., group, :])
        sums.append(products @ codes[..., group, :] + (lifted * back) @ zeros)
    got = torch.cat(sums, -1) / (lifted * back).sum(-1, keepdim=True)
    return (got - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)


def random_values() -> None:
    print(f"{'size of values':>16}" + "".join(f"{f'spread {s}: {way}':>20}" for s in (1, 3) for way in WAYS))
    for size in (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        generator = torch.Generator().manual_seed(0)
        values = size * torch.randn(1, 4096, 64, generator=generator)
        scores = torch.randn(1, 8, 4096, generator=generator)
        cells = [f"{float(errors(spread * scores, values, n)):.0e}" for spread in (1, 3) for n in WAYS.values()]
        print(f"{size:16.0e}" + "".join(f"{cell:>20}" for cell in cells))


def real_values(name: str | None) -> None:
    model, tokenizer, info = models.load(name)
    calls = []

    def record(module, query, key, value, *args, **kwargs):  # type: ignore[no-untyped-def]
        calls.append((query, key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("recorded", record)
    model.set_attn_implementation("recorded")
    ids = tokenizer("\n".join(topics.values()), return_tensors="pt").input_ids[:, :PROMPT]
    with torch.inference_mode():
        model(ids)
    found: dict[str, list[torch.Tensor]] = {way: [] for way in WAYS}
    for query, key, value in calls:
        rows = query[0, :, -ROWS:].unflatten(0, (key.shape[1], -1)).flatten(1, 2)
        scores = rows @ key[0].transpose(-1, -2) / key.shape[-1] ** 0.5
        for way, lift in WAYS.items():
            found[way].append(errors(scores, value[0].float(), lift))
    sizes = torch.stack([value[0].float().square().mean((-1, -2)).sqrt() for _, _, value in calls])
    print(f"{info.name}: {sizes.numel()} heads, RMS of their values {sizes.min():.2g} to {sizes.max():.2g}")
    for way, parts in found.items():
        all_of = torch.cat(parts)
        print(f"{way:<8} median {all_of.median():.1e}, largest {all_of.max():.1e}")


if __name__ == "__main__":
    random_values()
    real_values(sys.argv[1] if len(sys.argv) > 1 else None)

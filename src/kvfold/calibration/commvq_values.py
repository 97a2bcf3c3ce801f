"""Learning CommVQ's binary codes of values (arXiv 2506.18879, sec. 4.1)."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kvfold.calibration.collect import LayerSample
from kvfold.calibration.commvq_keys import metric_root, token_weights
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.state import share_of
from kvfold.formats.affine import to_fp16
from kvfold.methods.commvq import ValueCodebook

FLIPS = 32
"""Bit flips that training allows a value's code when the codebook is fitted to it."""
SMALLEST = 3e-5
"""Size of values, and of a component relative to them, below which there is none: fp16 holds the steps of larger ones."""


def value_metric(sample: LayerSample, share: float) -> torch.Tensor:
    """Matrices F with ``|e F|^2`` the loss of a value error e: ``share`` of the output projection's metric, the rest the
    identity. The first is the expected squared error of the layer's attention output per unit of attention weight.

    Returns
    -------
    Tensor, float32 [num_kv_heads, head_dim, head_dim]
    """
    return metric_root(sample.value_metric.double(), share).float()


def scalar_encoder(y: torch.Tensor, weights: torch.Tensor, codes: int) -> dict[str, torch.Tensor]:
    """Principal components with uniform scalar codes; bits go where they lower the error of a Gaussian most.

    Parameters
    ----------
    y : Tensor, float32 [heads, tokens, dim]
        Values under the metric.
    weights : Tensor, float32 [heads, tokens]
    codes : int
        Bits per token and head.

    Returns
    -------
    dict
        ``axes`` [heads, dim, dim], ``shift`` [heads, dim], ``top`` [heads, dim]: component j has the level
        ``round(y . axes_j + shift_j)`` in [0, top_j]; ``component`` int16 [heads, codes], ``place`` int16 [heads, codes]: bit
        k is binary digit ``place_k`` of the level of component ``component_k``.
    """
    heads, _, dim = y.shape
    total = weights.sum(-1)[:, None, None]
    mean = (y * weights.unsqueeze(-1)).sum(1, keepdim=True) / total
    spread = y - mean
    covariance = (spread * weights.unsqueeze(-1)).transpose(-1, -2) @ spread / total
    variance, directions = torch.linalg.eigh(covariance.double().cpu())
    # error and step of the best uniform quantizer of a unit Gaussian with 1, 2, ... bits (Max, 1960)
    error = (1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.00349, 0.00104, 0.000304, 0.0000877)
    steps = (1.0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
    axes, shift, top = torch.zeros(heads, dim, dim), torch.zeros(heads, dim), torch.zeros(heads, dim)
    component, place = (torch.zeros(heads, codes, dtype=torch.int16) for _ in range(2))
    for h in range(heads):
        var = variance[h].clamp_min(SMALLEST**2)
        bits = torch.zeros(dim, dtype=torch.int64)
        levels = torch.tensor(error, dtype=torch.float64)
        for _ in range(codes):
            saving = var * (levels[bits] - levels[(bits + 1).clamp_max(len(error) - 1)])
            bits[saving.argmax()] += 1
        step = torch.tensor(steps, dtype=torch.float64)[bits] * var.sqrt()
        axes[h] = (directions[h] / step).T * (bits > 0).unsqueeze(-1)  # others are not asked
        top[h] = (1 << bits) - 1
        shift[h] = top[h] / 2 - axes[h] @ mean[h, 0].cpu()
        pairs = [(j, k) for j in range(dim) for k in range(int(bits[j]))]
        component[h], place[h] = torch.tensor(pairs, dtype=torch.int16).T
    return {"axes": axes, "shift": shift, "top": top, "component": component, "place": place}


def fit_codebook(y: torch.Tensor, bits: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codebook and offset of least weighted squared error for fixed bits.

    Parameters
    ----------
    y : Tensor, float32 [heads, tokens, dim]
    bits : Tensor, float32 [heads, tokens, codes]
    weights : Tensor, float32 [heads, tokens]

    Returns
    -------
    codebook : Tensor, float32 [heads, codes, dim]
    offset : Tensor, float32 [heads, dim]
    """
    rows = F.pad(bits, (0, 1), value=1.0)
    scaled = (rows * weights.unsqueeze(-1)).transpose(-1, -2)
    system = (scaled @ rows).double()
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    system = system + 1e-3 * system.diagonal(dim1=-1, dim2=-2).mean(-1)[:, None, None] * eye
    solved = torch.linalg.solve(system, (scaled @ y).double()).float()
    return solved[:, :-1], solved[:, -1]


def train_network(
    y: torch.Tensor,
    weights: torch.Tensor,
    codebook: torch.Tensor,
    offset: torch.Tensor,
    schedule: Schedule,
    generator: torch.Generator,
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The paper's encoder, linear - activation - linear, trained with its codebook through Gumbel-softmax.

    The two-class Gumbel-softmax of a bit is a logistic function of its logit plus logistic noise; the forward pass uses the
    hard bit, the backward pass the soft one (straight through).

    Parameters
    ----------
    y : Tensor, float32 [heads, tokens, dim]
        Values under the metric, so that the mean squared error is the chosen loss.
    codebook, offset : Tensor, float32 [heads, codes, dim], [heads, dim]
        Where training starts.

    Returns
    -------
    tensors : dict
        ``w1`` [heads, dim, hidden], ``b1``, ``w2`` [heads, hidden, codes], ``b2``.
    codebook, offset : Tensor
    """
    heads, tokens, dim = y.shape
    codes, hidden = codebook.shape[1], schedule.network_width * dim
    device = y.device

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-2] ** 0.5).to(device).requires_grad_()

    with torch.enable_grad(), torch.inference_mode(False):
        y, weights = y.clone(), weights.clone()
        network = {"w1": random(heads, dim, hidden), "w2": random(heads, hidden, codes)}
        network["b1"] = torch.zeros(heads, hidden, device=device, requires_grad=True)
        network["b2"] = torch.zeros(heads, codes, device=device, requires_grad=True)
        table = codebook.clone().requires_grad_()
        origin = offset.clone().requires_grad_()
        groups = [{"params": list(network.values()), "lr": 3e-3}, {"params": [table, origin], "lr": 1e-3}]
        optimizer = torch.optim.Adam(groups)
        anneal = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, schedule.network_steps), 1e-5)
        for step in range(schedule.network_steps):
            index = torch.randint(tokens, (schedule.network_batch,), generator=generator).to(device)
            x, mass = y[:, index], weights[:, index]
            logits = network_logits(network, x)
            uniform = torch.rand(logits.shape, generator=generator).clamp_(1e-6, 1 - 1e-6).to(device)
            temperature = 0.3 ** (step / max(1, schedule.network_steps))
            soft = ((logits + uniform.logit()) / temperature).sigmoid()
            bits = (soft > 0.5).float() + soft - soft.detach()
            loss = (mass * (x - bits @ table - origin.unsqueeze(1)).square().sum(-1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            anneal.step()
    return {name: t.detach() for name, t in network.items()}, table.detach(), origin.detach()


def network_logits(network: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """Logits of the bits, float32 [heads, tokens, codes]."""
    hidden = F.silu(y @ network["w1"] + network["b1"].unsqueeze(1))
    return hidden @ network["w2"] + network["b2"].unsqueeze(1)


def learn_values(
    sample: LayerSample,
    held_out: torch.Tensor,
    codes: int,
    joint: bool,
    schedule: Schedule,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    flips: int = FLIPS,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Value encoder and codebook of one layer.

    Parameters
    ----------
    codes : int
        N_c: bits per token and KV head.
    joint : bool
        One code of ``num_kv_heads * codes`` bits for all heads of a token.
    flips : int
        The method's: errors are those after so many bit flips. Training uses :data:`FLIPS` whatever the method does.

    Returns
    -------
    tensors : dict
        ``codebook`` float16 [heads, codes, dim], ``offset`` float16 [heads, dim], ``metric`` float16 [heads, dim, dim], and the
        encoder's tensors; with ``joint`` heads = 1 and codes, dim are those of all heads together.
    errors : dict
        ``value_mse``: squared error over squared length; ``output_mse``: the same under the output projection and the
        tokens' weights.
    """
    metric, judge = value_metric(sample, schedule.metric), value_metric(sample, 1.0)
    values, raw = sample.values, sample.value_weight
    if joint:
        codes *= values.shape[0]
        values = values.transpose(0, 1).flatten(1).unsqueeze(0)
        raw = raw.mean(0, keepdim=True)
        metric, judge = (torch.block_diag(*m).unsqueeze(0) for m in (metric, judge))
    metric = metric.half().float().to(device)
    values = values.to(device)
    y = values @ metric
    scale = y[:, ~held_out].square().mean((-1, -2), keepdim=True).sqrt()
    scale = torch.where(scale > SMALLEST, scale, 1.0)
    metric = (metric / scale).half().float()  # unit size: the network's learning rates suit every layer
    y = values @ metric
    weights = token_weights(raw.to(device), schedule.weight_limit)
    train, mass = y[:, ~held_out], weights[:, ~held_out]
    inverse = torch.linalg.inv(metric.double()).float()

    def tables(encoder: dict[str, torch.Tensor], book: torch.Tensor, offset: torch.Tensor) -> dict[str, torch.Tensor]:
        stored = {name: to_fp16(t) if t.is_floating_point() else t for name, t in encoder.items()}
        plain = {"codebook": (book @ inverse).half(), "offset": (offset.unsqueeze(1) @ inverse).squeeze(1).half()}
        return {name: t.to(device) for name, t in {**stored, **plain, "metric": metric.half()}.items()}

    encoder = scalar_encoder(train, mass, codes)
    empty = torch.zeros(y.shape[0], codes, y.shape[-1], device=device)
    start = ValueCodebook(tables(encoder, empty, empty[:, 0]))
    bits = start.first_bits(train)
    book, offset = fit_codebook(train, bits, mass)
    if schedule.encoder == "mlp":
        encoder, book, offset = train_network(train, mass, book, offset, schedule, generator)
    for _ in range(schedule.value_rounds):
        some = torch.arange(train.shape[1])
        if 0 < schedule.value_tokens < len(some):
            some = torch.randperm(len(some), generator=generator)[: schedule.value_tokens]
        some = some.to(device)
        current = ValueCodebook(tables(encoder, book, offset))
        book, offset = fit_codebook(train[:, some], current.bits(values[:, ~held_out][:, some], FLIPS), mass[:, some])

    final = tables(encoder, book, offset)
    truth = values[:, held_out]
    decoded = ValueCodebook(final).decode(ValueCodebook(final).bits(truth, flips))
    error, score = decoded - truth, weights[:, held_out]
    judge = judge.to(device)
    errors = {
        "value_mse": share_of(error.square().sum(), truth.square().sum()),
        "output_mse": share_of(
            (score * (error @ judge).square().sum(-1)).sum(), (score * (truth @ judge).square().sum(-1)).sum()
        ),
    }
    return {name: t.cpu() for name, t in final.items()}, errors

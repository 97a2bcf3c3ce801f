"""Learning CommVQ's codebooks of keys: EM (arXiv 2506.18879, sec. 4.2 and A.2).

Soft assignment over the N^2 centres ``z_a + i z_b`` factorizes up to a table. With ``D_ab`` the squared distance of x,

    -D_ab / T = const + [2 <x, z_a> - |z_a|^2] / T + [2 <x, i z_b> - |z_b|^2] / T - [2 <z_a, i z_b>] / T

so ``exp(-D_ab / T) = u_a v_b K_ab``: the softmax's marginals are products with the N x N matrix K, without an N^2-long row per
token. Float64 holds these factors at every temperature in use for nearly all tokens; a token that they underflow for gets its
row. The closed-form M-step (eq. 33) needs only the marginals and the N x N joint counts: one Hermitian N x N system.
"""

from __future__ import annotations

import dataclasses

import torch

from kvfold.calibration.collect import LayerSample, to_complex, to_real
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.state import share_of
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, nearest, times_i
from kvfold.formats.packing import UNIT
from kvfold.methods.learned import rotary_dim

UNDERFLOW = 1e-290
"""A token whose sum of ``u_a v_b K_ab`` is smaller gets its row of N^2 weights: float64's smallest normal number is 2e-308, so
that above this bound no part that counts is lost."""
ROWS = {"cpu": 128}
"""Tokens whose rows of N^2 weights exist at once, by device."""


def soft_counts(
    scores_a: torch.Tensor,
    scores_b: torch.Tensor,
    table: torch.Tensor,
    weights: torch.Tensor,
    temperature: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Marginals and joint counts of the soft assignment over all N^2 centres (eq. 35), in factored form.

    Parameters
    ----------
    scores_a, scores_b : Tensor, float32 [heads, tokens, N]
        ``2 <x, z_a> - |z_a|^2`` and ``2 <x, i z_b> - |z_b|^2``.
    table : Tensor, float32 [heads, N, N]
        ``2 <z_a, i z_b>``.
    weights : Tensor, float32 [heads, tokens]
    temperature : Tensor, float32, broadcastable to [heads, 1, 1]

    Returns
    -------
    of_a, of_b : Tensor, float32 [heads, tokens, N]
        Weight that a token gives to all centres with this a (this b).
    joint : Tensor, float32 [heads, N, N]
        Weight of all tokens per centre.
    """
    u, v, k = (
        ((x - x.amax(dims, keepdim=True)) / temperature).exp()
        for x, dims in ((scores_a.double(), -1), (scores_b.double(), -1), (-table.double(), (-1, -2)))
    )
    of_a = u * (v @ k.transpose(-1, -2))
    total = of_a.sum(-1)
    lost = total < UNDERFLOW
    factor = torch.where(lost, 0.0, weights.double() / total).unsqueeze(-1)
    joint = k * ((u * factor).transpose(-1, -2) @ v)
    of_a, of_b, joint = (x.float() for x in (of_a * factor, v * (u @ k) * factor, joint))
    for head in lost.any(-1).nonzero().flatten().tolist():
        heat = temperature.expand(len(table), 1, 1)[head]
        for rows in lost[head].nonzero().flatten().split(ROWS.get(table.device.type, 8192)):
            dense = (scores_a[head, rows, :, None] + (scores_b[head, rows, None] - table[head])) / heat
            dense = dense.flatten(1).softmax(-1).view_as(dense).mul_(weights[head, rows, None, None])
            of_a[head, rows], of_b[head, rows] = dense.sum(-1), dense.sum(-2)
            joint[head] += dense.sum(0)
    return of_a, of_b, joint


def hard_counts(
    scores_a: torch.Tensor, scores_b: torch.Tensor, table: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`soft_counts` in the limit of temperature 0: all weight on the nearest centre."""
    a, b = nearest(scores_a, scores_b, table)
    of_a = torch.zeros_like(scores_a).scatter_(-1, a.unsqueeze(-1), weights.unsqueeze(-1))
    of_b = torch.zeros_like(scores_b).scatter_(-1, b.unsqueeze(-1), weights.unsqueeze(-1))
    ones = torch.zeros_like(scores_b).scatter_(-1, b.unsqueeze(-1), 1.0)
    return of_a, of_b, of_a.transpose(-1, -2) @ ones


def m_step(
    of_a: torch.Tensor, of_b: torch.Tensor, joint: torch.Tensor, sums: torch.Tensor, ridge: float, old: torch.Tensor
) -> torch.Tensor:
    """Codebook of least weighted squared error for fixed assignments (eq. 33).

    Setting the derivative with respect to ``conj(z_c)`` to zero gives, for all pairs at once,
    ``[diag(n_a + n_b) + i (S - S')] z = sum_n p_n x_n - i sum_n r_n x_n`` with S the joint counts: the normal equations
    ``T'ST phi = T'Sm`` of the paper with the real and imaginary parts of its 2N unknowns joined to N complex ones.

    Parameters
    ----------
    of_a, of_b : Tensor, float32 [heads, N]
        Total weights n_a, n_b.
    joint : Tensor, float32 [heads, N, N]
    sums : Tensor, complex64 [heads, N, head_dim / 2]
        Right-hand side.
    ridge : float
        Pull of an average weight's share towards ``old``: codes that nobody uses stay where they are.
    old : Tensor, complex64 [heads, N, head_dim / 2]

    Returns
    -------
    Tensor, complex64 [heads, N, head_dim / 2]
    """
    count = of_a + of_b
    pull = ridge * count.mean(-1)[:, None, None]
    system = torch.complex(torch.diag_embed(count), joint - joint.transpose(-1, -2))
    system = system + pull * torch.eye(count.shape[-1], device=count.device)
    return torch.linalg.solve(system, sums + pull * old)


def learn_stage(
    x: torch.Tensor, weights: torch.Tensor, levels: int, rotary: int, schedule: Schedule, generator: torch.Generator
) -> torch.Tensor:
    """One stage's codebook by EM with annealed soft assignment (Algorithm 1, eq. 33 - 35).

    Parameters
    ----------
    x : Tensor, float32 [heads, tokens, head_dim]
        Residuals of the stages before, under the metric.
    weights : Tensor, float32 [heads, tokens]
    levels : int
        N_c'.

    Returns
    -------
    Tensor, float32 [heads, levels, head_dim]
    """
    tokens, soft_steps = x.shape[1], schedule.em_steps - schedule.hard_steps

    def draw(count: int) -> torch.Tensor:
        return torch.randperm(tokens, generator=generator)[:count].to(x.device)

    # a centre is the sum of two vectors: half a data point each
    z = x[:, draw(levels)] / 2
    if z.shape[1] < levels:
        z = torch.cat([z] * -(-levels // z.shape[1]), 1)[:, :levels]
    energy = ((weights * x.square().sum(-1)).sum(-1) / weights.sum(-1))[:, None, None]
    for step in range(schedule.em_steps):
        some, mass = x, weights
        if 0 < schedule.em_tokens < tokens:
            index = draw(schedule.em_tokens)
            some, mass = x[:, index], weights[:, index]
        turned = times_i(z, rotary)
        square = z.square().sum(-1).unsqueeze(1)
        scores_a = 2 * some @ z.transpose(-1, -2) - square
        scores_b = 2 * some @ turned.transpose(-1, -2) - square
        table = 2 * z @ turned.transpose(-1, -2)
        if step < soft_steps:
            ratio = (schedule.cold / schedule.hot) ** (step / max(1, soft_steps - 1))
            temperature = (energy * schedule.hot * ratio).clamp_min(1e-12)
            of_a, of_b, joint = soft_counts(scores_a, scores_b, table, mass, temperature)
        else:
            of_a, of_b, joint = hard_counts(scores_a, scores_b, table, mass)
        sums = to_complex(of_a.transpose(-1, -2) @ some, rotary)
        sums = sums - 1j * to_complex(of_b.transpose(-1, -2) @ some, rotary)
        new = m_step(of_a.sum(1), of_b.sum(1), joint, sums, 1e-3, to_complex(z, rotary))
        z = to_real(new, rotary)
    return z


def fit_together(
    x: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor, old: torch.Tensor, rotary: int
) -> torch.Tensor:
    """All stages' codebooks of least squared error for fixed codes: eq. 33 with the unknowns of all stages in one system.

    Parameters
    ----------
    x : Tensor, float32 [heads, tokens, head_dim]
    weights : Tensor, float32 [heads, tokens]
    codes : Tensor, int64 [heads, tokens, stages, 2]
    old : Tensor, float32 [heads, stages, levels, head_dim]

    Returns
    -------
    Tensor, float32 [heads, stages, levels, head_dim]
    """
    heads, stages, levels, _ = old.shape
    size = stages * levels
    out = torch.empty_like(old)
    unit = torch.tensor([1, 1j], dtype=torch.complex64, device=x.device)  # of z_a and of i z_b
    for h in range(heads):
        system = torch.zeros(stages, levels, stages, levels, dtype=torch.complex64, device=x.device)
        right = torch.zeros(stages, levels, x.shape[-1] // 2, dtype=torch.complex64, device=x.device)
        target = to_complex(x[h] * weights[h][:, None], rotary)
        slots = [(r, part) for r in range(stages) for part in (0, 1)]
        for r, i in slots:
            rows = codes[h, :, r, i]
            right[r].index_add_(0, rows, target * unit[i].conj())
            for s, j in slots:
                counts = torch.zeros(levels * levels, device=x.device)
                counts.index_add_(0, rows * levels + codes[h, :, s, j], weights[h])
                system[r, :, s] += counts.view(levels, levels) * (unit[i].conj() * unit[j])
        matrix = system.view(size, size)
        pull = 1e-3 * matrix.diagonal().real.mean()
        matrix = matrix + pull * torch.eye(size, device=x.device)
        solved = torch.linalg.solve(matrix, right.flatten(0, 1) + pull * to_complex(old[h], rotary).flatten(0, 1))
        out[h] = to_real(solved, rotary).unflatten(0, (stages, levels))
    return out


def key_metric(sample: LayerSample, share: float) -> torch.Tensor:
    """Real matrices F with ``|e F|^2`` the loss of a key error e, commuting with multiplication by i.

    ``share`` of it is the queries' metric M, the rest the identity; M is scaled to a mean diagonal of 1. With
    ``M = L L^H`` the complex map is ``e -> L^H e``.

    Returns
    -------
    Tensor, float32 [num_kv_heads, head_dim, head_dim]
    """
    root = metric_root(sample.key_metric.to(torch.complex128), share)
    rotary = rotary_dim(sample.spec)
    basis = to_complex(torch.eye(sample.spec.head_dim, dtype=torch.float64), rotary)
    return to_real(basis @ root.conj(), rotary).float()


def metric_root(metric: torch.Tensor, share: float) -> torch.Tensor:
    """L of ``share`` of a metric of mean diagonal 1, the rest the identity, as ``L L^H``.

    Of the identity as much is added as makes the sum positive definite in spite of rounding: a metric of few queries, or of
    queries that are nearly alike, has directions of no weight.

    Parameters
    ----------
    metric : Tensor, float64 or complex128 [num_kv_heads, n, n]
        Hermitian.
    """
    scale = metric.diagonal(dim1=-1, dim2=-2).real.mean(-1)[:, None, None].clamp_min(1e-30)
    eye = torch.eye(metric.shape[-1], dtype=metric.dtype)
    rest = max(1 - share, 1e-6)
    while rest < 1:
        root, failed = torch.linalg.cholesky_ex(share * metric / scale + rest * eye)
        if not failed.any():
            return root
        rest *= 10
    return torch.linalg.cholesky(share * metric / scale + eye)


def token_weights(raw: torch.Tensor, limit: float) -> torch.Tensor:
    """Weights with mean 1, cut at ``limit`` medians; all 1 for ``limit`` 0. float32 [num_kv_heads, tokens]."""
    if not limit:
        return torch.ones_like(raw)
    return with_mean_one(raw.clamp_max(limit * raw.median(-1, keepdim=True).values.clamp_min(1e-12)))


def with_mean_one(weights: torch.Tensor) -> torch.Tensor:
    """Weights of tokens, scaled; all 1 where none has any, as where all values are the same."""
    mean = weights.mean(-1, keepdim=True)
    return torch.where(mean > 1e-30, weights / mean.clamp_min(1e-30), 1.0)


def learn_keys(
    sample: LayerSample,
    held_out: torch.Tensor,
    form: AdditiveCodes,
    schedule: Schedule,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Key codebooks of one layer.

    Parameters
    ----------
    held_out : Tensor, bool [tokens]
        Tokens kept out of training, on which the errors are measured.
    form : AdditiveCodes
        What keys will be stored in, without a codebook: errors are those of its stages, its search and its norms.

    Returns
    -------
    tensors : dict
        ``centres`` float16 [num_kv_heads, stages, levels, head_dim], ``metric`` float16 [num_kv_heads, head_dim, head_dim].
    errors : dict
        ``key_mse``: squared error over squared length; ``score_mse``: the same under the query metric and the tokens'
        weights, over the variance around the mean key.
    """
    rotary = rotary_dim(sample.spec)
    metric = key_metric(sample, schedule.metric).half().float().to(device)
    keys = sample.keys.to(device)
    seen = keys @ metric
    rms = seen.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    unit = seen / rms
    weights = token_weights(sample.key_weight.to(device), schedule.weight_limit) * rms.squeeze(-1).square()
    weights = with_mean_one(weights)
    held_out = held_out.to(device)
    train, mass = unit[:, ~held_out], weights[:, ~held_out]
    identity = torch.eye(seen.shape[-1], device=device).expand_as(metric)

    rest, learned = train.clone(), []
    for _ in range(form.stages):
        z = learn_stage(rest, mass, form.levels, rotary, schedule, generator)
        stage = KeyCodebook(z.unsqueeze(1), identity, rotary)
        rest -= stage.sum(stage.assign(rest, 0))
        learned.append(z)
    z = torch.stack(learned, 1)
    for _ in range(schedule.joint_rounds):
        codes = KeyCodebook(z, identity, rotary).assign(train, 1)
        z = fit_together(train, mass, codes, z, rotary)
    inverse = torch.linalg.inv(metric.double()).float()
    centres = (z @ inverse.unsqueeze(1)).half()

    test = held_out.nonzero().flatten()
    test = test[: len(test) // UNIT * UNIT]
    stored = dataclasses.replace(form, block=UNIT, codebook=KeyCodebook(centres, metric, rotary))
    truth = keys[:, test]
    error = stored.decode(stored.encode(truth.unsqueeze(0)))[0] - truth
    spread = truth - keys[:, ~held_out].mean(1, keepdim=True)
    score = token_weights(sample.key_weight.to(device), schedule.weight_limit)[:, test]
    judge = key_metric(sample, 1.0).to(device)
    errors = {
        "key_mse": share_of(error.square().sum(), truth.square().sum()),
        "score_mse": share_of(
            (score * (error @ judge).square().sum(-1)).sum(), (score * (spread @ judge).square().sum(-1)).sum()
        ),
    }
    return {"centres": centres.cpu(), "metric": metric.half().cpu()}, errors

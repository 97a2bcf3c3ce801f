"""Learning CommVQ's codebooks: EM for keys (arXiv 2506.18879, sec. 4.2 and A.2), binary codes for values (sec. 4.1).

Soft assignment over the N^2 centres ``z_a + i z_b`` factorizes up to a table. With ``D_ab`` the squared distance of x,

    -D_ab / T = const + [2 <x, z_a> - |z_a|^2] / T + [2 <x, i z_b> - |z_b|^2] / T - [2 <z_a, i z_b>] / T

so ``exp(-D_ab / T) = u_a v_b K_ab``: the softmax's marginals are products with the N x N matrix K, without an N^2-long row per
token. Float64 holds these factors at every temperature in use for nearly all tokens; a token that they underflow for gets its
row. The closed-form M-step (eq. 33) needs only the marginals and the N x N joint counts: one Hermitian N x N system.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvfold.calibration.collect import LayerSample, to_complex, to_real
from kvfold.calibration.learner import LayerwiseLearner
from kvfold.calibration.state import Fit
from kvfold.errors import KVFoldError
from kvfold.formats.codebook import AdditiveCodes, KeyCodebook, nearest, times_i
from kvfold.formats.packing import UNIT
from kvfold.methods.commvq import CommVQ, ValueCodebook
from kvfold.methods.learned import rotary_dim

UNDERFLOW = 1e-290
"""A token whose sum of ``u_a v_b K_ab`` is smaller gets its row of N^2 weights: float64's smallest normal number is 2e-308, so
that above this bound no part that counts is lost."""
ROWS = {"cpu": 128}
"""Tokens whose rows of N^2 weights exist at once, by device."""

FLIPS = 32
"""Bit flips that training allows a value's code when the codebook is fitted to it."""
ENCODERS = ("scalar", "mlp")


@dataclass(frozen=True)
class Schedule:
    """How long and in what way codebooks are trained.

    Attributes
    ----------
    window : int
        Tokens per calibration window.
    em_tokens : int
        Tokens drawn anew for every EM iteration; 0: all.
    em_steps, hard_steps : int
        EM iterations per stage, and how many of them, the last ones, assign every token to its nearest centre; the paper
        assigns softly to the end.
    hot, cold : float
        First and last temperature of the soft iterations over the mean squared length of a stage's input; exponential in
        between (eq. 35).
    joint_rounds : int
        Times that all stages are re-fitted together by least squares after the last stage.
    weight_limit : float
        Token weights are cut at this multiple of their median; 0: all tokens count alike, as in the paper.
    metric : float
        Share of the query metric (keys) and of the output projection's metric (values) in the loss; 0: plain mean squared
        error, as in the paper.
    encoder : {"scalar", "mlp"}
        Value encoder: principal components and scalar codes in closed form, or the paper's network.
    value_rounds : int
        Alternations of codes and least-squares codebook (scalar encoder, and after the network's training).
    value_tokens : int
        Tokens of one alternation; 0: all.
    network_steps, network_batch, network_width : int
        Training of the paper's network.
    """

    window: int = 512
    em_tokens: int = 8192
    em_steps: int = 10
    hard_steps: int = 7
    hot: float = 0.05
    cold: float = 0.005
    joint_rounds: int = 1
    weight_limit: float = 1000.0
    metric: float = 0.9
    encoder: str = "scalar"
    value_rounds: int = 4
    value_tokens: int = 8192
    network_steps: int = 2000
    network_batch: int = 1024
    network_width: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.hard_steps <= self.em_steps:
            raise KVFoldError(
                f"schedule: hard_steps={self.hard_steps} is not allowed; allowed: 0 to em_steps={self.em_steps}"
            )
        if self.encoder not in ENCODERS:
            raise KVFoldError(f"encoder: {self.encoder!r} is not known; allowed: {', '.join(ENCODERS)}")


PRESETS = {
    "fast": Schedule(),
    "paper": Schedule(
        window=2048,
        em_tokens=0,
        em_steps=100,
        hard_steps=0,
        hot=0.5,
        cold=0.0005,
        joint_rounds=0,
        weight_limit=0.0,
        metric=0.0,
        encoder="mlp",
        value_rounds=0,
        network_steps=20000,
    ),
    "long": Schedule(
        window=2048, em_tokens=0, em_steps=60, hard_steps=40, joint_rounds=4, value_rounds=12, value_tokens=0
    ),
}
"""``fast``: minutes on a CPU; ``paper``: the published objective and networks, for a GPU;
``long``: our objective and a longer schedule."""


class CommVQLearner(LayerwiseLearner):
    """EM for keys, binary codes for values."""

    def __init__(
        self,
        method: CommVQ,
        schedule: Schedule,
        model: PreTrainedModel,
        windows: torch.Tensor,
        held: torch.Tensor,
        seed: int,
    ) -> None:
        super().__init__(model, windows, held, seed)
        self.method, self.schedule = method, schedule

    def fit(self, sample: LayerSample, generator: torch.Generator) -> Fit:
        method, given = self.method, (self.schedule, generator, self.model.device)
        keys, key_errors = learn_keys(sample, self.held, method.formats(sample.spec)[0], *given)
        codes = method.value_codes(sample.spec.head_dim)
        values, value_errors = learn_values(sample, self.held, codes, method.joint, *given, flips=method.flips)
        tensors = {f"key.{n}": t for n, t in keys.items()} | {f"value.{n}": t for n, t in values.items()}
        return Fit(tensors, key_errors | value_errors)


# ---- keys --------------------------------------------------------------------------------------------------------------


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
    m = sample.key_metric.to(torch.complex128)
    scale = m.diagonal(dim1=-1, dim2=-2).real.mean(-1)[:, None, None].clamp_min(1e-30)
    eye = torch.eye(m.shape[-1], dtype=m.dtype)
    root = torch.linalg.cholesky(share * m / scale + max(1 - share, 1e-6) * eye)
    rotary = rotary_dim(sample.spec)
    basis = to_complex(torch.eye(sample.spec.head_dim, dtype=torch.float64), rotary)
    return to_real(basis @ root.conj(), rotary).float()


def token_weights(raw: torch.Tensor, limit: float) -> torch.Tensor:
    """Weights with mean 1, cut at ``limit`` medians; all 1 for ``limit`` 0. float32 [num_kv_heads, tokens]."""
    if not limit:
        return torch.ones_like(raw)
    cut = raw.clamp_max(limit * raw.median(-1, keepdim=True).values.clamp_min(1e-12))
    return cut / cut.mean(-1, keepdim=True).clamp_min(1e-30)


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
    weights = weights / weights.mean(-1, keepdim=True)
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
        "key_mse": float(error.square().sum() / truth.square().sum()),
        "score_mse": float(
            (score * (error @ judge).square().sum(-1)).sum() / (score * (spread @ judge).square().sum(-1)).sum()
        ),
    }
    return {"centres": centres.cpu(), "metric": metric.half().cpu()}, errors


# ---- values ------------------------------------------------------------------------------------------------------------


def value_metric(sample: LayerSample, share: float) -> torch.Tensor:
    """Matrices F with ``|e F|^2`` the loss of a value error e: ``share`` of the output projection's metric, the rest the
    identity. The first is the expected squared error of the layer's attention output per unit of attention weight.

    Returns
    -------
    Tensor, float32 [num_kv_heads, head_dim, head_dim]
    """
    m = sample.value_metric.double()
    scale = m.diagonal(dim1=-1, dim2=-2).mean(-1)[:, None, None].clamp_min(1e-30)
    eye = torch.eye(m.shape[-1], dtype=m.dtype)
    return torch.linalg.cholesky(share * m / scale + max(1 - share, 1e-6) * eye).float()


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
        var = variance[h].clamp_min(1e-12)
        bits = torch.zeros(dim, dtype=torch.int64)
        levels = torch.tensor(error, dtype=torch.float64)
        for _ in range(codes):
            saving = var * (levels[bits] - levels[(bits + 1).clamp_max(len(error) - 1)])
            bits[saving.argmax()] += 1
        step = torch.tensor(steps, dtype=torch.float64)[bits] * var.sqrt()
        axes[h] = (directions[h] / step).T
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
    scale = y[:, ~held_out].square().mean((-1, -2), keepdim=True).sqrt().clamp_min(1e-12)
    metric = (metric / scale).half().float()  # unit size: the network's learning rates suit every layer
    y = values @ metric
    weights = token_weights(raw.to(device), schedule.weight_limit)
    train, mass = y[:, ~held_out], weights[:, ~held_out]
    inverse = torch.linalg.inv(metric.double()).float()

    def tables(encoder: dict[str, torch.Tensor], book: torch.Tensor, offset: torch.Tensor) -> dict[str, torch.Tensor]:
        stored = {name: t.half() if t.is_floating_point() else t for name, t in encoder.items()}
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
        "value_mse": float(error.square().sum() / truth.square().sum()),
        "output_mse": float(
            (score * (error @ judge).square().sum(-1)).sum() / (score * (truth @ judge).square().sum(-1)).sum()
        ),
    }
    return {name: t.cpu() for name, t in final.items()}, errors

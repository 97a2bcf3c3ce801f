"""How long and in what way CommVQ's codebooks are trained."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.errors import KVFoldError

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
        window=2048,
        em_tokens=0,
        em_steps=60,
        hard_steps=40,
        joint_rounds=4,
        encoder="mlp",
        value_rounds=12,
        value_tokens=0,
    ),
}
"""``fast``: minutes on a CPU; ``paper``: the published objective and networks, for a GPU;
``long``: our objective, the network and a longer schedule. The network gains from more steps, the closed form nothing from more
rounds (docs/methods/commvq.md)."""

"""Learning what CommVQ stores: codebooks of keys, then binary codes of values, layer by layer."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfold.calibration.collect import LayerSample
from kvfold.calibration.commvq_keys import learn_keys
from kvfold.calibration.commvq_schedule import Schedule
from kvfold.calibration.commvq_values import learn_values
from kvfold.calibration.learner import LayerwiseLearner
from kvfold.calibration.state import Fit
from kvfold.methods.commvq import CommVQ


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

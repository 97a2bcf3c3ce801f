"""What stands for a decode graph where there is no GPU."""

from kvfold.engines.transformers import graph
from kvfold.engines.transformers.names import passing


class Steps:
    """In place of :class:`DecodeGraph`: runs the model's own step and keeps count."""

    made = 0

    def __init__(self, model, cache, room, compile=False):
        self.model, self.cache, self.room, self.compile, self.steps = model, cache, room, compile, 0
        assert all(graph.is_ready(layer) for layer in cache.folded)
        type(self).made += 1

    def __call__(self, ids, positions=None):
        assert self.steps < self.room
        self.steps += 1
        options = {"input_ids": ids, "position_ids": positions, "use_cache": True, **passing(self.model, self.cache)}
        return type(self.model).forward(self.model, **options).logits

    def finish(self):
        self.cache = None

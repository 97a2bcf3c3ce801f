"""A float32 model whose cache is read as the server's is: tokens before a step packed or raw by the rules of serving.

Independent of the engine: Transformers computes the model, every layer's keys and values are kept raw, and what a step reads
packed is encoded and decoded by the format, page by page.
"""

from dataclasses import replace

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from kvfold.formats import PagedFormat
from kvfold.methods.base import Observation

PAGE, BLOCK = 128, 32


class Scheduled:
    """One sequence.

    Parameters
    ----------
    path : str
        Of the model.
    stored : list of kvfold.engines.vllm.settings.Stored
        Method and formats by layer.
    """

    def __init__(self, path, stored):
        AttentionInterface.register("scheduled", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="scheduled"
        ).eval()
        self.method, self.stored = stored[0].method, stored
        self.start()

    def start(self, hit=0):
        """Begin a sequence; with ``hit``, one that shares so many tokens with the last one and has their pages and sink."""
        old = self.raw if hit else {}
        self.raw = {layer: [x[:, :, :hit] for x in sides] for layer, sides in old.items()}
        self.decoded = {}
        self.hit = hit

    @torch.no_grad()
    def step(self, tokens):
        """Log-probabilities after each of the next tokens, float32 [tokens, vocabulary]."""
        self.before = self.raw[0][0].shape[2] if self.raw else 0
        positions = torch.arange(self.before, self.before + len(tokens))[None]
        out = self.model(torch.tensor([tokens]), position_ids=positions, use_cache=False, attention_mask=None)
        return out.logits[0].float().log_softmax(-1)

    def _attend(self, module, query, key, value, mask, scaling, **_):
        layer, n0 = module.layer_idx, self.before
        grouped = query[0].unflatten(0, (key.shape[1], -1))  # of each token one head's query counts, in turn
        turn = torch.arange(n0, n0 + query.shape[2]) % 16 % grouped.shape[1]
        chosen = grouped[:, turn, torch.arange(query.shape[2])][None]
        old = self.raw.get(layer, [key[:, :, :0], value[:, :, :0], chosen[:, :, :0]])
        self.raw[layer] = [torch.cat((a, b), 2) for a, b in zip(old, (key, value, chosen), strict=True)]
        sink = self.method.sink
        packed = max((n0 - self.method.recent) // BLOCK * BLOCK, sink)
        packed = max(packed, min(self.hit, n0))
        keys, values, _ = self.raw[layer]
        if packed > sink:
            keys, values = keys.clone(), values.clone()
            for side, x in enumerate((keys, values)):
                x[:, :, sink:packed] = self.restored(layer, side, self.page(layer, side, packed))[:, :, sink:packed]
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        scores = query @ keys.mT * scaling
        at = torch.arange(keys.shape[2])
        scores = scores.masked_fill(at > (n0 + torch.arange(query.shape[2]))[:, None], float("-inf"))
        return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None

    def encoded(self, layer, side, index):
        """Fields of a page's blocks that are closed: all of them, or what is there of those without statistics."""
        form, x = self.stored[layer].formats[side], self.raw[layer][side]
        first = index * PAGE
        tokens = x[:, :, first : first + PAGE]
        tokens = tokens[:, :, : tokens.shape[2] // BLOCK * BLOCK]
        if not isinstance(form, PagedFormat):
            return self.plain(layer, side, tokens, first)
        begin = max(first, self.method.sink)
        assert x.shape[2] >= first + form.seen, "a page is read whose statistics are not known"
        made = form.statistics(x[:, :, begin : first + form.seen].unsqueeze(2)) if form.page_fields() else {}
        blocks = tokens.shape[2] // BLOCK
        return form.encode(tokens, page={name: t.expand(-1, -1, blocks, -1) for name, t in made.items()}) | made

    def plain(self, layer, side, tokens, first):
        """Fields of a page without statistics, as the method makes them."""
        method, spec = self.stored[layer].method, self.stored[layer].spec
        if side:
            return method.encode_values(tokens, {}, spec, False)
        positions = torch.arange(first, first + tokens.shape[2]).view(1, 1, -1)
        state = {} if self.stored[layer].update is None else {"update": self.stored[layer].update[None]}
        if method.query_window and not state:
            assert tokens.shape[2] == PAGE, "a page is read whose queries are not known"
            queries = self.raw[layer][2][:, :, first : first + PAGE]
            one = replace(spec, num_heads=spec.num_kv_heads)
            state = method.observe(Observation(queries, positions[0]), one)
        return method.encode_keys(tokens, state, spec, positions, False)

    def restored(self, layer, side, x):
        """Keys after RoPE and values of the model, of what pages decode to."""
        method, spec = self.stored[layer].method, self.stored[layer].spec
        if side:
            return method.unproject_values(x, spec)
        return method.restore_keys(x, spec, torch.arange(x.shape[2]).view(1, 1, -1))

    def page(self, layer, side, stop):
        """Decoded tokens up to ``stop``, or a few more."""
        form = self.stored[layer].formats[side]
        none = self.raw[layer][side][:, :, :0, :1].expand(-1, -1, -1, form.width)
        done = self.decoded.get((layer, side), none)
        for index in range(done.shape[2] // PAGE, -(-stop // PAGE)):
            done = torch.cat((done, form.decode(self.encoded(layer, side, index))), 2)
            if done.shape[2] % PAGE == 0:
                self.decoded[layer, side] = done
        return done

"""The key oracle's models and prompts: see key_oracle.py."""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvfold import models
from kvfold.evaluation.text import load_text
from kvfold.evaluation.windows import Window, library_source, retrieval_window, windows_of
from kvfold.methods.base import LayerSpec
from kvfold.rope import Rope, rope_of

SINK, RECENT, TOKENS = 32, 96, 128  # windows and page of fold


@dataclass(frozen=True)
class Setting:
    """A model and what is measured on it."""

    file: str
    length: int
    scored: int
    judged: tuple[str, ...]
    chosen: tuple[str, ...]
    """Prompts by which bits are spread; with MORE what maps and means are learned from. None of them is judged."""
    large: bool = False
    """Of heads and layers alone only heads on pairs are measured: a layer is taken for the sum of its heads, and what text
    loses for the errors of scores that its queries have. """


MORE = ("code",)

SETTINGS = {
    "135M": Setting(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        2048,
        128,
        ("pairs0", "pairs1", "pairs2", "encyclopedia", "novel"),
        ("pairs100", "pairs101", "prose"),
    ),
    "0.5B": Setting(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        1024,
        96,
        ("pairs0", "pairs1", "pairs2", "encyclopedia", "novel"),
        ("pairs100", "prose"),
    ),
    "1.5B": Setting(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1024,
        96,
        ("pairs0", "pairs1", "encyclopedia"),
        ("pairs100", "prose"),
        large=True,
    ),
}


@dataclass
class Prefix:
    """A prompt as the model ran it.

    Attributes
    ----------
    keys, values
        ``[layers, num_kv_heads, tokens, head_dim]``, after RoPE.
    hidden
        Of the scored tokens, ``[layers, scored, width]``: every layer's input.
    logp
        Of the full-precision model where it is judged, ``[places, vocabulary]``.
    places, targets
        Which scored tokens are judged, and what follows them.
    queries
        ``[layers, num_kv_heads, head_dim, head_dim]``: mean of q q' over the newer half of the prompt and a KV head's queries.
    """

    name: str
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor
    logp: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor
    queries: torch.Tensor

    @property
    def end(self) -> int:
        """One after the last folded token: whole pages between the windows."""
        return SINK + (self.keys.shape[2] - SINK - RECENT) // TOKENS * TOKENS


class Patched:
    """A cache whose layers hold given keys and values; new tokens are joined and not kept."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self.keys, self.values = keys, values
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, [batch, heads, tokens, head_dim]."""
        batch = len(key)
        found = []
        for held, new in ((self.keys[layer], key), (self.values[layer], value)):
            held = held if held.ndim == 4 else held[None]
            found.append(torch.cat((held.expand(batch, -1, -1, -1), new), 2))
        if batch == 1:
            self.seen[layer] = (key[0], value[0])
        return found[0], found[1]


class Oracle:
    """A model, and the prompts that it ran."""

    def __init__(self, name: str, work: pathlib.Path) -> None:
        self.name, self.setting, self.work = name, SETTINGS[name], work
        self.model, self.tokenizer, _ = models.load(str(models_folder() / self.setting.file), "float32", "cpu")
        config: Any = self.model.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rope: Rope = rope_of(self.model)
        self.spec = LayerSpec(
            0, self.layers, config.num_attention_heads, self.heads, self.dim, rope=self.rope, fragments=False
        )
        self.inner: Any = self.model.model

    def run(
        self, hidden: torch.Tensor, past: int, cache: Patched, first: int = 0, keep: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Layers from ``first`` on, [batch, tokens, width] to the last one's output after its norm."""
        tokens = hidden.shape[1]
        positions = torch.arange(past, past + tokens)[None]
        turn = self.inner.rotary_emb(hidden, positions)
        mask = torch.ones(tokens, past + tokens, dtype=torch.bool).tril(past)[None, None]
        for index in range(first, self.layers):
            if keep is not None:
                keep.append(hidden)
            hidden = self.inner.layers[index](
                hidden,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=turn,
            )
        return self.inner.norm(hidden)

    def window(self, prompt: str) -> Window:
        """A prompt by its name."""
        length, scored = self.setting.length, self.setting.scored
        if prompt.startswith("pairs"):
            return retrieval_window(self.tokenizer, length, scored, int(prompt[5:]))
        text = {"prose": load_text, "code": library_source, "encyclopedia": encyclopedia, "novel": novel}[prompt]()
        return windows_of(self.tokenizer, prompt, text, length, scored, 1)[0]

    def prefix(self, prompt: str) -> Prefix:
        """A prompt, run if it is not kept."""
        path = self.work / f"{self.name}-{prompt}.pt"
        if path.exists():
            return Prefix(**torch.load(path))
        begun = time.time()
        window = self.window(prompt)
        prefilled = window.prefilled
        empty = torch.zeros(self.heads, 0, self.dim)
        cache = Patched([empty] * self.layers, [empty] * self.layers)
        moments: list[torch.Tensor] = []
        hooks = [
            layer.self_attn.q_proj.register_forward_hook(lambda m, i, out: moments.append(self.moment(out)))
            for layer in self.inner.layers
        ]
        self.run(self.inner.embed_tokens(window.ids[:, :prefilled]), 0, cache)
        for hook in hooks:
            hook.remove()
        keys = torch.stack([cache.seen[i][0] for i in range(self.layers)])
        values = torch.stack([cache.seen[i][1] for i in range(self.layers)])
        hidden: list[torch.Tensor] = []
        ids = window.ids[:, prefilled:-1]
        last = self.run(self.inner.embed_tokens(ids), prefilled, Patched(list(keys), list(values)), 0, hidden)
        spans = window.answers or ((0, ids.shape[1]),)
        places = torch.cat([torch.arange(a, min(b, ids.shape[1])) for a, b in spans])
        found = Prefix(
            prompt,
            keys,
            values,
            torch.cat(hidden),
            self.model.lm_head(last[0, places]).log_softmax(-1),
            places,
            window.ids[0, prefilled + 1 + places],
            torch.stack(moments),
        )
        torch.save(vars(found), path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        say(f"{self.name} {prompt}: {prefilled} tokens run in {time.time() - begun:.0f} s")
        return found

    def moment(self, projected: torch.Tensor) -> torch.Tensor:
        """Mean of q q' after RoPE over the newer half of ``[1, tokens, heads * head_dim]``: [num_kv_heads, d, d]."""
        tokens = projected.shape[1]
        query = projected.unflatten(-1, (-1, self.dim)).transpose(1, 2)
        query = self.rope.rotate(query, torch.arange(tokens)[None, None])[0, :, tokens // 2 :]
        query = query.unflatten(0, (self.heads, -1)).flatten(1, 2)
        return query.mT @ query / query.shape[1]


def models_folder() -> pathlib.Path:
    """Where the models' files are."""
    return pathlib.Path(FOLDERS["models"])


def encyclopedia() -> Any:
    """A text that no map is learned from."""
    return load_text(pathlib.Path(FOLDERS["data"]) / "wikitext-2-raw" / "wiki.test.raw")


def novel() -> Any:
    """Another one."""
    return load_text(pathlib.Path(FOLDERS["data"]) / "gutenberg" / "moby-dick.txt")


FOLDERS = {"models": "", "data": ""}


def say(text: str) -> None:
    """One line to the terminal, at once."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)

"""Turns of a chat on one folded cache: each turn computes its new tokens only, and whatever happens the cache stays right."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.cache_utils import DynamicLayer

import kvfold
from kvfold import methods
from kvfold.commands.terminal import Stream, prepare
from kvfold.engines.transformers import names, sizes
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.graph import decoding
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import KVFoldError
from kvfold.models import ModelInfo, prompt_tokens
from kvfold.storage.following import SPARE

RESERVED = 16_384
"""Tokens that storage on a GPU is reserved for, so that answers are decoded in a graph; a longer chat goes on without."""


@dataclass(frozen=True)
class Turn:
    """What an answer took.

    Attributes
    ----------
    text : str
        The answer.
    new_tokens : int
    tokens_per_s : float or None
        Of decoding; None for an answer of one or two tokens.
    prompt_tokens : int
        The conversation so far, as the chat template renders it, the new message included.
    read_tokens : int
        Those of them that were computed; the others were in the cache.
    dropped : int
        Tokens that the cache held and holds no more, so that what the conversation still has of them was read again.
    why_dropped : str
        Why; empty if there are none.
    ended : {"answered", "length", "context", "interrupted"}
        The model ended it; ``max_new_tokens`` were there; the model's context was full; Ctrl-C.
    """

    text: str
    new_tokens: int
    tokens_per_s: float | None
    prompt_tokens: int
    read_tokens: int
    dropped: int
    why_dropped: str
    ended: str


class Conversation:
    """A chat with a model.

    Parameters
    ----------
    model, tokenizer, info
        As :func:`kvfold.models.load` gives them.
    method : str or Method
        Of the cache.
    system : str or None
        System message.
    max_new_tokens : int
        Of an answer.
    temperature : float
        0: the likeliest token always.

    Raises
    ------
    KVFoldError
        The tokenizer has no chat template, or its template refuses the system message.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        info: ModelInfo,
        method: Any = methods.DEFAULT_METHOD,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
    ) -> None:
        if not tokenizer.chat_template:
            raise KVFoldError(
                f"model: {info.name} has no chat template; take an instruct model, or kvfold generate --raw"
            )
        self.model, self.tokenizer, self.info = model, tokenizer, info
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.system = system
        self.held: list[int] = []
        self.asked = 0  # tokens of the conversation up to the last answer
        self.why_forgotten, self.forgotten = "", 0
        self.use(method)
        self.reset()
        self._render([*self.messages, {"role": "user", "content": "Hello"}])

    # ---- what a person may do ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self._forget("")

    def use(self, method: Any) -> int:
        """Go on with another method: a new cache, into which the next turn reads the whole conversation.

        Returns
        -------
        int
            Tokens that the old cache held.

        Raises
        ------
        KVFoldError
            The method is unknown or does not fit the model; the old one stays.
        """
        chosen = methods.get(method)
        cache = self._fold(chosen)
        self.method, self.cache = chosen, cache
        self._hold([], f"now folded by {chosen}", max(len(self.held), self.forgotten))
        return self.forgotten

    def ask(self, text: str, file: Any, gently: bool = True) -> Turn:
        """Answer a message; the answer is streamed to ``file``.

        Ctrl-C stops the answer after the token that is being made and keeps what was said; a second one raises. ``gently``:
        False, or another thread than the main one, and the first one raises.

        Raises
        ------
        KVFoldError
            The message does not fit the model's context; the conversation is as it was.
        KeyboardInterrupt
            What was said until then stays, and the next turn reads it again.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._render(messages)
        room = self.max_new_tokens
        if self.info.max_context is not None:
            room = min(room, self.info.max_context - len(ids))
        if room < 1:
            raise KVFoldError(
                f"context: the conversation has {len(ids):,} tokens with this message, the model's context "
                f"{self.info.max_context:,}; /reset begins a new one"
            )
        read, dropped, why = self._make_room_for(ids)
        held, restarts = len(self.held), self.cache.restarts
        stream, stop = _Said(self.tokenizer, file), _Stop()
        try:
            with _stopping(stop) if gently else nullcontext(), stream.waiting(f"reading {read:,} tokens"):
                prepare(self.cache, self.model.device)
                output = self._generate(ids, room, stream, stop)
                new = output[len(ids) :]
                ended = self._ended(new, room, stop)
                said = self.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                assert isinstance(said, str)
                self._hold(output[: int(self.cache.get_seq_length())], "", 0)
        except BaseException as error:
            self._forget("the last answer was broken off" if isinstance(error, KeyboardInterrupt) else "after an error")
            self._remember(messages, stream.text, keep=bool(stream.text))
            raise
        if self.cache.restarts != restarts and held:
            read, dropped, why = len(ids), held + dropped, "from this length on the model reads them otherwise"
        self.asked = len(ids)
        self._remember(messages, said, keep=bool(said) or ended != "interrupted")
        return Turn(said, len(new), stream.tokens_per_s(), len(ids), read, dropped, why, ended)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _render(self, messages: list[dict[str, str]]) -> list[int]:
        return prompt_tokens(self.tokenizer, messages, self.info.name)

    def _make_room_for(self, ids: list[int]) -> tuple[int, int, str]:
        """Have the cache hold a beginning of ``ids`` and nothing else.

        Returns
        -------
        read, dropped : int
            Tokens to compute, and tokens that the cache had to drop.
        why : str
            Why it had to.
        """
        why, dropped = self.why_forgotten, self.forgotten
        common = next((i for i, (a, b) in enumerate(zip(self.held, ids, strict=False)) if a != b), None)
        if common is None:
            common = min(len(self.held), len(ids) - 1)
        if common < len(self.held):
            why = "the chat template renders earlier turns otherwise than before"
            if common >= self.asked:
                why = "the chat template renders the last answer otherwise than it was made"
            dropped = len(self.held)
            if self._crops_exactly(common):
                dropped -= common
                self.cache.crop(-dropped)
                self.held = self.held[:common]
            else:
                self._forget("")
        return len(ids) - len(self.held), dropped, why if dropped else ""

    def _crops_exactly(self, tokens: int) -> bool:
        """Whether the cache cut to ``tokens`` is what it was when it had as many."""
        for layer in self.cache.layers:
            if isinstance(layer, FoldedLayer):
                if any(packed + layer.method.sink > tokens for packed in layer.packed if packed):
                    return False
                if layer.following.active and (layer.method.paper or len(self.held) - tokens > SPARE):
                    return False
            elif type(layer) is not DynamicLayer:
                return False
        return True

    def _generate(self, ids: list[int], room: int, stream: Stream, stop: _Stop) -> list[int]:
        inputs = torch.tensor([ids], device=self.model.device)
        sampling: dict[str, Any] = {"do_sample": self.temperature > 0}
        # None rather than the model's own values: they only warn when nothing is sampled.
        unset = {"temperature": None, "top_p": None, "top_k": None}
        sampling |= {"temperature": self.temperature} if self.temperature > 0 else unset
        if self.tokenizer.pad_token_id is None:
            sampling["pad_token_id"] = self.tokenizer.eos_token_id
        on_gpu = self.model.device.type == "cuda"
        graphs = decoding(self.model, self.cache, room, required=False) if on_gpu else nullcontext()
        with torch.inference_mode(), graphs:
            generate: Any = self.model.generate
            output = generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                **{names.CACHE: self.cache},
                max_new_tokens=room,
                streamer=stream,
                stopping_criteria=[stop],
                **sampling,
            )
        return list(output[0].tolist())

    def _ended(self, new: list[int], room: int, stop: _Stop) -> str:
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        if new and new[-1] in (ends if isinstance(ends, list) else [ends]):
            return "answered"
        if stop.asked:
            return "interrupted"
        return "length" if room == self.max_new_tokens else "context"

    # ---- state -------------------------------------------------------------------------------------------------------

    def _remember(self, messages: list[dict[str, str]], said: str, keep: bool) -> None:
        if keep:
            self.messages = [*messages, {"role": "assistant", "content": said}]

    def _fold(self, method: Any) -> FoldedCache:
        on_gpu = self.model.device.type == "cuda"
        most = min(self.info.max_context or RESERVED, RESERVED)
        return kvfold.fold(self.model, method, max_length=most if on_gpu else None)

    def _forget(self, why: str) -> None:
        """Begin with an empty cache; ``why`` is said when what it held is read again."""
        self.cache = self._fold(self.method)
        self._hold([], why, max(len(self.held), self.forgotten) if why else 0)

    def _hold(self, tokens: list[int], why: str, forgotten: int) -> None:
        """Note which tokens the cache holds; or how many it held, and why it does no more."""
        self.held = tokens
        self.why_forgotten, self.forgotten = why, forgotten

    def sizes(self) -> dict[str, Any]:
        """The cache's sizes, as ``generate --json`` has them."""
        return sizes.to_dict(self.cache, self.model.dtype, self.info.max_context)


class _Said(Stream):
    """Keeps what was printed, for an answer that is broken off."""

    def __init__(self, tokenizer: Any, file: Any) -> None:
        super().__init__(tokenizer, file)
        self.text = ""

    def show(self, text: str, end: str) -> None:
        self.text += text
        super().show(text, end)


class _Stop(StoppingCriteria):
    """Ends an answer after the token at which it was asked to."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.asked, device=input_ids.device)


@contextlib.contextmanager
def _stopping(stop: _Stop) -> Iterator[None]:
    """Have the first Ctrl-C ask for a stop between tokens, where the cache is whole, and a second one interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""kvfold as a model of lm-eval, under the name ``kvfold``. Importing this module registers it.

lm-eval's own models score a continuation in one forward pass, which reads no cache. Here a prompt is prefilled and folded, and
its last token, the continuation and every generated token read what was folded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold import methods, models
from kvfold.errors import KVFoldError
from kvfold.evaluation.answer import answer
from kvfold.evaluation.decoding import room
from kvfold.evaluation.perplexity import CHUNK, score
from kvfold.evaluation.sizes import sizes_of
from kvfold.evaluation.suites.base import Prompt, Sizes

NAME = "kvfold"
MAX_GEN_TOKS = 256
"""Where a task does not say; lm-eval's own models have as many."""
LM_EVAL_DEVICE = "cuda:0"
"""Of lm-eval's command, where ``--device`` is not given."""
TOKEN_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("do_sample", "temperature", "top_p", "top_k")
"""What has no meaning where the likeliest token is always taken."""

Pair = tuple[tuple[str, str], list[int], list[int]]
"""Context and continuation, as text and as tokens."""


@register_model(NAME)
class KVFoldLM(TemplateLM):
    """A causal language model whose cache is folded; one request at a time.

    Parameters
    ----------
    pretrained : str, optional
        Hub id, local folder or ``.gguf`` file; default: the embedded model.
    method : str
        As everywhere in kvfold. Of ``method=fold:bits=2,recent=32`` lm-eval makes two arguments at the comma; the second one is
        taken back as an option of the method.
    dtype, device : str, optional
        As in :func:`kvfold.models.load`. Without a GPU, ``cuda:0``, which lm-eval gives where the user says nothing, is the
        CPU; a warning says so.
    chunk : int
        Tokens of a continuation per call.
    max_length : int, optional
        Tokens of prompt and answer; default: the model's context. Longer prompts lose their beginning.
    batch_size : int or str
        1, or ``auto``, which is 1.

    Raises
    ------
    KVFoldError
        A method or a model that is none, or an unknown argument.
    """

    max_length: int

    def __init__(
        self,
        pretrained: str | None = None,
        method: str = "fold",
        dtype: str | None = None,
        device: str | None = None,
        chunk: int = CHUNK,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("1", "auto"):
            raise KVFoldError(f"batch_size: {batch_size}; requests are read one at a time: give 1 or auto")
        if chunk < 1:
            raise KVFoldError(f"chunk: {chunk}; give at least 1")
        chosen = methods.get(_spec(method, options))
        loaded, tokenizer, _ = models.load(pretrained, dtype, _there(device))
        kvfold.explain(loaded, chosen)  # refuses what does not fit, before the first request
        self._begin(loaded, tokenizer, chosen, chunk)
        limit = self.max_length
        if max_length is not None and not 2 <= max_length <= limit:
            raise KVFoldError(f"max_length: {max_length}; give 2 to {limit}, the model's context")
        self.max_length = max_length or limit

    def _begin(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, method: methods.Method, chunk: int
    ) -> None:
        self.model, self.tokenizer, self.method, self.chunk = model, tokenizer, method, chunk
        self.max_length = models.context_limit(model.config) or 1 << 30
        self._device = model.device
        self.read = self.tested = 0
        self.caches: list[Sizes] = []

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, method: methods.Method, chunk: int = CHUNK
    ) -> KVFoldLM:
        """With a model that is loaded."""
        found = cls.__new__(cls)
        TemplateLM.__init__(found)
        found._begin(model, tokenizer, method, chunk)
        return found

    @property
    def sizes(self) -> Sizes:
        """Means over the caches of all requests so far; bits, of those that packed something."""
        bits = [[b for b in pair if b is not None] for pair in zip(*(size.bits for size in self.caches), strict=True)]
        count = len(self.caches)
        return Sizes(
            (_mean(bits[0]), _mean(bits[1])) if bits else (None, None),
            sum(size.cache_bytes for size in self.caches) // max(count, 1),
            sum(size.full_cache_bytes for size in self.caches) // max(count, 1),
        )

    # ---- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        found = self.tokenizer.eos_token_id
        return int(found[0] if isinstance(found, list) else found)

    @property
    def prefix_token_id(self) -> int:
        found = self.tokenizer.bos_token_id
        return self.eot_token_id if found is None else int(found)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; a text that begins with the model's first token gets no second one."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as one prompt."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        assert isinstance(text, str)
        return text

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for texts, context, continuation in tqdm(requests, "loglikelihood through the cache", disable=disable_tqdm):
            found.append(self._scored(context, continuation))
            self.cache_hook.add_partial("loglikelihood", texts, found[-1])
        self._say_tested()
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for (text,) in tqdm([r.args for r in requests], "rolling, through the cache", disable=disable_tqdm):
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length, 1
            )
            total = math.fsum(self._scored(*make_disjoint_window(window))[0] for window in windows)
            found.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        self._say_tested()
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        found = []
        for context, asked in tqdm([r.args for r in requests], "generating", disable=disable_tqdm):
            new, until = _generation(asked)
            if new >= self.max_length:
                raise KVFoldError(f"max_gen_toks: {new} tokens leave no room in {self.max_length}; give fewer")
            ids = self.tok_encode(context) or [self.prefix_token_id]
            ids = ids[-(self.max_length - new) :]
            if len(ids) == 1:  # nothing is left to read after the first call
                ids = [self.prefix_token_id, *ids]
            prompt = Prompt(torch.tensor([ids]), len(ids) - 1, new, stop=until, stop_at_once=True)

            def run(cache: Any, prompt: Prompt = prompt) -> tuple[str, int, int]:
                outcome, tested = answer(self.model, self.tokenizer, prompt, cache, self.chunk)
                return outcome.text, tested, 1 + outcome.new_tokens

            found.append(self._folded(len(ids) + new, run))
            self.cache_hook.add_partial("generate_until", (context, asked), found[-1])
        self._say_tested()
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results: the method and how many tokens read what it packed."""
        return {
            "kvfold_method": str(self.method),
            "kvfold_effective_bits": self.sizes.bits[1],
            "kvfold_tokens_read": self.read,
            "kvfold_tokens_tested": self.tested,
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Log-likelihood of a continuation, and whether each of its tokens is the likeliest.

        All of the context but its last token is prefilled; that one and the continuation read the folded cache.
        """
        continuation = continuation[-self.max_length :]
        ids = [*context, *continuation][-(self.max_length + 1) :]
        before = len(ids) - len(continuation)
        if before < 1:
            raise KVFoldError("lm-eval: a continuation without any context; nothing predicts its first token")
        tokens = torch.tensor([ids], device=self.model.device)
        first, likeliest = 0.0, True
        if before == 1:  # the first call must have a token, and its own prediction is not read from a cache
            with torch.inference_mode():
                logits = torch.log_softmax(self.model(tokens[:, :1]).logits[0, -1].float(), -1)
            first, likeliest = float(logits[ids[1]]), int(logits.argmax()) == ids[1]
            self.read += 1
            if len(ids) == 2:
                return first, likeliest

        def run(cache: Any) -> tuple[tuple[float, bool], int, int]:
            found = score(self.model, tokens, max(1, before - 1), cache, self.chunk)
            return (-float(found.nll.double().sum()), bool(found.correct.all())), found.tested, len(found.nll)

        total, all_likeliest = self._folded(len(ids), run)
        return first + total, likeliest and all_likeliest

    def _folded(self, length: int, run: Callable[[Any], tuple[Any, int, int]]) -> Any:
        """Run something on an empty folded cache; it says what came out, and how many tokens read packed ones, of how many."""
        cache = kvfold.fold(self.model, self.method, max_length=room(self.model, length))
        try:
            found, tested, read = run(cache)
        finally:
            kvfold.unfold(self.model)
        self.tested, self.read = self.tested + tested, self.read + read
        self.caches.append(sizes_of(cache))
        return found

    def _say_tested(self) -> None:
        if self.tested < self.read:
            what = f"{self.tested} of {self.read} tokens so far read something packed"
            windows = f"{self.method.sink} + {self.method.recent} tokens are in full precision"
            logging.getLogger(__name__).warning("kvfold: %s (%s); shorter prompts test nothing", what, windows)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _there(device: str | None) -> str | None:
    """lm-eval's default device names a GPU, whether there is one or not."""
    if device != LM_EVAL_DEVICE or torch.cuda.is_available():
        return device
    logging.getLogger(__name__).warning("kvfold: lm-eval asked for %s, and there is no GPU: on the CPU", device)
    return "cpu"


def _spec(method: str, options: dict[str, Any]) -> str:
    """The method's string, with what lm-eval cut off at its commas."""
    if not options:
        return method
    if "+" in method:
        raise KVFoldError(
            f"model_args: {', '.join(options)} follows a comma of method={method}; give model_args as JSON, where commas stay"
        )
    cut = ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )
    return f"{method}{',' if ':' in method else ':'}{cut}"


def _generation(asked: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """How many tokens to generate at most, and where to stop."""
    given = [int(asked[name]) for name in TOKEN_NAMES if asked.get(name) is not None]
    warm = asked.get("temperature")
    if (asked.get("do_sample") and warm != 0) or (
        asked.get("do_sample") is None and warm
    ):  # as lm-eval's own models take it
        what = "do_sample=true" if asked.get("do_sample") else f"temperature={warm} samples"
        raise KVFoldError(f"gen_kwargs: {what}; answers take the likeliest token: give do_sample=false")
    if unknown := sorted(set(asked) - {"until", *TOKEN_NAMES, *SAMPLING}):
        raise KVFoldError(
            f"gen_kwargs: {unknown[0]} is not known; known: until, {', '.join((*TOKEN_NAMES, *SAMPLING))}"
        )
    until = asked.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(until)
    if given and given[0] < 1:
        raise KVFoldError(f"max_gen_toks: {given[0]}; give at least 1")
    return given[0] if given else MAX_GEN_TOKS, tuple(text for text in stop if text)

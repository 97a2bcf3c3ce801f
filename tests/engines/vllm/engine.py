"""vLLM in this process on a CPU, with a look at its blocks: what checks of folded caches share."""

import glob
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

CLOSE = 0.02
"""Nats, of log-probabilities that should be equal."""


def model_path():
    home = Path(os.environ.get("KVFOLD_HOME") or Path.home() / ".cache" / "kvfold")
    found = glob.glob(str(home / "models" / "SmolLM2-135M-Instruct-*" / "config.json"))
    assert found, f"the demo model is not in {home}: run kvfold generate once"
    return os.path.dirname(found[0])


def prompt(length, seed=0):
    """Token ids of made-up but plausible length."""
    import random

    chosen = random.Random(seed)
    return [chosen.randrange(300, 20000) for _ in range(length)]


class Seen(NamedTuple):
    """A step: first tokens, lengths afterwards, pages."""

    query_start: Any
    seq_lens: Any
    table: Any

    def before(self, row=0):
        return int(self.seq_lens[row] - self.query_start[row + 1] + self.query_start[row])


class Engine:
    """vLLM in this process, with a look at its blocks."""

    def __init__(self, method="fold:bits=8", poison=True, path=None, more=None, **options):
        from vllm import LLM

        import kvfold.engines.vllm.backend as backend

        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 1024}
        defaults |= {"max_num_seqs": 8, "enable_prefix_caching": True, "seed": 0}
        self.llm = LLM(
            path or model_path(), additional_config={"kvfold": method} | (more or {}), **(defaults | options)
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.pool = self.core.scheduler.kv_cache_manager.block_pool
        self.layers = self.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        self.impls = [l.impl for n, l in self.layers.items() if hasattr(l, "impl") and hasattr(l.impl, "window_name")]
        assert self.impls, "vLLM did not take kvfold's attention: is kvfold installed, with its entry points?"
        self.steps = []
        self.poisoned: set[int] = set()
        inner = backend.run

        def run(layer, step, query, key, value, out):
            if layer is self.impls[0].layer:
                paged = step.paged  # vLLM's tensors change in place
                self.steps.append(Seen(*(t.clone() for t in (paged.query_start, paged.seq_lens, paged.table))))
                if poison:
                    self.poison()
            inner(layer, step, query, key, value, out)

        backend.run = run

    def poison(self):
        """NaN in every block that is free and shared with nobody, the null block among them.

        What was free at the step before and still is holds NaN already: nobody may have written there, but to the null block.
        """
        import torch

        free = {b.block_id for b in self.pool.blocks if b.is_null or (b.ref_cnt == 0 and b.block_hash is None)}
        fresh = sorted(free - self.poisoned)
        self.poisoned = free - {b.block_id for b in self.pool.blocks if b.is_null}
        for layer in self.layers.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel():
                cache[fresh] = float("nan")

    @property
    def free(self):
        return self.pool.get_num_free_blocks()

    def ask(self, *prompts, tokens=6):
        """Greedy answers: (tokens, their log-probabilities) per prompt."""
        from vllm import SamplingParams

        ask = SamplingParams(max_tokens=tokens, temperature=0, logprobs=0, ignore_eos=True)
        outs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], ask, use_tqdm=False)
        answers = []
        for out in outs:
            got = out.outputs[0]
            logs = [step[t].logprob for step, t in zip(got.logprobs, got.token_ids, strict=True)]
            assert len(logs) == tokens and all(math.isfinite(x) for x in logs), logs
            answers.append((list(got.token_ids), logs))
        return answers

    def forget(self):
        assert self.llm.reset_prefix_cache()


def difference(a, b):
    """Largest difference of log-probabilities; the answers' tokens must be the same."""
    assert a[0] == b[0], f"tokens differ: {a[0]} and {b[0]}"
    return max(abs(x - y) for x, y in zip(a[1], b[1], strict=True))

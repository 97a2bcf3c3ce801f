"""Folded caches in stock vLLM on a CPU, end to end: run by .ci/run in an environment of their own (see make vllm).

    python tests/engines/vllm/checks.py            # all but the slow ones
    python tests/engines/vllm/checks.py schedule   # some

Every check is a process of its own. SmolLM2-135M-Instruct in float32, on one thread.
"""

import glob
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "KVFOLD_VLLM_CPU": "1",
}
CLOSE = 0.02
"""Nats, of log-probabilities that should be equal."""
TEXT = "The city lies on both banks of the river, and its oldest part is the island between them. "


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
        """NaN in every block that is free and shared with nobody, the null block among them."""
        import torch

        free = [b.block_id for b in self.pool.blocks if b.is_null or (b.ref_cnt == 0 and b.block_hash is None)]
        for layer in self.layers.values():
            cache = getattr(layer, "kv_cache", None)
            if isinstance(cache, torch.Tensor) and cache.numel():
                cache[free] = float("nan")

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


def scheduled(engine, path):
    from scheduled import Scheduled

    return Scheduled(path, [impl.layer.stored for impl in engine.impls])


def follow(reference, tokens, answer, done=0):
    """The same prompt and answer in the reference: cuts of 128, then one by one."""
    logs = None
    for first in range(done, len(tokens), 128):
        logs = reference.step(tokens[first : first + 128])
    found = [float(logs[-1, answer[0][0]])]
    for token, after in pairwise(answer[0]):
        found.append(float(reference.step([token])[-1, after]))
    return answer[0], found


# ---- the checks --------------------------------------------------------------------------------------------------------------


def check_contract():
    """What is taken of vLLM's insides is there: two groups with our spec and manager, the layout, and calls that fit."""
    import inspect

    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from kvfold.engines.vllm.manager import RecentManager
    from kvfold.engines.vllm.spec import RecentSpec

    engine = Engine("fold")
    packed, *recent = engine.core.scheduler.kv_cache_config.kv_cache_groups  # windows may need several
    assert packed.kv_cache_spec.block_size == 128 and {g.kv_cache_spec.block_size for g in recent} == {16}
    assert {type(g.kv_cache_spec) for g in recent} == {RecentSpec}
    assert len(packed.layer_names) == sum(len(g.layer_names) for g in recent) == 30
    page_bytes = engine.impls[0].layer.stored.page_bytes
    assert packed.kv_cache_spec.state_content_bytes == page_bytes // 128
    managers = engine.core.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert [type(m) is RecentManager for m in managers] == [False, *(True for _ in recent)]
    for name, ours in vars(RecentManager).items():
        theirs = getattr(SlidingWindowManager, name, None)
        if name.startswith("_") or not callable(theirs):
            continue
        ours = getattr(RecentManager, name)
        names = [p.name for p in inspect.signature(theirs).parameters.values() if p.name not in ("args", "kwargs")]
        inspect.signature(ours).bind(**dict.fromkeys(names))  # a new argument of vLLM's would not fit
    cache = engine.layers[packed.layer_names[0]].kv_cache
    assert cache.shape[1:3] == (3, 128) and cache[0, 0].is_contiguous()  # block, head: one region of bytes
    print(f"groups of 128 and 16 tokens ({len(recent)}), pages of {page_bytes} bytes, calls of vLLM's managers fit")


def check_schedule():
    """Chunked prefill, pages across their boundary, a prefix hit: as a float32 model that follows the same schedule."""
    for method in ("fold:bits=8", "kivi:bits=8,recent=64,sink=0"):
        engine = Engine(method, max_num_batched_tokens=128)
        same_plan(engine)
        reference = scheduled(engine, model_path())
        tokens = prompt(250)
        (answer,) = engine.ask(tokens, tokens=20)
        lengths = [int(s.seq_lens[0]) for s in engine.steps]
        assert lengths == [128, *range(250, 270)], lengths
        worst = difference(answer, follow(reference, tokens, answer))
        print(f"{method}: 250 tokens in chunks of 128, 20 more: {worst:.4f}")
        assert worst < CLOSE
        same_bytes(engine, reference, 256)
        before = len(engine.steps)
        longer = tokens[:140] + prompt(100, seed=1)
        (answer,) = engine.ask(longer, tokens=20)
        assert engine.steps[before].before() == 128, "no prefix hit"
        reference.start(hit=128)
        worst = difference(answer, follow(reference, longer, answer, done=128))
        print(f"{method}: a hit of 128 tokens, 112 more, 20 more: {worst:.4f}")
        assert worst < CLOSE
        assert engine.free == engine.pool.num_gpu_blocks - 1
        if method.startswith("fold"):
            del engine


def same_bytes(engine, reference, tokens):
    """Pages hold what the format makes of the reference's tokens: almost all codes, for tokens differ by rounding."""
    import torch

    table = engine.steps[-1].table[0]
    for index, impl in enumerate(engine.impls[:1] + engine.impls[-1:]):
        layer = 0 if index == 0 else len(engine.impls) - 1
        for side, fields in enumerate((impl.layer.keys, impl.layer.values)):
            for page in range(tokens // 128):
                expected = reference.encoded(layer, side, page)
                for name, t in expected.items():
                    found = fields[name][int(table[page])]
                    same = (
                        (found == t[0]).float().mean()
                        if not t.is_floating_point()
                        else (torch.isclose(found.float(), t[0].float(), rtol=2e-2, atol=1e-3).float().mean())
                    )
                    assert same > (0.97 if layer == 0 else 0.8), (layer, side, page, name, float(same))


def check_batches(method="fold:bits=8"):
    """Alone, in mixed batches, four equal prompts in one step, after an abort: the same answers, and the same bytes."""
    engine = Engine(method)
    prompts = [prompt(n, seed=n) for n in (5, 128, 129, 180, 400)]
    alone, pages = [], []
    for tokens in prompts:
        engine.forget()
        before = len(engine.steps)
        alone += engine.ask(tokens)
        pages += bytes_since(engine, before)
    engine.forget()
    before = len(engine.steps)
    together = engine.ask(*prompts)
    sizes = {int(s.seq_lens.shape[0]) for s in engine.steps}
    assert max(sizes) == len(prompts)
    worst = max(difference(a, b) for a, b in zip(alone, together, strict=True))
    print(f"mixed batch of {len(prompts)}: {worst:.4f}")
    assert worst < CLOSE
    last = bytes_since(engine, before)
    assert len(last) == len(pages) == len(prompts)
    assert all(any(same(p, q) for q in last) for p in pages), "pages of a batch differ from those of a request alone"
    engine.forget()
    four = engine.ask(*[prompts[-1]] * 4)
    worst = max(difference(alone[-1], answer) for answer in four)
    print(f"four equal prompts in one step: {worst:.4f}")
    assert worst < 3 * CLOSE  # three of them read packed what the first reads raw
    abort(engine)
    engine.forget()
    again = engine.ask(prompts[4])
    assert difference(alone[4], again[0]) < CLOSE
    assert engine.free == engine.pool.num_gpu_blocks - 1, "blocks are lost"


def check_batches_of_pages_that_follow_their_queries():
    """The same for SQuat, whose pages are packed when they are whole."""
    check_batches("squat:bits=8")


def bytes_since(engine, first, layer=0):
    """Fields of the whole pages of a layer, for each request of the steps from ``first`` on."""
    last = {}
    for step in engine.steps[first:]:
        for row, length in enumerate(step.seq_lens.tolist()):
            if length:
                last[int(step.table[row, 0])] = step.table[row, : length // 128].long()
    found = engine.impls[layer].layer
    return [[t[p].clone() for side in (found.keys, found.values) for t in side.values()] for p in last.values()]


def same(a, b):
    import torch

    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def abort(engine):
    from vllm import SamplingParams

    inner = engine.llm.llm_engine
    for i in range(3):
        inner.add_request(f"gone-{i}", {"prompt_token_ids": prompt(400, seed=90 + i)}, SamplingParams(max_tokens=50))
    for _ in range(3):
        inner.step()
    inner.abort_request([f"gone-{i}" for i in range(3)])
    while inner.has_unfinished_requests():
        inner.step()


def check_preemption():
    """A pool of 40 blocks, in which five requests have room when they begin, but not when they have grown."""
    engine = Engine("fold:bits=8", num_gpu_blocks_override=40)
    prompts = [prompt(60 + i, seed=50 + i) for i in range(5)]
    alone = engine.ask(prompts[-1], tokens=72)
    engine.forget()
    preempted = []
    scheduler = engine.core.scheduler
    inner = scheduler._preempt_request

    def preempt(request, *args, **kwargs):
        preempted.append(request.request_id)
        return inner(request, *args, **kwargs)

    scheduler._preempt_request = preempt
    together = engine.ask(*prompts, tokens=72)
    assert preempted, "nothing was preempted"
    worst = max(difference(a, b) for a, b in zip(alone, together[-1:], strict=True))
    print(f"40 blocks, {len(preempted)} preemptions: {worst:.4f}")
    assert worst < 3 * CLOSE  # what a preempted request had raw, it reads packed once it is computed anew
    assert engine.free == 39, "blocks are lost"


def same_plan(engine):
    """The plan's numbers are those that vLLM logs."""
    from kvfold.engines.vllm import capacity

    stored = [impl.layer.stored for impl in engine.impls]
    config = engine.llm.llm_engine.vllm_config
    planned = capacity.folded(1 << 30, config.model_config.max_model_len, stored, 3)
    print(f"{planned.tokens} tokens planned, {config.cache_config.kv_cache_size_tokens} logged by vLLM")
    assert planned.tokens == config.cache_config.kv_cache_size_tokens
    assert planned.blocks == engine.pool.num_gpu_blocks


def check_refusals():
    """What cannot be served ends at start-up, with a sentence that names it and what to do."""
    import vllm
    from vllm import EngineArgs

    from kvfold.engines.vllm import refusals
    from kvfold.engines.vllm.settings import method_of

    def problems(method="fold", change=lambda config: None, **options):
        arguments = EngineArgs(model_path(), additional_config={"kvfold": method}, max_model_len=512, **options)
        config = arguments.create_engine_config()
        change(config)
        return list(refusals.problems(config, method_of(config.additional_config)))

    def parallel(name):
        return lambda config: setattr(config.parallel_config, name, 2)

    def drafting(method):
        return lambda config: setattr(config.speculative_config, "method", method)

    assert problems() == []
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    assert problems(speculative_config=ngram) == []
    for expected, found in {
        "recent=0: drafts that are taken back": problems("kivi:recent=0", speculative_config=ngram),
        "squat: recent=64: a page waits for its 128 tokens": problems("squat:recent=64"),
        "zipcache: its encoder follows each request's queries": problems("zipcache"),
        "joint=true makes one code of all KV heads": problems("commvq:joint=true"),
        "vqllm's tables are of all KV heads": problems("vqllm", tensor_parallel_size=3),
        "disable_hybrid_kv_cache_manager": problems(disable_hybrid_kv_cache_manager=True),
        "kv_transfer_config": problems(kv_transfer_config=connector),
        "kv_transfer_config: connectors": problems(kv_offloading_size=1.0),
        "decode_context_parallel_size=2: allowed: 1": problems(change=parallel("decode_context_parallel_size")),
        "prefill_context_parallel_size=2: allowed: 1": problems(change=parallel("prefill_context_parallel_size")),
        **{
            f"speculative_config: method={name}: draft layers": problems(
                speculative_config=ngram, change=drafting(name)
            )
            for name in ("eagle3", "mtp", "draft_model")
        },
    }.items():
        assert any(expected in problem for problem in found), (expected, found)
    real, vllm.__version__ = vllm.__version__, "0.33.0"
    assert problems()[0].startswith("vllm=0.33.0: allowed: 0.29.x, 0.31.x, 0.32.x"), problems()
    vllm.__version__ = real
    layer = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", "softcap": None}
    layer |= {"attn_type": "decoder", "shared": None, "others": {}}
    refusals.check_layer(**layer)
    for name, value, expected in (
        ("alibi_slopes", [1.0], "ALiBi"),
        ("sliding_window", 128, "backend_per_kind"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype bfloat16"),
        ("softcap", 30.0, "soft-capped"),
        ("attn_type", "encoder_decoder", "allowed: decoder"),
        ("shared", "model.layers.0", "another one's cache"),
        ("others", {"sinks": 1}, "learned sinks"),
    ):
        refuses(lambda layer=layer | {name: value}: refusals.check_layer(**layer), expected)
    refuses_what_vllm_names()
    refuses_without_kernels()
    for wrong, expected in (("fodl", "did you mean fold"), (None, "names no method")):
        refuses(lambda wrong=wrong: Engine(wrong), expected)
    changes_nothing()
    print("refusals name what they refuse; what is not chosen changes nothing")


def refuses_what_vllm_names():
    """vLLM's reasons against a backend: for each that is listed vLLM has one of these words, and the backend a remedy."""
    import inspect

    import torch
    from vllm.config import ModelConfig

    from kvfold.engines.vllm import refusals
    from kvfold.engines.vllm.backend import FoldedBackend

    given = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": False}
    given |= {"has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False}
    given |= {"device_capability": None, "attn_type": "decoder"}
    assert FoldedBackend.validate_configuration(**given) == []
    known = inspect.signature(FoldedBackend.__mro__[2].validate_configuration).parameters
    for name, value, expected in (
        ("kv_cache_dtype", "fp8", "pass --kv-cache-dtype bfloat16"),
        ("block_size", 64, "pages have 128 tokens; leave --block-size out"),
        ("use_mla", True, "MLA: the cache is a latent already"),
        ("has_sink", True, "learned sinks"),
        ("has_sliding_window", True, "backend_per_kind"),
        ("use_kv_connector", True, "kv_transfer_config"),
        ("use_dcp", True, "decode_context_parallel_size: allowed: 1"),
        ("use_pcp", True, "prefill_context_parallel_size: allowed: 1"),
        ("use_batch_invariant", True, "VLLM_BATCH_INVARIANT: allowed: 0"),
        ("dtype", torch.float64, "dtype: allowed"),
        ("use_mm_prefix", True, "leave --attention-backend CUSTOM out"),
        ("attn_type", "encoder", "leave --attention-backend CUSTOM out"),
    ):
        if name in known:  # older releases do not ask for all
            (reason,) = FoldedBackend.validate_configuration(**given | {name: value})
            assert reason.startswith("kvfold: ") and expected in reason, (name, reason)
    for name in ("is_encoder_decoder", "is_hybrid", "is_attention_free", "use_mla", "uses_mrope"):
        assert hasattr(ModelConfig, name), name
    assert set(refusals.REMEDIES) >= {"MLA not supported", "KV connector not supported"}


def refuses_without_kernels():
    """On a GPU: without FlashAttention, head sizes and methods without kernels."""
    import torch
    from vllm.v1.attention.backends import fa_utils

    from kvfold import methods
    from kvfold.engines.vllm import refusals
    from kvfold.engines.vllm.settings import layer_spec, stored

    def layer(method, dim=128):
        return stored(methods.get(method), layer_spec(0, 32, 32, 8, dim, torch.bfloat16, True))

    gpu, real = torch.device("cuda"), fa_utils.is_flash_attn_varlen_func_available
    fa_utils.is_flash_attn_varlen_func_available = lambda: False
    refuses(lambda: refusals.check_kernel(layer("fold"), gpu), "FlashAttention is not there, which prompts need")
    fa_utils.is_flash_attn_varlen_func_available = lambda: True
    for method, dim, expected in (
        ("fold", 72, "fold: head_dim=72: packed formats need a multiple of 16"),
        ("fold", 96, "head_dim=96; allowed: powers of two; leave --attention-backend CUSTOM out"),
        ("kivi", 96, "no kernel attends to its pages: keys: head_dim=96"),
        ("squat", 256, "no kernel encodes its pages: keys: head_dim=256 with a page's own queries; allowed: 64, 128"),
        ("gear", 128, "no kernel encodes its pages: keys: low rank storage; allowed: fold, kivi"),
    ):
        refuses(lambda m=method, d=dim: refusals.check_kernel(layer(m, d), gpu), expected)
    fa_utils.is_flash_attn_varlen_func_available = real


def changes_nothing():
    """Installed but not chosen: vLLM's own attention is what it was."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvfold.engines.vllm import plugin

    AttentionBackendEnum.CPU_ATTN.clear_override()
    del os.environ[plugin.ON_CPU]
    plugin.register()
    plugin.register()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.BACKEND


def refuses(what, expected):
    try:
        what()
    except Exception as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")


def check_kept_layers():
    """Two layers in full precision beside folded ones of 8 bits: as the unfolded model, nearly."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = prompt(400, seed=7)
    engine = Engine("fold:bits=8+keep=0,29", max_num_batched_tokens=128)
    bits = [impl.layer.stored.page_bytes * 8 // (2 * 64 * 128) for impl in engine.impls]
    assert bits[0] == bits[29] == 32 and set(bits[1:29]) == {8}, bits
    assert "layers in full precision: 0, 29" in started(engine)
    ((found, logs),) = engine.ask(tokens, tokens=1)
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
    worst = abs(logs[0] - float(expected[found[0]]))
    print(f"layers 0 and 29 kept: {worst:.4f} from the unfolded model")
    assert worst < 0.1


def check_sliding_layers():
    """Models with sliding layers: the full ones fold at 8 bits, the others keep vLLM's own attention; as the model alone.

    vLLM's platform for CPUs asks for no backend by name, as it does on a GPU, and its attention there for a layout of its own:
    both are told otherwise here.
    """
    import tempfile

    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvfold.engines.vllm import plugin

    def choose(_, selected, attn_selector_config, num_heads=None):
        return (AttentionBackendEnum.CUSTOM if selected is AttentionBackendEnum.CUSTOM else own).get_path()

    own = AttentionBackendEnum.CPU_ATTN
    own.clear_override()
    del os.environ[plugin.ON_CPU]
    type(current_platform).get_attn_backend_cls = classmethod(choose)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: (KVCacheLayout.BLHNC,))
    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
    shape |= {"sliding_window": 100, "max_position_embeddings": 4096, "initializer_range": 0.06}
    kinds = ["sliding_attention", "full_attention"] * 2
    model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=kinds)).float()
    tokens = [10 + t % 2000 for t in prompt(400, seed=7)]
    given = {"skip_tokenizer_init": True, "max_num_batched_tokens": 128, "poison": False}
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        full = {"backend_per_kind": {"full_attention": "CUSTOM"}}
        engine = Engine("fold:bits=8", path=path, attention_config=full, **given)
        attentions = [type(layer.impl).__name__ for layer in engine.layers.values() if hasattr(layer, "impl")]
        assert attentions == ["CPUAttentionBackendImpl", "FoldedImpl"] * 2, attentions
        ((found, logs),) = engine.ask(tokens)
    assert engine.free == engine.pool.num_gpu_blocks - 1
    with torch.no_grad():
        rows = model(torch.tensor([tokens + found])).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
    worst = max(abs(log - float(row[token])) for token, log, row in zip(found, logs, rows, strict=True))
    print(f"two of four layers slide: {worst:.4f} from the unfolded model")
    assert worst < 0.01


def check_learned():
    """Methods whose tables come with an artefact, keys before RoPE: as a float32 model that follows the same schedule."""
    import tempfile

    from transformers import AutoModelForCausalLM

    from kvfold import methods
    from kvfold.artefact import load
    from kvfold.calibration import subspace
    from kvfold.calibration.commvq_schedule import Schedule
    from kvfold.calibration.run import calibrate
    from kvfold.evaluation.text import Text

    sys.path.insert(0, str(HERE.parents[1]))
    from tiny_model import byte_tokenizer, save

    with tempfile.TemporaryDirectory() as folder:
        path = str(save(Path(folder) / "model"))
        model = AutoModelForCausalLM.from_pretrained(path)
        text = Text("".join(f"{TEXT}{i} " for i in range(40)), "prose.txt")
        quick = Schedule(window=128, em_tokens=0, em_steps=3, hard_steps=1, value_rounds=1)
        for spec in ("vqllm:bits=8", "commvq:bits=1,levels=16,passes=0", "squat:bits=4", "squat:bits=4,lam=2"):
            out, more = Path(folder) / f"{spec[:5]}.safetensors", {}
            given = model, byte_tokenizer(), "tiny", methods.get(spec), [text], 1024, out
            if spec.endswith("lam=2"):  # pages follow their own queries
                out = None
            elif spec.startswith("squat"):
                subspace.calibrate(*given)
                more = {"kvfold_subspace": str(out)}
            else:
                calibrate(*given, schedule=quick if spec.startswith("commvq") else None)
                spec += f",artefact={out}"
            engine = Engine(spec, True, path, more, max_num_batched_tokens=128, skip_tokenizer_init=True)
            tokens = [1 + t % 250 for t in prompt(400)]
            (answer,) = engine.ask(tokens, tokens=12)
            reference = scheduled(engine, path)
            worst = difference(answer, follow(reference, tokens, answer))
            same_bytes(engine, reference, 256)
            said = started(engine)
            assert out is None or f"artefact {out}, SHA-256 {load(out).metadata()['sha256'][:12]}" in said, said
            print(f"{spec.partition(',')[0]}: 400 tokens in chunks of 128, 12 more: {worst:.4f}")
            assert worst < CLOSE
            assert engine.free == engine.pool.num_gpu_blocks - 1
            del engine


def started(engine):
    """What the log said of the first layer, and of adapters if there were some."""
    from types import SimpleNamespace

    from kvfold.engines.vllm import report

    config, window = engine.llm.llm_engine.vllm_config, engine.core.scheduler.kv_cache_config.kv_cache_groups[-1]
    stored = engine.impls[0].layer.stored
    assert report.adapted(stored, config) is None
    other = SimpleNamespace(lora_config=object(), additional_config=config.additional_config)
    assert (report.adapted(stored, other) is None) == (report.artefact_of(stored, config) == "")
    return report.lines(stored, window.kv_cache_spec.window, config, "reference")


def check_benchmark():
    """What `kvfold bench serve` does on a GPU: caches without a model, equal and unequal requests, engine after engine."""
    import torch

    from kvfold.bench import decode, serve

    torch.cuda.empty_cache = lambda: None  # there is none
    tiny = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tiny |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 1024}
    decode.SHAPES["tiny"] = tiny
    serve.STEPS = 6
    for method in ("fold", "kivi"):
        server = serve.Server("tiny", method, 1024, 256, [1, 4], None)
        assert server.capacity(1024) == server.tokens > server.capacity(256)
        free = server._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        server.scatter()
        for work in ("4x600", "1x700+3x100"):
            times = server.decode(serve.workload(work))
            assert len(times) == 6 and min(times) > 0
        assert len(server.prefill(700)) == 2
        assert server._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
        server.close()


def check_tensor_parallel():
    """Three processes, a KV head each: as one process."""
    from vllm import LLM, SamplingParams

    prompts = [prompt(n, seed=n) for n in (129, 300)]
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
    options |= {"additional_config": {"kvfold": "fold:bits=8"}, "distributed_executor_backend": "mp"}
    answers = []
    for size in (1, 3):
        llm = LLM(model_path(), tensor_parallel_size=size, **options)
        ask = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], ask, use_tqdm=False)
        answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outs])
        llm.llm_engine.engine_core.shutdown()
    worst = 0.0
    for one, three in zip(*answers, strict=True):
        assert one[0] == three[0]
        worst = max(
            [worst, *(abs(a[t].logprob - b[t].logprob) for t, a, b in zip(one[0], one[1], three[1], strict=True))]
        )
    print(f"TP = 3: {worst:.4f}")
    assert worst < CLOSE


class Server:
    """The OpenAI server of examples/server.py on a CPU, as long as a ``with`` block lasts."""

    def __init__(self, model, *options):
        self.port = 18000 + os.getpid() % 2000
        sys.path.insert(0, str(HERE.parents[2] / "examples"))
        import server

        given = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--served-model-name", "m"]
        given += ["--port", str(self.port), "--max-num-seqs", "32", *options]
        self.command = server.command(model, "fold:bits=8", *given)

    def __enter__(self):
        with open(os.environ.get("KVFOLD_SERVER_LOG", os.devnull), "w") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        for _ in range(240):
            assert self.process.poll() is None, "the server ended"
            try:
                self.get("/health", raw=True)
                return self
            except OSError:
                time.sleep(1)
        raise AssertionError("the server does not answer")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(60)

    def get(self, path, body=None, raw=False):
        import json
        import urllib.request

        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            text = answer.read().decode()
        return text if raw else json.loads(text)


def check_server():
    """The OpenAI server with eight clients: each gets what it gets alone, and the example's client streams it."""
    with Server(model_path()) as server:

        def ask(tokens):
            body = {"model": "m", "prompt": tokens, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            return server.get("/v1/completions", body)["choices"][0]["text"]

        prompts = [prompt(40 + 30 * i, seed=70 + i) for i in range(8)]
        with ThreadPoolExecutor(8) as clients:
            together = list(clients.map(ask, prompts))
        assert len(set(together)) == 8
        assert [ask(tokens) for tokens in prompts[:3]] == together[:3]
        import client

        answer = "".join(client.stream(f"http://127.0.0.1:{server.port}", "The capital of France is", 8))
        assert answer.startswith(" Paris"), answer
        print("eight clients: the same answers as alone; the example's client:", answer.strip())


def tiny_model(folder):
    """Two layers with sharp answers, and the demo model's tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 49152, "max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.08, tie_word_embeddings=False))
    model.lm_head.weight.data *= 4
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(os.path.join(model_path(), name), folder)
    return folder


def check_soak():
    """500 requests, 32 at a time: some hang up, some are nonsense or too long; the others are answered as alone."""
    import json
    import random
    import re
    import socket
    import tempfile
    import urllib.error

    import psutil

    with (
        tempfile.TemporaryDirectory() as folder,
        Server(tiny_model(folder), "--num-gpu-blocks-override", "400") as server,
    ):
        prompts = [prompt(random.Random(i).randrange(1, 600), seed=i) for i in range(40)]

        def body(i, **more):
            return {
                "model": "m",
                "prompt": prompts[i],
                "max_tokens": 4 + i % 29,
                "temperature": 0,
                "ignore_eos": True,
            } | more

        def ask(i):
            return server.get("/v1/completions", body(i, logprobs=2))["choices"][0]["logprobs"]

        def right(found, expected):
            """The same tokens, as likely, up to where two are nearly as likely: what is packed depends on how calls are cut."""
            for token, mine, other, top in zip(
                found["tokens"],
                found["token_logprobs"],
                expected["token_logprobs"],
                expected["top_logprobs"],
                strict=True,
            ):
                if token not in top or abs(mine - top[token]) > 0.2:
                    return False
                if top[token] < other:
                    return other - top[token] < 0.2
            return True

        alone = [ask(i) for i in range(len(prompts))]

        def refused(body):
            try:
                server.get("/v1/completions", body)
            except urllib.error.HTTPError as error:
                return 400 <= error.code < 500
            return False

        def hang_up(i):
            """A client that is killed in the middle of a stream, or before it."""
            data = json.dumps(body(i, stream=True, max_tokens=200)).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
                client.sendall(head.encode() + data)
                if i % 2:
                    client.recv(200)
            return True

        def one(number):
            i = random.Random(number).randrange(len(prompts))
            kind = number % 10
            if kind == 7:
                return hang_up(i)
            if kind == 8:
                return refused({"model": "m", "prompt": [10] * 5000, "max_tokens": 4})
            if kind == 9:
                return refused({"model": "m", "prompt": {"no": "prompt"}, "max_tokens": "many"})
            return right(ask(i), alone[i])

        def used():
            found = re.search(r"^vllm:kv_cache_usage_perc\S*\s+(\S+)", server.get("/metrics", raw=True), re.M)
            return float(found[1])

        def memory():
            root = psutil.Process(server.process.pid)
            return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])

        sizes = []
        results = []
        for part in range(5):
            with ThreadPoolExecutor(32) as clients:
                results += list(clients.map(one, range(100 * part, 100 * part + 100)))
            sizes.append(memory() / 1e6)
        assert server.process.poll() is None, "the server ended"
        assert not right(alone[0] | {"tokens": alone[1]["tokens"][:4]}, alone[0]), "no answer would be wrong"
        wrong = [i for i, right in enumerate(results) if not right]
        assert not wrong, f"wrong answers: {wrong}"
        for _ in range(30):
            if used() == 0:
                break
            time.sleep(1)
        assert used() == 0, f"blocks are held: {used()}"
        print(f"500 requests, none wrong; memory after each hundred, MB: {', '.join(f'{size:.0f}' for size in sizes)}")
        assert sizes[-1] < 1.05 * sizes[1]


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}

WORKERS = 2
"""Checks at a time: each has one thread."""
SLOW = ("tensor_parallel", "soak")
"""Run only when they are named: minutes each."""


def main(names):
    if os.environ.get("KVFOLD_CHECK") == "1":  # the process of one check
        sys.path.insert(0, str(HERE))
        CHECKS[names[0]]()
        return 0
    if unknown := set(names) - set(CHECKS):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; allowed: {', '.join(CHECKS)}")
    with ThreadPoolExecutor(WORKERS) as workers:
        right = list(workers.map(run, names or [name for name in CHECKS if name not in SLOW]))
    return right.count(False)


def run(name):
    """One check in a process of its own; what it printed, and all it said if it failed."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, **ENVIRONMENT, "KVFOLD_CHECK": "1"},
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    right = done.returncode == 0
    said = [] if right else [done.stderr[-6000:]]
    printed = [line for line in done.stdout.splitlines() if "pid=" not in line and line.strip()]
    result = f"--- {name}: {'ok' if right else 'failed'}, {time.time() - began:.0f} s"
    print("\n".join([*said, *printed, result]), flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

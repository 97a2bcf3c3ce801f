"""Folded caches in stock vLLM on a CPU, end to end: run by .ci/run in an environment of their own (see make vllm).

    python tests/engines/vllm/checks.py            # all but the slow ones
    python tests/engines/vllm/checks.py schedule   # some

Every check is a process of its own. SmolLM2-135M-Instruct in float32, on one thread.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from engine import CLOSE, Engine, difference, model_path, prompt
from refused import check_refusals  # noqa: F401  (it is one of CHECKS, as those below)
from served import check_server, check_soak  # noqa: F401

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
TEXT = "The city lies on both banks of the river, and its oldest part is the island between them. "


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


def check_signatures():
    """What is installed is what the file of its release says that kvfold uses: tests compare other releases with that."""
    import vllm

    sys.path.insert(0, str(HERE.parents[2] / "scripts"))
    from vllm_signatures import FILES, signatures

    file = FILES / f"signatures-{vllm.__version__.partition('+')[0]}.json"
    if not file.exists():
        print(f"vLLM {vllm.__version__}: no {file.name}")
        return
    written, found = json.loads(file.read_text()), signatures(Path(vllm.__file__).parent)
    other = sorted(name for name in written.keys() | found.keys() if written.get(name) != found.get(name))
    assert not other, f"{file.name}: others are installed, run scripts/vllm_signatures.py: {other[:5]}"
    print(f"{file.name}: {len(found)} signatures are those of what is installed")


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
        for spec in (
            "vqllm:bits=8",
            "commvq:bits=1,levels=16,passes=0",
            "tasq:bits=4,values=fold",
            "squat:bits=4",
            "squat:bits=4,lam=2",
        ):
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

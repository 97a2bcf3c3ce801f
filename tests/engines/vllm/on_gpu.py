"""Folded caches in stock vLLM on a GPU: every step of a small random model beside the float32 reference.

    python tests/engines/vllm/on_gpu.py            # all methods
    python tests/engines/vllm/on_gpu.py squat qjl  # some

Every method is a process of its own. Its pages, windows and attention are compared, step by step, with those of the reference,
which starts from copies of the same caches; NaN lies in all free blocks. Then graphs, scheduled asynchronously, are compared
with eager steps, which are not, and requests in a batch with the same alone. ``calibrated`` is SQuat with a text's subspace,
``sliding`` fold in the full layers of a model with sliding ones, which keep vLLM's attention; ``native`` is vLLM's attention
everywhere: what its answers differ by from those of other methods that read nothing packed is said at the end.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "KVFOLD_CHECK": "1",
}
GROUPS = ("tasq", "tasq:bits=2", "tasq:bits=2,values=fold", "nova")
LEARNED = ("vqllm:bits=1", "vqllm", "commvq:bits=1", "commvq", *GROUPS)
SLIDING = "sliding"
METHODS = ("native", "squat", "calibrated", "innerq", "qjl", "turboquant", "fold", "kivi", SLIDING, *LEARNED)
LENGTHS = (5, 90, 127, 129, 300, 500, 700)
TOKENS = 16
"""Of an answer."""
ATTENTION = 2e-2
"""Of a step's output, relative RMS: it is rounded to bfloat16, and sums over chunks are too."""
STORED = 0.02
"""Of what pages hold, relative RMS: some rounding ties may differ."""
FOLDER = "KVFOLD_FOLDER"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}
WORKERS = 8
"""Methods at a time."""


@dataclass
class Worst:
    """The largest differences of an engine's steps from the reference's."""

    steps: int = 0
    attention: float = 0.0
    keys: float = 0.0
    values: float = 0.0
    blocks: int = 0
    elements: int = 0
    equal: int = 0
    windows: int = 0
    gone: int = 0
    """Raw first tokens that a step did not find: it reads them packed."""

    def seen(self, name, error):
        assert error == error, f"{name}: NaN"
        setattr(self, name, max(getattr(self, name), error))


def relative(got, want):
    got, want = got.float(), want.float()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


class Shadow:
    """Runs the reference beside the engine's step, on copies of the layer's caches."""

    def __init__(self):
        import kvfold.engines.vllm.backend as backend

        self.inner, self.worst = backend.run, None
        backend.run = self.run

    def run(self, layer, step, query, key, value, out):
        if self.worst is None:
            self.inner(layer, step, query, key, value, out)
            return
        import torch

        from kvfold.kernels.paged import PagedCall, reference

        sides = [{name: t.clone() for name, t in side.items()} for side in (layer.keys, layer.values)]
        windows = layer.window_keys.clone(), layer.window_values.clone()
        queries = None if layer.window_queries is None else layer.window_queries.clone()
        formats = layer.stored.formats
        given = *formats, *sides, *windows, layer.scale, query, key, value
        call = PagedCall(step.paged, *given, window_queries=queries, **layer.maps)
        want = torch.zeros_like(out, dtype=torch.float32).view(-1, *query.shape[1:])
        reference.store(call)
        reference.attend(call, want)
        self.inner(layer, step, query, key, value, out)
        real = int(step.paged.query_start[-1])
        self.worst.steps += 1
        self.worst.seen("attention", relative(out.view(want.shape)[:real], want[:real]))
        self.compare(layer, call)

    def compare(self, layer, call):
        """What the step stored."""
        import torch

        from kvfold.kernels.paged import reference

        theirs = replace(call, keys=layer.keys, values=layer.values)
        for row in call.step.host:
            due = row.due(call.seen)
            self.worst.windows += self.other_windows(layer, call, row)
            first, _ = row.slots(0, min(row.before, call.step.sink))
            self.worst.gone += int((first == call.step.null).sum())
            if not due:
                continue
            span = due[0], due[-1] + call.step.block
            self.worst.blocks += len(due)
            pairs = zip(*(reference.unpacked(c, row, *span) for c in (theirs, call)), strict=True)
            for side, (got, want) in zip(("keys", "values"), pairs, strict=True):
                turn = call.unproject if side == "values" and call.unproject else torch.Tensor.float
                self.worst.seen(side, relative(turn(got), turn(want)))
            for got, want in ((layer.keys, call.keys), (layer.values, call.values)):
                for at in due:
                    page, unit = int(row.pages(at + 1)[-1]), at % 128 // call.step.block
                    for name in got:
                        each = unit if got[name].shape[2] == 128 // call.step.block else 0
                        same = got[name][page, :, each] == want[name][page, :, each]
                        self.worst.elements += same.numel()
                        self.worst.equal += int(same.sum())

    @staticmethod
    def other_windows(layer, call, row):
        """Tokens of the step that lie in the windows otherwise than the reference has them."""
        import torch

        if not row.count:
            return 0
        at = torch.arange(row.before, row.after, device=call.window_keys.device)
        blocks, places = row.slots(row.before, row.after)
        read = (blocks != call.step.null) & ((at >= row.kept) | (at < call.step.sink))
        sides = [(layer.window_keys, call.window_keys), (layer.window_values, call.window_values)]
        sides += [(layer.window_queries, call.window_queries)] if layer.window_queries is not None else []
        pairs = ((a[blocks[read], places[read]], b[blocks[read], places[read]]) for a, b in sides)
        return sum(int((a != b).flatten(1).any(1).sum()) for a, b in pairs)


def model(folder):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 8192}
    config = LlamaConfig(**shape, initializer_range=0.04, dtype="bfloat16", rope_theta=500000.0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def sliding_model(folder):
    """Two layers of a window of 100 tokens, two full ones."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    shape = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "query_pre_attn_scalar": 128}
    shape |= {"sliding_window": 100, "max_position_embeddings": 8192, "initializer_range": 0.04, "dtype": "bfloat16"}
    kinds = ["sliding_attention", "full_attention"] * 2
    Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=kinds)).to(torch.bfloat16).save_pretrained(folder)


def subspace(path, out):
    """SQuat's queries, of a text that the random model reads."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(HERE.parents[1]))
    from kvfold import methods
    from kvfold.calibration import subspace
    from kvfold.evaluation.text import Text
    from tiny_model import byte_tokenizer

    read = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = Text("".join(f"The river divides the city, and {i} bridges cross it. " for i in range(40)), "prose.txt")
    subspace.calibrate(read, byte_tokenizer(), "random", methods.get("squat"), [text], 1024, out)
    return str(out)


def with_artefact(method, path, out):
    """A method with random tables, where it needs some."""
    if method not in LEARNED:
        return method
    from transformers import AutoConfig

    sys.path.insert(0, str(HERE.parents[1]))
    from books_case import artefact

    return artefact(method, out, 2, 128, layers=4, config=AutoConfig.from_pretrained(path))


def native(path, prompts):
    """vLLM's own answers."""
    from vllm import LLM, SamplingParams

    llm = LLM(path, skip_tokenizer_init=True, enforce_eager=True, **options())
    ask = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0, ignore_eos=True)
    outs = [out.outputs[0] for out in llm.generate([{"prompt_token_ids": p} for p in prompts], ask, use_tqdm=False)]
    return [(list(o.token_ids), [s[t].logprob for s, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in outs]


def options():
    small = {"max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 8, "dtype": "bfloat16"}
    return small | {"kv_cache_memory_bytes": 64 << 20, "gpu_memory_utilization": 0.05}


def apart(a, b):
    """How many first tokens are equal, and the largest difference of log-probabilities up to the first other one."""
    same = next((i for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y), len(a[0]))
    return same, max(abs(x - y) for x, y in zip(a[1][: same + 1], b[1][: same + 1], strict=True))


def on_gpu(name):
    """One method; a line of results."""
    import torch
    from checks import bytes_since
    from engine import Engine, prompt

    folder = Path(os.environ[FOLDER])
    path, chosen = str(folder / "model"), {"attention_backend": "CUSTOM"}
    if name == SLIDING:
        sliding_model(path := str(folder / SLIDING))
        chosen = {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}
    prompts = [[10 + t % 2000 for t in prompt(n, seed=n)] for n in LENGTHS]
    if name == "native":
        (folder / "native.json").write_text(json.dumps(native(path, prompts)))
        return
    more = {"kvfold_subspace": subspace(path, folder / "squat.safetensors")} if name == "calibrated" else {}
    method = {"calibrated": "squat", SLIDING: "fold"}.get(name) or with_artefact(
        name, path, folder / f"{name}.safetensors"
    )
    given = {"path": path, "more": more, "skip_tokenizer_init": True, **chosen, **options()}
    shadow = Shadow()
    # vLLM's sliding attention reads what it masks
    engine = Engine(method, poison=name != SLIDING, **given, async_scheduling=False)
    assert not ahead(engine)
    shadow.worst = worst = Worst()
    eager = engine.ask(*prompts, tokens=TOKENS)
    gone = worst.gone  # a hit may find none
    hits = engine.ask(*prompts[-2:], tokens=TOKENS)
    shadow.worst = None
    assert engine.free == engine.pool.num_gpu_blocks - 1, "blocks are lost"
    engine.forget()
    before = len(engine.steps)
    again = engine.ask(*prompts, tokens=TOKENS)
    together = bytes_since(engine, before)
    pages = []
    for tokens in prompts:
        engine.forget()
        before = len(engine.steps)
        engine.ask(tokens, tokens=TOKENS)
        pages += bytes_since(engine, before)
    like = [max(share(p, q) for q in together) for p in pages if p and p[0].shape[0]]
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    engine = Engine(method, poison=False, **given, enforce_eager=False, compilation_config=GRAPHS)
    assert ahead(engine)
    graphs = engine.ask(*prompts, tokens=TOKENS) + engine.ask(*prompts[-2:], tokens=TOKENS)
    assert engine.free == engine.pool.num_gpu_blocks - 1, "blocks are lost"
    graph = max(apart(a, b)[1] if a[0] == b[0] else 9.0 for a, b in zip(eager + hits, graphs, strict=True))
    repeat = max(apart(a, b)[1] if a[0] == b[0] else 9.0 for a, b in zip(eager, again, strict=True))
    if name != SLIDING:
        (folder / f"{name}.json").write_text(json.dumps(eager))
    print(
        f"## {name}: {worst.steps} steps of layers, attention {worst.attention:.1e}, {worst.blocks} blocks: keys "
        f"{worst.keys:.1e}, values {worst.values:.1e}, equal elements {worst.equal / max(worst.elements, 1):.4%}, "
        f"windows' other tokens {worst.windows}, first tokens gone {gone}; graphs to eager {graph:.4f}, repeated {repeat:.4f}; "
        f"pages alone and in a batch alike, least {min(like):.4%}"
    )
    assert worst.attention < ATTENTION and worst.windows == 0 and worst.blocks
    # another code that is as good to rounding is another vector
    assert max(worst.keys, worst.values) < STORED or (name in LEARNED and worst.equal > 0.999 * worst.elements)
    assert graph < 0.02, "graphs answer otherwise"
    assert not gone, "raw first tokens are read packed"


def ahead(engine):
    """Whether vLLM schedules a step before it knows the tokens of the last one."""
    return engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling


def share(a, b):
    """Of the elements of two requests' pages, those that are equal; 0 where they are not as many."""
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return 0.0
    return sum(int((x == y).sum()) for x, y in zip(a, b, strict=True)) / max(sum(x.numel() for x in a), 1)


def run(method):
    began = time.time()
    command = [sys.executable, __file__, method]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=False, capture_output=True, text=True)
    said = (
        [] if done.returncode == 0 else [line for line in done.stderr.splitlines()[-40:] if "WARNING" not in line][-25:]
    )
    printed = [line for line in done.stdout.splitlines() if line.startswith("## ") or "kvfold: kernel" in line]
    print("\n".join([*said, *printed, f"--- {method}: rc={done.returncode}, {time.time() - began:.0f} s"]), flush=True)
    return done.returncode == 0


def main(names):
    if os.environ.get("KVFOLD_CHECK") == "1":
        sys.path.insert(0, str(HERE))
        on_gpu(names[0])
        return 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as workers:
        os.environ[FOLDER] = folder
        model(Path(folder) / "model")
        right = list(workers.map(run, names or METHODS))
        against_native(Path(folder))
    return right.count(False)


def against_native(folder):
    """Answers that read nothing packed, shorter than sink and recent tokens together."""
    if not (folder / "native.json").exists():
        return
    truth = json.loads((folder / "native.json").read_text())
    for path in sorted(folder.glob("*.json")):
        found = zip(LENGTHS, truth, json.loads(path.read_text()), strict=True)
        said = [(n, *apart(a, b)) for n, a, b in found if n + TOKENS < 128]
        print(f"{path.stem} to FlashAttention:", ", ".join(f"{n} tokens, {s} alike, {d:.4f}" for n, s, d in said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

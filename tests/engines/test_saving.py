"""Saved caches: what is loaded is what was saved, goes on as if nothing had happened, and is refused wherever it does not
belong."""

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Lfm2Config, Lfm2ForCausalLM

import kvfold
from helpers import build, feed, layer, llama, logits, prompt, spec, tokens
from kvfold import artefact as artefacts
from kvfold.engines.transformers import loading, saving
from kvfold.engines.transformers.cache import FoldedCache
from kvfold.engines.transformers.layer import FoldedLayer
from kvfold.errors import CacheFileError, CacheStateError, KVFoldError, UnsupportedModelError
from kvfold.methods import DEFAULT
from targets import current

LENGTHS = (300, 170)
WIDTH, MORE = 300, [1, 70, 1]

APART = "k=squat+v=fold+keep=0+1.v=kivi:bits=4"


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(autouse=True)
def folded(model):
    kvfold.fold(model)
    yield
    kvfold.unfold(model)


def padded(extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, the shorter padded on the left: ids and mask, with ``extra`` real columns behind."""
    width = WIDTH + extra
    mask = torch.arange(width) >= WIDTH - torch.tensor(LENGTHS)[:, None]
    return prompt(2, width).where(mask, 0), mask.long()


def filled(model, method: str, **options) -> FoldedCache:
    ids, mask = padded()
    cache = kvfold.fold(model, method, **options)
    logits(model, cache, ids, [250, 1, 49], mask)
    return cache


def continued(model, cache) -> torch.Tensor:
    """Logits of calls after those of :func:`filled`: a step, a long call, a step."""
    count = sum(MORE)
    ids, mask = padded(count)
    positions, at, out = (mask.cumsum(-1) - 1).clamp_min(0), WIDTH, []
    with torch.no_grad():
        for size in MORE:
            part = slice(at, at + size)
            extra = {"attention_mask": mask[:, : at + size], "position_ids": positions[:, part]}
            out.append(model(ids[:, part], past_key_values=cache, **extra).logits)
            at += size
    return torch.cat(out, 1)


def again(cache: FoldedCache, model, path: Path, **options) -> FoldedCache:
    cache.save(path)
    return kvfold.load_cache(path, model, **options)


def attributes(of: FoldedLayer) -> dict[str, object]:
    """Everything a layer is, as comparable data: storage and windows up to what was written."""
    following = {k: v for k, v in vars(of.following).items() if k not in ("spec", "ring", "state")}
    following["state"] = {name: t.tolist() for name, t in of.following.state.items()}
    following["slots"] = None if of.following.ring is None else of.following.ring.shape
    return {
        **{k: v for k, v in vars(of).items() if k not in PARTS},
        "sequences": vars(of.sequences),
        "columns": (of.columns.count, of.columns.newest),
        "calls": [(n, None if valid is None else valid.tolist()) for n, valid in of.columns.calls],
        "slabs": [(slab.first, slab.blocks) for slab in of.slabs],
        "shared": [{name: t.tolist() for name, t in side.items()} for side in of.slabs.shared],
        "fixed": of.slabs.fixed,
        "following": following,
        "capacity": (of.ring.keys.shape, of.ring.longest, of.ring.in_place),
        "writer": (of.writer.recording, of.writer.encoder, of.writer.max_length),
        "kernel": of.kernel.name if of.is_initialized else None,
    }


PARTS = ("layout", "sequences", "columns", "slabs", "sink", "ring", "following", "reader", "writer")


def assert_same_cache(a: FoldedCache, b: FoldedCache) -> None:
    assert len(a.folded) == len(b.folded)
    for one, other in zip(a.folded, b.folded, strict=True):
        assert attributes(one) == attributes(other)
        for row in range(len(one.lens)):
            for left, right in zip(one.decoded(row), other.decoded(row), strict=True):
                assert torch.equal(left, right)
    assert a.nbytes() == b.nbytes() and a.full_nbytes() == b.full_nbytes()
    assert repr(a.effective_bits()) == repr(b.effective_bits())  # which may be NaN


# ---- learned methods, without learning -------------------------------------------------------------------------------


def learned(method: str, parts: dict[str, torch.Tensor], shape: dict[str, object], path: Path, model) -> str:
    """The spec of a method whose artefact holds ``parts`` for both layers."""
    made = artefacts.Artefact(
        model="tiny",
        config_hash=artefacts.config_hash(model.config),
        method=method,
        shape={"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64, "k_bits": 2, "v_bits": 2, **shape},
        calibration={},
        errors={},
        versions={},
        created="2026-01-01T00:00:00+00:00",
        tensors={f"layers.{i}.{name}": t + i / 100 for i in range(2) for name, t in parts.items()},
        weights_hash=artefacts.weights_hash(model),
    )
    artefacts.save(made, path)
    return f"{method},artefact={path}"


def vqllm(path: Path, model, seed: int = 0) -> str:
    codes = torch.randn(8, 256, 32, generator=torch.Generator().manual_seed(seed)) / 2
    return learned(
        "vqllm:bits=2", {"key.codes": codes, "value.codes": codes}, {"vector": 32, "codes": 256}, path, model
    )


def kvquant(path: Path, model) -> str:
    levels = torch.tensor([-1.0, -0.3, 0.3, 1.0])
    parts = {
        "key.levels": levels,
        "value.levels": levels,
        "key.center": torch.zeros(2, 64),
        "key.spread": torch.full((2, 64), 3.0),
    }
    return learned("kvquant:bits=2", parts, {}, path, model)


def nova(path: Path, model) -> str:
    turn = torch.eye(64).expand(2, -1, -1).contiguous()
    codes = torch.randn(2, 16, 256, 4, generator=torch.Generator().manual_seed(0))
    parts = {"key.codes": codes, "key.mean": torch.ones(2, 64), "key.map": turn, "key.inverse": turn}
    return learned("nova:bits=2", parts, {}, path, model)


@pytest.fixture(scope="module")
def methods(tmp_path_factory, model) -> list[str]:
    folder = tmp_path_factory.mktemp("learned")
    codes = vqllm(folder / "vqllm.safetensors", model)
    others = kvquant(folder / "kvquant.safetensors", model), nova(folder / "nova.safetensors", model)
    return [*DEFAULT, codes, *others, f"k={codes}+v=fold", "fold:bits=2,codebook=true", APART]


# ---- the same --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(DEFAULT) + 6))
def test_a_loaded_cache_is_what_was_saved_and_goes_on_alike(model, methods, index, tmp_path):
    cache = filled(model, methods[index])
    assert any(cache.folded[0].packed)
    twin = again(cache, llama(), tmp_path / "cache.safetensors")
    assert_same_cache(cache, twin)
    assert torch.equal(continued(model, cache), continued(model, twin))
    assert_same_cache(cache, twin)


OTHER_PROCESS = """
import json, sys
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
import kvfold, test_saving
model = test_saving.llama()
out = {}
for name in json.loads(sys.argv[1]):
    cache = kvfold.load_cache(name, model)
    out[name.rpartition("/")[2]] = test_saving.continued(model, cache)
save_file(out, sys.argv[2])
"""


@pytest.mark.slow
def test_another_process_goes_on_with_the_same_logits(model, methods, tmp_path):
    expected, names = {}, []
    for i, method in enumerate(methods):
        path = tmp_path / f"{i}.safetensors"
        cache = filled(model, method)
        cache.save(path)
        names.append(str(path))
        expected[path.name] = continued(model, cache)
    out = tmp_path / "logits"
    paths = [str(Path(kvfold.__file__).parents[1]), *(str(folder) for folder in Path(__file__).parents[:2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", OTHER_PROCESS, json.dumps(names), str(out)]
    subprocess.run(command, check=True, env=environment, timeout=300)
    found = load_file(out)
    assert found.keys() == expected.keys()
    different = [methods[int(Path(name).stem)] for name, t in found.items() if not torch.equal(t, expected[name])]
    assert not different


@pytest.mark.parametrize("method", ["fold", "squat", "zipcache:paper=true", "innerq:mode=hybrid_prefill"])
def test_what_was_cropped_reordered_or_is_recorded_stays_so(model, method, tmp_path):
    """A cut into packed storage, sequences rearranged, and a call that can still be taken back exactly."""
    cache = filled(model, method)
    cache.crop(-90)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.activate_past_recording()
    ids = prompt(4, 200, seed=5)
    mask = torch.cat([padded()[1][[1, 1, 0, 0], :210], torch.ones(4, 200, dtype=torch.long)], 1)
    positions = mask.cumsum(-1)[:, 210:] - 1

    def step(cache, start: int, stop: int) -> torch.Tensor:
        extra = {"attention_mask": mask[:, : 210 + stop], "position_ids": positions[:, start:stop]}
        with torch.no_grad():
            return model(ids[:, start:stop], past_key_values=cache, **extra).logits

    step(cache, 0, 40)
    twin = again(cache, model, tmp_path / "cache.safetensors")
    assert_same_cache(cache, twin)
    for each in (cache, twin):
        each.crop(-33)
    assert_same_cache(cache, twin)
    assert torch.equal(step(cache, 7, 150), step(twin, 7, 150))
    assert_same_cache(cache, twin)


@pytest.mark.parametrize("count", [0, 1, 31, 33, 129, 160])
def test_young_and_empty_caches(model, count, tmp_path):
    cache = kvfold.fold(model, "squat")
    ids = prompt(1, count + 140)
    if count:
        logits(model, cache, ids[:, :count])
    twin = again(cache, model, tmp_path / "cache.safetensors")
    assert_same_cache(cache, twin)
    assert torch.equal(logits(model, cache, ids[:, count:]), logits(model, twin, ids[:, count:]))


def test_only_tokens_are_stored(model, tmp_path):
    """Room for 100,000 tokens costs the file nothing; what is loaded has it again, or as much as is asked for."""
    sizes = []
    for name, room in (("roomy", 100_000), ("tight", None)):
        cache = filled(model, "fold", max_length=room)
        cache.save(tmp_path / name)
        sizes.append((tmp_path / name).stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 200
    cache = kvfold.load_cache(tmp_path / "roomy", model)
    assert cache.folded[0].slabs[0].blocks * 32 > 99_000
    small = kvfold.load_cache(tmp_path / "roomy", model, max_length=400)
    assert small.nbytes()["packed"] < cache.nbytes()["packed"] / 100
    grown = filled(model, "fold")
    logits(model, grown, prompt(2, 500, seed=4), [250, 250])
    assert len(grown.folded[0].slabs) > 1
    one = again(grown, model, tmp_path / "grown", max_length=2000)
    assert all(len(layer.slabs) == 1 and layer.get_max_length() == 2000 for layer in one.folded)
    for a, b in zip(grown.folded, one.folded, strict=True):
        assert all(torch.equal(x, y) for row in (0, 1) for x, y in zip(a.decoded(row), b.decoded(row), strict=True))


HYBRID = {
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, {"layer_types": ["conv", "full_attention"]}),
}


@pytest.mark.parametrize("name", HYBRID)
def test_layers_that_are_not_folded_are_saved_too(name, tmp_path):
    model_class, config_class, options = HYBRID[name]
    hybrid = build(model_class, config_class, **options)
    cache = kvfold.fold(hybrid, "fold")
    assert len(cache.folded) == 1 < len(cache.layers)
    ids = prompt(1, 300)
    logits(hybrid, cache, ids[:, :200])
    twin = again(cache, build(model_class, config_class, **options), tmp_path / "cache.safetensors")
    assert_same_cache(cache, twin)
    cuts = [1, 50, 49]
    assert torch.equal(logits(hybrid, cache, ids[:, 200:], cuts), logits(hybrid, twin, ids[:, 200:], cuts))
    assert cache.get_seq_length() == twin.get_seq_length() == 300


def test_a_copy_can_be_saved_and_a_cache_whose_model_is_gone_says_so(model, tmp_path):
    cache = filled(model, "fold")
    assert_same_cache(cache, again(copy.deepcopy(cache), model, tmp_path / "copy.safetensors"))
    orphan = filled(llama(), "fold")
    with pytest.raises(CacheStateError, match="the model that it was folded for is gone"):
        orphan.save(tmp_path / "orphan.safetensors")
    assert not (tmp_path / "orphan.safetensors").exists()
    assert_same_cache(cache, pickle.loads(pickle.dumps(cache)))


def test_what_is_loaded_in_inference_mode_lives_outside_of_it(model, tmp_path):
    cache = filled(model, "squat")
    with torch.inference_mode():
        twin = again(cache, model, tmp_path / "cache.safetensors")
    assert not any(t.is_inference() for layer in twin.folded for some in layer.tensors().values() for t in some)
    assert torch.equal(continued(model, cache), continued(model, twin))


def test_generate_goes_on_from_a_loaded_prompt(model, tmp_path):
    ids = prompt(1, 260)
    cache = kvfold.fold(model, "fold")
    logits(model, cache, ids[:, :250])
    twin = again(cache, model, tmp_path / "cache.safetensors")
    options = {"max_new_tokens": 40, "do_sample": False, "attention_mask": torch.ones_like(ids), "eos_token_id": None}
    expected = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(model.generate(ids, past_key_values=twin, **options), expected)


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(model, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    kvfold.fold(model)
    filled(model, "kivi").save(target)
    return target


def test_another_model_is_refused(path):
    with pytest.raises(CacheFileError, match="this model has another configuration"):
        kvfold.load_cache(path, llama(num_hidden_layers=3))
    other = llama()
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight += 0.01
    with pytest.raises(CacheFileError, match=r"LlamaForCausalLM, and this model has other weights \("):
        kvfold.load_cache(path, other)
    with pytest.raises(CacheFileError, match="made in dtype float32, and this model is in bfloat16"):
        kvfold.load_cache(path, llama().to(torch.bfloat16))
    assert other.config._attn_implementation != "kvfold"


@pytest.mark.parametrize(
    "given", [None, 5, "name/of-a-model", torch.nn.Linear(1, 1)], ids=["none", "number", "name", "torch"]
)
def test_what_is_no_model_is_refused(given, path):
    with pytest.raises(UnsupportedModelError, match=r"^model: "):
        kvfold.load_cache(path, given)


@pytest.mark.parametrize("given", [None, 5, b"cache.safetensors"])
def test_what_is_no_file_name_is_refused(given, path, model):
    with pytest.raises(CacheFileError, match="is not a file name; allowed: text, or a path"):
        kvfold.load_cache(given, model)
    with pytest.raises(CacheFileError, match="is not a file name"):
        kvfold.load_cache(path, model).save(given)


def test_arguments_in_the_wrong_order_are_told_of_in_one_line(path, model):
    with pytest.raises(
        CacheFileError, match=r"^cache: LlamaForCausalLM object is not a file name; allowed: text, or a path$"
    ):
        kvfold.load_cache(model, path)


class Wrapper(torch.nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside


def test_a_wrapped_model_is_the_model_inside(path, model):
    assert kvfold.load_cache(path, Wrapper(model)).model is model


class Adapted(torch.nn.Linear):
    """A layer with what PEFT's layers say of their adapters."""

    disable_adapters, active_adapters = False, ("french",)


def test_other_adapters_are_refused(model, tmp_path):
    tuned = copy.deepcopy(model)
    tuned.extra = Adapted(2, 2)
    cache = filled(tuned, "fold")
    cache.save(tmp_path / "french")
    kvfold.load_cache(tmp_path / "french", tuned)
    tuned.extra.active_adapters = ("german",)
    with pytest.raises(CacheFileError, match="with the adapters french, and this model has german switched on"):
        kvfold.load_cache(tmp_path / "french", tuned)
    tuned.extra.disable_adapters = True
    with pytest.raises(CacheFileError, match="this model has none switched on"):
        kvfold.load_cache(tmp_path / "french", tuned)


def test_another_method_is_refused_and_the_same_one_is_not(path, model):
    with pytest.raises(CacheFileError, match="is folded with kivi, and kivi:bits=4 is asked for"):
        kvfold.load_cache(path, model, "kivi:bits=4")
    assert str(kvfold.load_cache(path, model, "kivi:bits=2,sink=32").method) == "kivi"


def test_loading_folds_a_model_that_is_not_and_leaves_its_other_caches_alone(path, model):
    fresh = llama()
    kvfold.load_cache(path, fresh)
    assert fresh.config._attn_implementation == "kvfold"
    other = filled(model, "fold:bits=4")
    twin = copy.deepcopy(other)
    kvfold.load_cache(path, model)
    assert torch.equal(continued(model, other), continued(model, twin))


def test_a_learned_methods_artefact_may_move_but_not_change(model, tmp_path):
    method = vqllm(tmp_path / "one.safetensors", model)
    cache = filled(model, method)
    cache.save(tmp_path / "cache")
    expected = continued(model, cache)
    (tmp_path / "one.safetensors").rename(tmp_path / "moved.safetensors")
    with pytest.raises(KVFoldError, match=r"artefact: there is no file.*one\.safetensors"):
        kvfold.load_cache(tmp_path / "cache", model)
    twin = kvfold.load_cache(tmp_path / "cache", model, method.replace("one", "moved"))
    assert torch.equal(expected, continued(model, twin))
    other = vqllm(tmp_path / "other.safetensors", model, seed=1)
    with pytest.raises(CacheFileError, match=r"made with another artefact than .*other\.safetensors"):
        kvfold.load_cache(tmp_path / "cache", model, other)


def rewrite(path: Path, target: Path, change, seal: bool = True) -> Path:
    """A file with other metadata; ``seal``: with a checksum that agrees."""
    with safetensors.safe_open(path, framework="pt") as file:
        fields = json.loads(file.metadata()[saving.KEY])
    tensors = load_file(path)
    change(fields)
    if seal:
        del fields["sha256"]
        fields["sha256"] = artefacts.checksum(fields, tensors)
    save_file(tensors, target, metadata={saving.KEY: json.dumps(fields)})
    return target


def test_damaged_and_foreign_files_are_refused(path, model, tmp_path):
    raw, target = path.read_bytes(), tmp_path / "x.safetensors"
    for cut in (0, 7, len(raw) // 2, len(raw) - 1):
        target.write_bytes(raw[:cut])
        with pytest.raises(CacheFileError, match="cut short or not a safetensors file"):
            kvfold.load_cache(target, model)
    flipped = bytearray(raw)
    flipped[-1] ^= 1
    target.write_bytes(flipped)
    with pytest.raises(CacheFileError, match="checksum does not agree"):
        kvfold.load_cache(target, model)
    with pytest.raises(CacheFileError, match="checksum does not agree"):
        kvfold.load_cache(rewrite(path, target, lambda f: f.update(method="fold"), seal=False), model)
    with pytest.raises(CacheFileError, match=r"schema 2, .* reads up to 1; upgrade kvfold"):
        kvfold.load_cache(rewrite(path, target, lambda f: f.update(schema=2)), model)
    with pytest.raises(CacheFileError, match="no schema version"):
        kvfold.load_cache(rewrite(path, target, lambda f: f.pop("schema")), model)
    with pytest.raises(CacheFileError, match="is damaged: its layers do not fit together"):
        kvfold.load_cache(rewrite(path, target, lambda f: f["layers"][1].update(lens=[900, 900])), model)
    with pytest.raises(CacheFileError, match="layers"):
        kvfold.load_cache(rewrite(path, target, lambda f: f["layers"].pop()), model)
    save_file({"x": torch.zeros(1)}, target)
    with pytest.raises(CacheFileError, match="not one that cache"):
        kvfold.load_cache(target, model)
    with pytest.raises(CacheFileError, match="there is no file"):
        kvfold.load_cache(tmp_path / "missing", model)


def test_a_file_is_written_whole_or_not_at_all(path, model, tmp_path):
    cache = filled(model, "fold")
    with pytest.raises(CacheFileError, match="cannot write"):
        cache.save(tmp_path / "no" / "folder")
    target = tmp_path / "cache"
    target.write_bytes(path.read_bytes())
    cache.folded[1].method = dataclasses.replace(cache.method)
    cache.folded[1].pending = True
    with pytest.raises(CacheStateError, match="a call is under way"):
        cache.save(target)
    assert target.read_bytes() == path.read_bytes() and list(tmp_path.iterdir()) == [target]


# ---- places ----------------------------------------------------------------------------------------------------------


def test_a_cache_goes_to_another_device_as_a_whole(model):
    """Onto a device without memory, where all that can be seen is that nothing stays behind."""
    cache = filled(model, "squat")
    assert cache.to("cpu") is cache and cache.folded[0].device.type == "cpu"
    twin = copy.deepcopy(cache)
    assert_same_cache(cache, twin.to("cpu"))
    twin.to("meta")
    held = [t for layer in twin.folded for some in layer.tensors().values() for t in some]
    assert held and all(t.is_meta for t in held)
    with pytest.raises(CacheStateError, match=r"layer 0 lies on meta, .* on cpu; call cache.to\('cpu'\)"):
        continued(model, twin)
    with pytest.raises(CacheStateError, match=r"to\(torch.float16\) is not allowed.*allowed: a device"):
        cache.to(torch.float16)
    for nowhere in ("gpu", "cuda:77", -1, [0]):
        with pytest.raises(CacheStateError, match=r"there is no such device here; allowed: cpu"):
            cache.to(nowhere)
    assert cache.to(None) is cache and cache.folded[0].device.type == "cpu"
    kept = dataclasses.asdict(cache.method)
    continued(model, cache)
    assert dataclasses.asdict(cache.method) == kept


@pytest.mark.targets
@pytest.mark.parametrize("method", ["fold", "kivi", "squat", "squat_pre", "zipcache", "none"])
def test_offloaded_to_the_cpu_and_back(method, target):
    of = llama()
    ids = prompt(2, 400)
    cache = kvfold.fold(of, method, max_length=current().max_length)
    logits(of, cache, ids[:, :300])
    twin = copy.deepcopy(cache)
    sizes = twin.nbytes()
    for each in twin.layers:
        each.offload()
    assert all(t.device.type == "cpu" for layer in twin.folded for some in layer.tensors().values() for t in some)
    assert twin.nbytes() == sizes
    for each in twin.layers:
        each.prefetch()
    assert_same_cache(cache, twin)
    twin.to("cpu").to(current().device)
    assert torch.equal(logits(of, cache, ids[:, 300:], [1, 99]), logits(of, twin, ids[:, 300:], [1, 99]))


@pytest.mark.targets
@pytest.mark.parametrize("method", ["fold", "kivi", "squat_pre"])
def test_saved_and_loaded_on_every_device(method, target, tmp_path):
    of = llama()
    ids = prompt(2, 400)
    cache = kvfold.fold(of, method, max_length=current().max_length)
    logits(of, cache, ids[:, :300])
    twin = again(cache, of, tmp_path / "cache.safetensors")
    assert all(layer.device == of.device for layer in twin.folded)
    assert_same_cache(cache, twin)
    assert torch.equal(logits(of, cache, ids[:, 300:], [1, 99]), logits(of, twin, ids[:, 300:], [1, 99]))


@pytest.mark.parametrize("method", ["turboquant:bits=3", "zipcache", "gear", "k=qjl+v=turboquant"])
@pytest.mark.parametrize("count", [300, 20])
def test_codes_of_a_file_come_to_the_order_that_kernels_read_today(model, method, count, tmp_path, monkeypatch):
    ids = prompt(2, 400)
    cache = kvfold.fold(model, method)
    for each in cache.folded:
        each.layout.pack_as(True)
    logits(model, cache, ids[:, :count])
    assert all(each.spec.fragments for each in cache.folded)
    cache.save(tmp_path / "cache.safetensors")
    monkeypatch.setattr(saving, "wants_plain_order", lambda *_: True)
    twin = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    for old, new in zip(cache.folded, twin.folded, strict=True):
        assert not new.spec.fragments and {f.operand for f in new.layout.formats} == {"plain"}
        for row in range(2):
            assert all(map(torch.equal, old.decoded(row), new.decoded(row)))
    calls = [1, 99 if count == 300 else 200]
    got, wanted = (logits(model, of, ids[:, count:], calls) for of in (twin, cache))
    assert float((got - wanted).norm() / wanted.norm()) < 1e-4  # by another kernel


@pytest.mark.parametrize("method", ["fold", "kivi", "turboquant"])
def test_a_cpu_keeps_the_order_that_a_gpu_packed(model, method, tmp_path):
    cache = kvfold.fold(model, method)
    [each.layout.pack_as(True) for each in cache.folded]
    logits(model, cache, prompt(1, 300))
    cache.save(tmp_path / "cache.safetensors")
    assert all(each.spec.fragments for each in kvfold.load_cache(tmp_path / "cache.safetensors", model).folded)


def test_an_insisted_kernel_must_exist_where_a_cache_goes():
    of = feed(layer("kivi", spec(fragments=False), kernel="cpu"), tokens(1, 300))
    with pytest.raises(KVFoldError, match="kernel: cpu does not support this layer"):
        of.to("meta")
    assert of.device.type == "cpu" and not any(t.is_meta for some in of.tensors().values() for t in some)


def test_layers_lie_where_the_models_layers_compute(model):
    split = copy.deepcopy(model)
    split.model.layers[1].self_attn.to("meta")
    assert [d.type for d in loading.layer_devices(split, 3)] == [
        "cpu",
        "cpu",
        "cpu",
    ]  # offloaded weights compute elsewhere
    split.model.layers[1].self_attn._hf_hook = SimpleNamespace(execution_device="meta")
    assert [d.type for d in loading.layer_devices(split, 3)] == ["cpu", "meta", "cpu"]


def test_a_model_without_weights_in_memory_is_refused(path):
    with pytest.raises((CacheFileError, UnsupportedModelError), match="meta"):
        kvfold.load_cache(path, llama().to("meta"))

"""Methods apart: for keys and values, for layers; one grammar, and the same content as each method alone."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from transformers.cache_utils import DynamicLayer

import kvfold
from helpers import assert_same_content, build, dynamic, feed, layer, llama, logits, prompt, relative, spec, tokens
from kvfold import Pair, Recipe
from kvfold.cli import main
from kvfold.engines.transformers.graph import _check_alike
from kvfold.errors import MethodError, UnsupportedModelError
from kvfold.formats import PagedFormat
from kvfold.formats.paged import plain
from kvfold.methods import DEFAULT, PRESETS, REGISTRY, Method, canonical, get
from kvfold.methods.recipe import BETWEEN
from tiny_model import save, tiny_llama

# ---- the grammar -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "bits": st.sampled_from([1, 2, 3, 4]),
    "k_bits": st.sampled_from([None, 2, 4]),
    "v_bits": st.sampled_from([None, 1, 3]),
    "rank": st.integers(1, 16),
    "lam": st.floats(0, 1e300),
    "outliers": st.floats(0, 0.25),
    "seed": st.integers(0, 9),
    "normalize": st.booleans(),
    "mode": st.sampled_from(["sym", "asym", "hybrid"]),
    "artefact": st.text("abc/.@=-+_ kv0123:", min_size=1).map(str.strip),
}


@st.composite
def singles(draw) -> Method:
    """Any method with any options; windows and blocks are the defaults', so that any two make a pair."""
    name = draw(st.sampled_from([n for n, m in REGISTRY.items() if n not in ("zipcache", "none") and m().block == 32]))
    base = REGISTRY[name]()
    fields = [f.name for f in dataclasses.fields(base) if f.name in OPTIONS]
    chosen = draw(st.lists(st.sampled_from(fields), unique=True, max_size=3)) if fields else []
    options = {field: draw(OPTIONS[field]) for field in chosen}
    try:
        return dataclasses.replace(base, **options)
    except MethodError:  # options that exclude each other, or an artefact's name that no method's string can hold
        return base


METHODS = st.one_of(singles(), st.builds(Pair, singles(), singles()))


@st.composite
def recipes(draw) -> Method:
    method = draw(METHODS)
    order = draw(st.permutations(range(40)))
    keep = order[: draw(st.integers(0, 6))]
    named = order[len(keep) : len(keep) + draw(st.integers(0, 6))]
    few = draw(st.lists(METHODS, min_size=1, max_size=2))
    made = Recipe(method, keep, {index: draw(st.sampled_from(few)) for index in named})
    return made if made.keep or made.layers else method


@settings(max_examples=150, deadline=None)
@given(recipes())
def test_a_methods_string_says_all_of_it(method):
    text = str(method)
    assert get(text) == method
    assert str(get(text)) == text
    assert get(method) is method and hash(get(text)) == hash(method)
    assert get(f"  {BETWEEN.sub(' + ', text)} ") == method


@pytest.mark.parametrize("file", ["runs/k=4/a.safetensors", "/0=", "a;v=b", "keep=1/k=2/x"])
def test_an_artefacts_folder_may_look_like_a_part(file):
    for text in (
        f"fold+0=kvquant:artefact={file}",
        f"k=kvquant:artefact={file}+v=kivi",
        f"fold+keep=3+1=kvquant:artefact={file},bits=3+2=kivi",
    ):
        made = get(text)
        assert get(str(made)) == made and f"artefact={file}" in str(made)
    with pytest.raises(MethodError, match="joined by '\\+', not by '/'"):
        get(f"k=kvquant:artefact={file},bits=3/v=kivi")


@settings(max_examples=100, deadline=None)
@given(st.sets(st.integers(0, 60)))
def test_layers_are_spelled_as_they_are_read(layers):
    assert Recipe("fold", Recipe("fold", layers).keep) == Recipe("fold", ",".join(map(str, layers)))
    text = str(Recipe("fold", layers)).partition("keep=")[2]
    assert Recipe("fold", text).keep == tuple(sorted(layers))


@pytest.mark.parametrize(
    ("text", "canonical", "made"),
    [
        ("k=fold:bits=3+v=fold:bits=2", "k=fold:bits=3+v=fold:bits=2", Pair("fold:bits=3", "fold:bits=2")),
        ("V=kivi:bits=2 + K=squat", "k=squat+v=kivi", Pair("squat", "kivi")),
        ("fold:bits=2+keep=31,0,1", "fold:bits=2+keep=0,1,31", Recipe("fold:bits=2", [0, 1, 31])),
        ("fold+keep=0,1,2,3", "fold+keep=0-3", Recipe("fold", "0-3")),
        ("fold+keep=5", "fold+keep=5", Recipe("fold", 5)),
        ("fold+5=kivi+3-4=kivi", "fold+3-5=kivi", Recipe("fold", layers={"3-5": "kivi"})),
        ("fold+5.k=kivi", "fold+5.k=kivi+5.v=fold", Recipe("fold", layers={5: Pair("kivi", "fold")})),
        ("fold+k=kivi", "k=kivi+v=fold", Pair("kivi", "fold")),
        ("k=kivi+v=fold+2.v=kivi", "k=kivi+v=fold+2=kivi", None),
        ("fold+2=fold+keep=1", "fold+keep=1", Recipe("fold", 1, {2: "fold"})),
        ("k=none+v=fold", "k=none:sink=32,recent=96+v=fold", Pair("none", "fold")),
        ("squat:lam=1e+16+keep=3", "squat:lam=1e+16+keep=3", Recipe("squat:lam=1e16", 3)),
        ("qjl_outliers+keep=0", f"{PRESETS['qjl_outliers']}+keep=0", Recipe("qjl_outliers", 0)),
        ("fold+keep=0+2,7-8=kivi:bits=4,sink=8", None, Recipe("fold", 0, {(2, 7, 8): "kivi:bits=4,sink=8"})),
    ],
)
def test_the_grammar(text, canonical, made):
    method = get(text)
    if text == "k=kivi+v=fold+2.v=kivi":
        made, canonical = (
            Recipe(Pair("kivi", "fold"), layers={2: Pair("kivi", "kivi")}),
            "k=kivi+v=fold+2.k=kivi+2.v=kivi",
        )
    assert method == made
    assert canonical is None or str(method) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=fold", "v= is missing; write k=METHOD"),
        ("v=fold", "k= is missing"),
        ("keep=0", "no part names one"),
        ("k=fold:bits=3;v=kivi", "parts are joined by '\\+', not by ';'"),
        ("fold;keep=0", "parts are k=METHOD, v=METHOD, keep=0,1,31 or 0-3=METHOD, joined by \\+"),
        ("keys=fold+values=kivi", "parts are k=METHOD"),
        ("fold+keep=", "no layer is named"),
        ("fold+keep=0+keep=1", "keep: it is given twice; write keep=0,1"),
        ("fold+keep=0,0", "layer 0 is named twice"),
        ("fold+keep=0-4,3", "layer 3 is named twice"),
        ("fold+keep=1+1=kivi", "layer 1: it is named twice"),
        ("fold+1=kivi+1=squat", "layer 1: it is named twice"),
        ("fold+1.k=kivi+1=squat", "layer 1: it is named twice"),
        ("k=fold+k=kivi+v=kivi", "k: it is given twice"),
        ("fold+keep=3-1", "'3-1' is not a layer; allowed: numbers and ranges"),
        ("fold+keep=-1", "'-1' is not a layer"),
        ("fold+keep=99999", "allowed: below 10000"),
        ("fold+0=", "method: '' is not known"),
        ("k=fold+v=nonsense", "'nonsense' is not known"),
        ("k=fold:bits=9+v=kivi", "bits=9 is not allowed"),
        ("k=fold+v=zipcache:group=32", "so it cannot store values alone"),
        ("k=fold+v=kivi:sink=0", "sink=32 of keys is not sink=0 of values.*the same sink for both"),
        ("k=qjl:paper=true+v=kivi", "sink=0 of keys is not sink=32"),
        ("k=fold+v=kivi:group=64", "block=32 of keys is not block=64 of values.*the same group"),
        ("fold+3.k=zipcache", "block=128 of keys is not block=32"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_remedy(text, message):
    with pytest.raises(MethodError, match=message):
        get(text)


def test_parts_that_speak_of_parts_are_refused():
    with pytest.raises(MethodError, match="speaks of layers itself"):
        Recipe("fold+keep=1", 2)
    with pytest.raises(MethodError, match="speaks of keys and values itself"):
        Pair("k=fold+v=kivi", "kivi")
    with pytest.raises(MethodError, match=r"keep: 1\.5 is not a layer"):
        Recipe("fold", [1.5])
    with pytest.raises(MethodError, match="keep: True is not a layer"):
        Recipe("fold", True)
    with pytest.raises(MethodError, match="a method's string cannot hold it"):
        get("fold") and REGISTRY["vqllm"](artefact="a,b")


# ---- content ---------------------------------------------------------------------------------------------------------

ALONE = [name for name in DEFAULT if not name.startswith("zipcache")]


@pytest.mark.parametrize("name", ALONE)
def test_a_pair_of_one_method_is_that_method(name):
    """Bytes, windows, state and sizes: what is encoded for keys and for values does not know of the other side."""
    new, cuts = tokens(2, 420), [300, 1, 119]
    alone, pair = (feed(layer(method), new, cuts) for method in (get(name), Pair(name, name)))
    assert pair.packed[0]
    for row in (0, 1):
        assert_same_content(alone, pair, row, row)
    assert [sum(t.nbytes for t in some) for some in alone.tensors().values()] == [
        sum(t.nbytes for t in some) for some in pair.tensors().values()
    ]
    assert {t.data_ptr() for t in alone.tables()} == {t.data_ptr() for t in pair.tables()}


def test_bits_apart_are_two_methods():
    new = tokens(2, 420)
    assert_same_content(feed(layer("fold:k_bits=4,v_bits=3"), new), feed(layer("k=fold:bits=4+v=fold:bits=3"), new))


PAIRS = [
    "k=fold:bits=3+v=kivi:bits=2",
    "k=kivi:bits=4+v=fold:bits=2",
    "k=squat+v=fold",
    "k=squat_pre+v=innerq",
    "k=innerq:mode=hybrid_prefill+v=kivi",
    "k=qjl+v=turboquant:bits=3",
    "k=gear+v=innerq:mode=hybrid_prefill",
    "k=zipcache+v=fold:group=128",
    "k=none+v=fold:bits=2",
    "k=fold:bits=2+v=none",
    "k=kivi:paper=true+v=turboquant:paper=true",
]


@pytest.mark.parametrize("name", PAIRS)
def test_keys_and_values_are_those_of_their_methods(name):
    new, cuts = tokens(2, 500), [1, 250, 249]
    pair = get(name)
    assert isinstance(pair, Pair)
    of = feed(layer(pair), new, cuts)
    once = feed(layer(pair), new, [500])
    for side, alone in ((0, feed(layer(pair.keys), new, cuts)), (1, feed(layer(pair.values), new, cuts))):
        assert torch.equal(of.decoded(1)[side], alone.decoded(1)[side])
    if not pair.paper and "hybrid_prefill" not in name:  # whose content depends on the first call
        assert_same_content(of, once)


@pytest.mark.targets
@pytest.mark.parametrize("name", PAIRS)
def test_attention_reads_the_pair_that_is_stored(name, target):
    """Whichever kernel reads it, as the float32 reference does; calls of one and of many tokens, padded."""
    model = llama()
    ids = prompt(2, 420)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    out = {}
    for kernel in (None, "reference"):
        out[kernel] = logits(model, kvfold.fold(model, name, kernel=kernel), ids, [400, 1, 19], mask)
        kvfold.unfold(model)
    assert relative(out[None][:, 400:], out["reference"][:, 400:]) < target.logits


def test_the_fused_kernel_takes_the_pairs_that_it_was_measured_on():
    """Others go to the Triton kernel or the reference, which read in pairs what they read apart."""
    pytest.importorskip("triton")
    from kvfold.kernels.affine.decode import unsupported

    def why(name: str) -> str | None:
        method, shape = get(name), spec(128)
        return unsupported(plain(method.key_format(shape)), plain(method.value_format(shape)))

    assert why("k=kivi:bits=4+v=kivi:bits=1") is None and why("k=squat+v=kivi") is None
    assert why("k=innerq:paper=true+v=innerq:paper=true,bits=4") is None
    assert why("k=kivi+v=innerq:paper=true") == (
        "groups along tokens of keys and of values; allowed: along one's channels and the other's tokens"
    )
    inner = "innerq:paper=true,mode"
    assert why(f"k={inner}=sym+v={inner}=asym") == "modes sym of keys and asym of values; allowed: the same"


# ---- layers ----------------------------------------------------------------------------------------------------------


def test_each_layer_has_its_method_and_kept_ones_the_models_cache():
    model = llama(num_hidden_layers=5)
    cache = kvfold.fold(model, "fold+keep=0,4+2=kivi:bits=4,sink=8+3.v=kivi")
    assert [type(layer) is DynamicLayer for layer in cache.layers] == [True, False, False, False, True]
    assert [str(layer.method) for layer in cache.folded] == ["fold", "kivi:bits=4,sink=8", "k=fold+v=kivi"]
    ids = prompt(1, 400)
    logits(model, cache, ids[:, :300])
    plain, whole = dynamic(model), kvfold.fold(model, "fold")
    kvfold.unfold(model)
    logits(model, plain, ids[:, :300])
    assert torch.allclose(cache.layers[0].keys, plain.layers[0].keys)
    kvfold.fold(model, "fold")
    logits(model, whole, ids[:, :300])
    assert_same_content(cache.layers[1], whole.layers[1])  # a first call attends exactly, so later layers see the same
    assert cache.layers[2].sink.slots == 8


def test_layers_kept_need_no_warning_and_layers_that_cannot_be_folded_no_method(recwarn):
    model = llama()
    kvfold.fold(model, "fold+keep=1")
    assert not recwarn.list
    for text, message in (
        ("fold+keep=2", "layer 2: the model has 2 layers; allowed: 0 to 1"),
        ("fold+7=kivi", "layer 7: the model has 2 layers"),
        ("fold+keep=0,1", "folds no layer of this model"),
    ):
        with pytest.raises(MethodError, match=message):
            kvfold.fold(model, text)
        with pytest.raises(MethodError, match=message):
            kvfold.explain(model, text)
    kinds = ["sliding_attention", "full_attention"]
    hybrid = build(Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=64, layer_types=kinds)
    with pytest.raises(
        MethodError, match="layer 0: sliding-window attention is not folded; leave it out of the method"
    ):
        kvfold.fold(hybrid, "fold+0=kivi")
    assert len(kvfold.fold(hybrid, "fold+keep=0").folded) == 1


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=["greedy", "beams", "lookup"]
)
@pytest.mark.parametrize(
    "name", ["none+keep=0", "none+keep=1", "none+1.k=none:sink=32,recent=96+1.v=none:sink=32,recent=96"]
)
def test_in_full_precision_every_recipe_generates_the_same(name, options):
    model = llama(eos_token_id=None)
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    ids = prompt(batch, 150)
    mask = torch.ones_like(ids)
    mask[-1, :20] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    expected = model.generate(ids, past_key_values=dynamic(model), **options)
    cache = kvfold.fold(model, name)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    assert any(max(layer.packed) for layer in cache.folded)


def test_sizes_count_every_layer_as_it_is():
    model = llama(num_hidden_layers=3)
    ids = prompt(1, 420)
    name = "k=fold:bits=3+v=kivi+keep=2+1=none"
    cache = kvfold.fold(model, name)
    logits(model, cache, ids)
    pair, none = cache.folded
    elements = 2 * 2 * 64 * (pair.packed[0] + none.packed[0])
    stored = sum(t.nbytes for layer in (pair, none) for t in layer.tensors()["packed"])
    assert cache.nbytes()["packed"] == stored
    assert cache.nbytes()["windows"] >= 2 * 2 * 64 * 420 * 4
    assert cache.full_nbytes() == 3 * 2 * 2 * 64 * 420 * 4
    used = 0
    for layer_ in (pair, none):
        for form in (layer_.key_format, layer_.value_format):
            used += 2 * form.block_bytes * (layer_.packed[0] // 32)
            if isinstance(form, PagedFormat):
                used += 2 * form.page_bytes * form.pages(layer_.packed[0] // 32)
    assert cache.effective_bits(tables=False) == pytest.approx(8 * used / elements)


def test_explain_says_each_layers_method():
    model = tiny_llama(num_hidden_layers=6)
    plan = kvfold.explain(model, "k=qjl+v=kivi+keep=0,5+3=squat:bits=4")
    assert [row.method for row in plan.layers] == ["-", *["k=qjl+v=kivi"] * 2, "squat:bits=4", "k=qjl+v=kivi", "-"]
    assert plan.layers[1].kernel == plan.layers[3].kernel == "cpu"
    assert (
        plan.layers[1].key_format != plan.layers[3].key_format
        and plan.layers[0].reason == "kept in full precision, as the method says"
    )
    assert plan.full_bytes_per_token == 6 * 2 * 2 * 64 * 4
    assert plan.bytes_per_token > 2 * 2 * 2 * 64 * 4
    text = str(plan)
    assert "k=qjl+v=kivi" in text and "squat:bits=4" in text and "not folded: layers 0, 5" in text
    assert any("newest 64" in note for note in plan.notes)


def test_decode_graphs_need_layers_that_move_alike():
    model = llama(num_hidden_layers=3)
    _check_alike(kvfold.fold(model, "fold+1=kivi:bits=4").folded)
    for other in ("kivi:sink=8", "kivi:recent=32", "kivi:group=64"):
        with pytest.raises(
            UnsupportedModelError, match=r"layer 1: its sink, recent and block are .* the same for all layers"
        ):
            _check_alike(kvfold.fold(model, f"fold+1={other}").folded)
    cache = kvfold.fold(model, "squat+1=zipcache:group=32")
    logits(model, cache, prompt(1, 200))
    _check_alike(cache.folded)


def test_rows_of_the_command_line_have_the_canonical_string(tmp_path, capsys):
    folder, out = str(save(tmp_path / "model")), tmp_path / "rows.json"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again. " * 20)
    names = ["V=kivi+K=fold:bits=3", "fold:bits=2+keep=0"]
    command = [
        "compare",
        "--model",
        folder,
        "--text",
        str(text),
        "--tokens",
        "32",
        "--prefix",
        "300",
        "--new-tokens",
        "2",
    ]
    command += ["--json", str(out), "--methods", *names]
    assert main(command) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in rows] == ["k=fold:bits=3+v=kivi", "fold:bits=2+keep=0"]
    assert all(row["tested"] for row in rows) and rows[0]["effective_bits"] > rows[1]["effective_bits"]
    assert main(["explain", "--model", folder, "--method", names[0], "--json", "-"]) == 0
    assert '"method": "k=fold:bits=3+v=kivi"' in capsys.readouterr().out
    assert main(["explain", "--model", folder, "--method", "fold+keep=9"]) == 2
    assert "layer 9: the model has 2 layers" in capsys.readouterr().err


def test_shapes_are_refused_for_the_side_that_has_them():
    """Groups of 64 along a token's 96 channels do not suit values; along tokens they suit keys."""
    odd = spec(96)
    with pytest.raises(MethodError, match=r"kivi: group=64: head_dim=96 .*allowed: 16, 32, 96"):
        get("kivi:group=64").check_shape(odd)
    get("k=kivi:group=64+v=turboquant:group=64").check_shape(odd)
    with pytest.raises(MethodError, match=r"kivi: group=64: head_dim=96 .*allowed: 16, 32, 96"):
        get("k=turboquant:group=64+v=kivi:group=64").check_shape(odd)
    with pytest.raises(MethodError, match=r"squat: rank=97 is not allowed.*allowed: 0 to 96"):
        get("k=squat:rank=97+v=fold").check_shape(odd)


def test_specs_of_a_layer_that_is_kept_are_refused():
    with pytest.raises(MethodError, match="layer 0: it stays in full precision"):
        Recipe("fold", 0).key_format(spec())


@pytest.mark.parametrize(
    ("pair", "name"),
    [
        ("k=tasq:bits=2+v=fold:bits=2,codebook=true", "tasq:bits=2,values=fold"),
        ("k=tasq:bits=2+v=fold:codebook=true", "tasq:bits=2,values=fold"),
        ("k=tasq:bits=2,artefact=a.s+v=fold:bits=1,codebook=true", "tasq:bits=2,v_bits=1,artefact=a.s,values=fold"),
        ("k=tasq+v=fold:bits=3+keep=0", "tasq:v_bits=3,values=fold+keep=0"),
        ("k=nova:values=codes+v=fold:bits=2,codebook=true", "nova:values=fold"),
        ("kivi+0-3.k=tasq+0-3.v=fold:bits=1,codebook=true", "kivi+0-3=tasq:values=fold"),
        ("tasq:values=fold+3.k=kivi", "tasq:values=fold+3.k=kivi+3.v=fold:bits=1,codebook=true"),
        ("k=kivi+v=nova:values=fold", "k=kivi+v=fold:bits=2,codebook=true"),
    ],
)
def test_keys_with_folds_values_have_one_name(pair, name):
    assert str(get(pair)) == name == str(get(name)) and get(pair) == get(name)


@pytest.mark.parametrize(
    "pair", ["k=tasq:bits=2+v=fold:bits=2", "k=tasq+v=fold:bits=1,seed=1,codebook=true", "k=tasq+v=kivi"]
)
def test_pairs_that_store_something_else_keep_their_name(pair):
    assert str(get(pair)) == pair and isinstance(get(pair), Pair)


def test_a_pair_made_in_python_has_the_same_name():
    pair = Pair("tasq:bits=2", "fold:bits=2,codebook=true")
    assert str(pair) == "tasq:bits=2,values=fold"
    assert str(Recipe("kivi", layers={3: pair})) == "kivi+3=tasq:bits=2,values=fold"


def test_rows_of_before_are_read_by_the_name_of_now():
    assert canonical("k=tasq:bits=2+v=fold:bits=2,codebook=true") == "tasq:bits=2,values=fold"
    assert canonical("k=once:known=1+v=fold") == "k=once:known=1+v=fold" and canonical("kivi") == "kivi"

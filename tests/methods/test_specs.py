"""Methods as text: names, options, presets."""

import dataclasses

import pytest

import kvfold
from helpers import llama, spec
from kvfold.errors import MethodError
from kvfold.formats import PagedFormat
from kvfold.methods import PRESETS, REGISTRY, get, options_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kivy", r"method: 'kivy' is not known \(did you mean kivi\?\); allowed: none, fold, kivi, .*qjl_outliers"),
        ("", "method: '' is not known"),
        (":bits=2", "method: '' is not known"),
        ("kivi:bits=5", "kivi: bits=5 is not allowed; allowed: 1, 2, 3, 4, 8"),
        ("kivi:k_bits=16", "kivi: k_bits=16 is not allowed; allowed: 1, 2, 3, 4, 8"),
        ("kivi:bits=two", "kivi: bits=two is not allowed; it must be an integer"),
        ("kivi:bits=2.0", "kivi: bits=2.0 is not allowed; it must be an integer"),
        ("kivi:bits", "kivi: 'bits' is not an option; write key=value"),
        ("kivi:bits=", "kivi: 'bits=' is not an option; write key=value"),
        ("kivi:bits=2,bits=4", "kivi: option 'bits' is given twice"),
        ("kivi:rank=3", "kivi: option 'rank' is not known; allowed: bits, center, group"),
        ("kivi:sink=-1", "kivi: sink=-1 is not allowed; allowed: 0 to 1048576$"),
        ("kivi:recent=-32", "kivi: recent=-32 is not allowed; allowed: 0 to 1048576$"),
        ("kivi:group=24", "kivi: group=24 is not allowed; allowed: 16 or multiples of 32 up to 1024$"),
        ("kivi:group=48", "kivi: group=48 is not allowed"),
        ("kivi:group=0", "kivi: group=0 is not allowed"),
        ("innerq:mode=symmetric", "innerq: mode=symmetric is not allowed; allowed: asym, sym, hybrid, hybrid_prefill"),
        ("innerq:normalize=maybe", "innerq: normalize=maybe is not allowed; it must be true or false"),
        ("squat:lam=-1", "squat: lam=-1.0 is not allowed; allowed: a finite number, 0 or more"),
        ("squat:lam=inf", "squat: lam=inf is not allowed"),
        ("squat:lam=nan", "squat: lam=nan is not allowed"),
        ("squat:lam=big", "squat: lam=big is not allowed; it must be a number"),
        ("squat:rank=-1", r"squat: rank=-1 is not allowed; allowed: 0 \(all\) to head_dim"),
        ("innerq:center=true", "innerq: center=true is not allowed; allowed: page, false"),
        ("fold:center=yes", "fold: center=yes is not allowed; allowed: page, false"),
        ("turboquant:center=1", "turboquant: center=1 is not allowed; allowed: page, false"),
        ("kivi:center=true", "kivi: center=true is not allowed; allowed: false"),
        ("kivi:warmup=256", "kivi: option 'warmup' is not known; allowed: bits, center, group"),
        ("fold:paper=true", "fold: paper=true is not allowed: the method is published here; allowed: false"),
        ("fold:bits=5", "fold: bits=5 is not allowed; allowed: 0, 1, 2, 3, 4, 8"),
        ("fold:k_bits=0", "fold: k_bits=0 is not allowed; allowed: 1, 2, 3, 4, 8"),
        ("fold:rotation=48", r"fold: rotation=48 is not allowed; allowed: 0 \(half of head_dim\) or a power of two"),
        ("fold:rotation=-2", "fold: rotation=-2 is not allowed"),
        ("qjl:outliers=8", "qjl: normalize=true is not allowed beside outliers=8"),
        ("squat:channels=-1", "squat: channels=-1 is not allowed"),
        ("qjl:outliers=-1", "qjl: outliers=-1 is not allowed"),
        ("qjl:outlier_sketch=24", "qjl: outlier_sketch=24 is not allowed; allowed: 0$"),
        ("qjl:early_k_bits=5", "qjl: early_k_bits=5 is not allowed; allowed: 3$"),
        ("qjl:early_k_bits=5,early_layers=1", "qjl: early_k_bits=5 is not allowed; allowed: 1, 2, 3, 4, 8$"),
        ("qjl:early_k_bits=4", "qjl: early_k_bits=4 has no effect without early_layers; allowed: 3$"),
        ("qjl:outlier_sketch=64", "qjl: outlier_sketch=64 has no effect without outliers; allowed: 0$"),
        ("qjl:outliers=8,normalize=false,outlier_sketch=24", "allowed: multiples of 16, 0 to 4096$"),
        ("none:bits=2", "none: option 'bits' has no effect; allowed: group, recent, sink$"),
        ("none:center=false", "none: option 'center' has no effect"),
        ("none:paper=true", "none: option 'paper' has no effect"),
        ("fold:seed=-1", "fold: seed=-1 is not allowed; allowed: 0 to 9223372036854775807$"),
        ("gear:seed=9223372036854775808", "allowed: 0 to 9223372036854775807$"),
        ("kivi:recent=1048577", "allowed: 0 to 1048576$"),
        ("kivi:group=1056", "kivi: group=1056 is not allowed"),
        ("gear:loops=1000000", "gear: loops=1000000 is not allowed; allowed: 1 to 100$"),
        (
            "turboquant:bits=1,residual=true",
            "turboquant: bits=1 is not allowed beside residual=true.*; allowed: 2, 3, 4$",
        ),
        ("turboquant:residual=true,bits=5", "turboquant: bits=5 is not allowed; allowed: 2, 3, 4$"),
        (
            "zipcache:k_bits=8",
            "salient_bits=4 is not allowed beside 8 bits; allowed with another option: k_bits=none, k_bits=2, k_bits=3",
        ),
    ],
)
def test_a_wrong_spec_is_refused_by_name(text, message):
    with pytest.raises(MethodError, match=message) as error:
        get(text)
    assert "\n" not in str(error.value) and isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("text", "head_dim", "message"),
    [
        ("kivi", 80, "kivi: group=32: head_dim=80 is not divisible by it; allowed: 16$"),
        (
            "squat:channels=48",
            64,
            "squat: channels=48 does not divide head_dim=64; allowed: 0, 1, 2, 4, 8, 16, 32, 64$",
        ),
        ("qjl:outliers=64,normalize=false", 64, "qjl: outliers=64 is not allowed; allowed: 0 to 63$"),
        ("innerq", 72, "head_dim=72"),
        ("squat:rank=9999", 64, "squat: rank=9999 is not allowed; allowed: 0 to 64$"),
        ("squat_pre:rank=65", 64, "squat_pre: rank=65 is not allowed"),
        ("gear:rank=65", 64, "gear: rank=65 is not allowed; allowed: 1 to 64$"),
        (
            "fold:rotation=128",
            64,
            "fold: rotation=128: head_dim=64 is not divisible by it; allowed: 0, 1, 2, 4, 8, 16, 32, 64$",
        ),
        ("fold:group=96", 96, "fold: group=96: a page of 128 tokens is no multiple of it; allowed: 16, 32, 64, 128$"),
        (
            "zipcache:group=256",
            64,
            "zipcache: group=256: a page of 128 tokens is no multiple of it; allowed: 16, 32, 64, 128$",
        ),
    ],
)
def test_a_method_that_does_not_suit_the_model_is_refused_when_folding(text, head_dim, message):
    model = llama(head_dim=head_dim)
    before = model.config._attn_implementation
    with pytest.raises(MethodError, match=message):
        kvfold.fold(model, text)
    assert model.config._attn_implementation == before


EXTRA = ("", "bits=4", "k_bits=3", "v_bits=4", "sink=8,recent=64", "group=64", "seed=3")


@pytest.mark.parametrize("extra", EXTRA)
@pytest.mark.parametrize("name", [*kvfold.DEFAULT, *PRESETS])
def test_specs_survive_a_round_trip(name, extra):
    """The canonical text of a method gives the same method, and names nothing that is its default."""
    spec = name + (("," if ":" in name else ":") + extra if extra else "")
    try:
        method = get(spec)
    except (
        MethodError
    ) as error:  # no such option, one that is given already, or bits that do not suit the method's others
        expected = ("not known", "twice", "not allowed beside", "no effect")
        assert any(what in str(error) for what in expected)
        return
    assert get(str(method)) == method and get(method) is method and str(get(str(method))) == str(method)
    defaults = method.defaults(method.paper)
    for option in filter(None, str(method).partition(":")[2].split(",")):
        key, value = option.split("=")
        assert key == "paper" or str(defaults[key]).lower() != value


def test_values_are_read_as_their_type():
    method = get(" squat :  bits = 4 , lam = 5e-4, paper=TRUE, k_bits=none, center=false ".replace(" : ", ":"))
    assert (method.bits, method.lam, method.paper, method.k_bits, method.center) == (4, 5e-4, True, None, "false")


def test_every_method_has_the_same_windows_by_default():
    for name, method in REGISTRY.items():
        if name not in ("none", "kvquant", "commvq", "vqllm"):
            assert (get(name).sink, get(name).recent) == (32, 96), name
        assert method.defaults() == {f.name: f.default for f in dataclasses.fields(method)}


PUBLISHED = {
    "kivi": {"sink": 0, "recent": 128},
    "squat": {"sink": 0, "recent": 32, "rank": 5, "lam": 1e-3},
    "squat_pre": {"sink": 0, "recent": 32, "rank": 5, "lam": 1e-3},
    "innerq": {"sink": 32, "recent": 96, "center": "false", "normalize": True},
    "qjl": {"sink": 0, "recent": 32, "center": "false", "normalize": False},
    "turboquant": {"sink": 0, "recent": 128, "center": "false", "normalize": False},
    "gear": {"sink": 0, "recent": 128},
    "zipcache": {"sink": 0, "recent": 128},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_paper_restores_the_published_method_and_its_options_can_be_changed(name):
    method = get(f"{name}:paper=true")
    for option, value in PUBLISHED[name].items():
        assert getattr(method, option) == value, option
    assert method.paper and method.page == 0 and str(method) == f"{name}:paper=true"
    for side in (method.key_format(spec()), method.value_format(spec())):
        assert not isinstance(side, PagedFormat) or side.page == 0
    changed = get(f"{name}:sink=7,paper=true,recent=31")
    assert (changed.sink, changed.recent, changed.paper) == (7, 31, True)
    assert get(f"{name}:paper=false") == get(name)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("fold", (3, 2)),
        ("fold:bits=4", (4, 4)),
        ("fold:bits=0", (3, 2)),
        ("fold:bits=8,v_bits=2", (8, 2)),
        ("fold:k_bits=2", (2, 2)),
        ("fold:v_bits=3", (3, 3)),
        ("fold:k_bits=4,v_bits=3", (4, 3)),
        ("fold:bits=2", (2, 2)),
    ],
)
def test_folds_bits(text, bits):
    method = get(text)
    assert (method.key_bits, method.value_bits) == bits
    forms = (method.key_format(spec()), method.value_format(spec()))
    assert tuple(form.inner.bits_per_code for form in forms) == bits


def test_presets_are_the_published_settings_and_can_be_changed():
    assert get("qjl_outliers") == get("qjl:paper=true,outliers=8,early_layers=15,early_k_bits=3")
    assert get("qjl_outliers:sink=8") == get("qjl:paper=true,outliers=8,early_layers=15,sink=8")
    for model, rank, lam, channels in (("llama2", 40, 1e-3, 64), ("llama3", 10, 5e-4, 64)):
        method = get(f"squat_longbench_{model}")
        assert (method.name, method.rank, method.lam, method.channels) == ("squat", rank, lam, channels)
        assert method.paper and (method.sink, method.recent) == (0, 32)
    for model, rank, lam, channels in (("llama2", 5, 1e-3, 32), ("llama3", 60, 5e-4, 32), ("mistral", 20, 5e-4, 64)):
        method = get(f"squat_pre_longbench_{model}")
        assert (method.name, method.rank, method.lam, method.channels) == ("squat_pre", rank, lam, channels)
        assert method.paper and (method.sink, method.recent) == (0, 32)


def test_every_method_lists_its_options():
    common = {"bits", "k_bits", "v_bits", "sink", "recent", "group", "center", "paper"}
    for name, method in REGISTRY.items():
        options = options_of(method)
        assert common - set(method.unused) <= options.keys(), name
        assert method.summary and method.source
        assert all("no" not in kind or "none" in kind for kind, _ in options.values())


def test_keys_and_values_may_have_bits_of_their_own():
    keys, values = get("kivi:bits=2,k_bits=8").key_format(spec()), get("kivi:bits=2,k_bits=8").value_format(spec())
    assert (keys.bits_per_code, values.bits_per_code) == (8, 2)

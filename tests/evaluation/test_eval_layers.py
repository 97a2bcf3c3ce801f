import pytest
import torch

from kvfold.errors import KVFoldError
from kvfold.evaluation import loop
from kvfold.evaluation.report import report
from kvfold.evaluation.suites import Options, make
from kvfold.evaluation.suites.layers import DIRECTIONS, ERRORS, QUERIES, errors
from kvfold.evaluation.text import load_text
from kvfold.methods import get
from kvfold.models import ModelInfo
from tiny_model import byte_tokenizer, tiny_llama

INFO = ModelInfo("tiny", "float32", "cpu", 1024, 1)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    (folder / "prose.txt").write_text(load_text().text[:6000])
    suites = make(["layers"], byte_tokenizer(), Options(texts={"prose": str(folder / "prose.txt")}))
    methods = ["kivi", "squat", "squat:lam=0", "kivi:bits=4", "qjl", "fold"]
    model = tiny_llama()
    planned = loop.plan(model, INFO, methods, suites, lengths=[600], limit=2)
    (found,) = loop.run(model, byte_tokenizer(), INFO, planned, folder)
    return found


def of(file, method):
    return [row for row in file.rows.values() if row.method == method]


def test_rows_have_a_number_per_layer_and_their_mean(file):
    for row in of(file, "kivi"):
        assert set(row.scores) == set(row.series) == set(ERRORS) and row.tested == row.read == QUERIES
        for name, values in row.series.items():
            assert len(values) == 2 and row.scores[name] == pytest.approx(sum(values) / 2)
        assert 0 < row.scores["weights"] < 1 and row.scores["output"] > 0 and 2.9 < row.effective_bits < 3.1


def test_scores_are_scaled_as_the_model_scales_them():
    """Gemma and Granite have a scale of their own; of half the scale scores are half as wrong."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(2)
        layer.self_attn.scaling /= 2
    asked = []
    for some in (model, tiny_llama()):
        (suite,) = make(["layers"], byte_tokenizer(), Options())
        asked.append(suite.ask(some, suite.items([600], 1, 1)[0], get("kivi"), 32).scores)
    assert asked[0] == pytest.approx(asked[1], rel=1e-3)


def test_full_precision_has_no_error_and_more_bits_have_less(file):
    assert all(row.scores[name] < 1e-5 for row in of(file, "none") for name in ERRORS if name != "subspace")
    for few, many in zip(of(file, "kivi"), of(file, "kivi:bits=4"), strict=True):
        assert all(many.scores[name] < few.scores[name] / 2 for name in ("output", "scores", "keys", "values"))


def test_squat_steers_errors_off_the_queries_and_its_weight_0_is_kivi(file):
    for plain, squat, zero in zip(of(file, "kivi"), of(file, "squat"), of(file, "squat:lam=0.0"), strict=True):
        assert squat.scores["subspace"] < plain.scores["subspace"]
        assert zero.scores == pytest.approx(plain.scores)
        assert squat.scores["values"] == pytest.approx(plain.scores["values"])


def test_errors_by_hand():
    """One head of two channels: keys moved by a constant move every score alike, and no weight."""
    query, key = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    moved = key + torch.randn(1, 1, 8)
    found = errors(query, (key, key), (moved, key), 1.0)
    shift = ((moved - key)[:, :1] @ query.mT)[0, 0]  # of each query's scores
    seen = torch.arange(1, 5)  # tokens that each query sees
    assert found["scores"] == pytest.approx(float(((shift**2 * seen).sum() / seen.sum()).sqrt()), rel=1e-4)
    assert found["weights"] < 1e-6 and found["output"] < 1e-5 and found["values"] == 0
    turned = errors(query, (key, key), (key, key * 1.5), 1.0)
    assert turned["output"] == pytest.approx(0.5) and turned["weights"] == 0


def test_what_lies_in_the_queries_subspace():
    query = torch.zeros(1, 64, 10)
    query[..., :DIRECTIONS] = torch.randn(1, 64, DIRECTIONS)
    key, inside, outside = torch.randn(1, 64, 10), torch.zeros(1, 64, 10), torch.zeros(1, 64, 10)
    inside[..., :DIRECTIONS], outside[..., DIRECTIONS:] = 0.1, 0.1
    assert errors(query, (key, key), (key + inside, key), 1.0)["subspace"] == pytest.approx(2, rel=1e-3)
    assert errors(query, (key, key), (key + outside, key), 1.0)["subspace"] == pytest.approx(0, abs=1e-3)


def test_the_report_draws_them_by_layer(file):
    made = report([file.path])
    assert "output by layer" in made and ">layer</text>" in made


def test_methods_that_leave_layers_out_are_refused(tmp_path):
    (tmp_path / "p.txt").write_text(load_text().text[:6000])
    suites = make(["layers"], byte_tokenizer(), Options(texts={"p": str(tmp_path / "p.txt")}))
    planned = loop.plan(tiny_llama(), INFO, ["fold:bits=2+keep=0"], suites, lengths=[600], limit=1, own_windows=True)
    with pytest.raises(KVFoldError, match=r"^methods: fold:bits=2\+keep=0 leaves layers unfolded"):
        loop.run(tiny_llama(), byte_tokenizer(), INFO, planned, tmp_path)

"""The script that runs Transformers' own tests on folded caches: what it makes of two runs' outcomes, and its plugin."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import peer_tests  # noqa: E402
from peer_tests import Outcome, Reason, counts, differences, grouped, read, refusals, report  # noqa: E402

REASONS = (Reason("static", r"cache_implementation .*allowed", "refused by name"),)


def outcome(name: str, ended: str, error: str = "", **more) -> Outcome:
    return Outcome(f"tests/models/llama/test_modeling_llama.py::LlamaModelTest::{name}", ended, error, **more)


def test_tests_that_end_alike_do_not_differ():
    run = [outcome("test_a", "passed"), outcome("test_b", "failed", "x"), outcome("test_c", "skipped")]
    assert (
        differences(run, [outcome("test_a", "passed"), outcome("test_b", "failed", "y"), outcome("test_c", "skipped")])
        == []
    )


def test_a_difference_has_the_reason_of_its_name_and_its_error():
    names = ("test_static", "test_static_b", "test_plain")
    errors = ("cache_implementation 'static'\nallowed: ...", "IndexError", "cache_implementation: allowed")
    folded = [outcome(name, "failed", error) for name, error in zip(names, errors, strict=True)]
    found = differences([outcome(name, "passed") for name in names], folded, REASONS)
    assert [one.why for one in found] == ["refused by name", "", ""]
    assert [(one.unfolded, one.folded) for one in found] == [("passed", "failed")] * 3


def test_a_test_that_is_skipped_or_passes_instead_differs():
    unfolded = [outcome("test_a", "passed"), outcome("test_b", "failed")]
    found = differences(unfolded, [outcome("test_a", "skipped"), outcome("test_b", "passed")], REASONS)
    assert [(one.unfolded, one.folded, one.why) for one in found] == [
        ("passed", "skipped", ""),
        ("failed", "passed", ""),
    ]


def test_reasons_are_sentences_and_regular_expressions():
    for reason in peer_tests.REASONS:
        assert reason.why and reason.error, reason
        peer_tests.why(outcome("test_x", "failed", "y"), [reason])


def test_rows_count_and_the_report_names_what_nobody_explained():
    unfolded = [outcome("test_a", "passed"), outcome("test_static_0_x", "passed"), outcome("test_c", "skipped")]
    folded = [
        outcome("test_a", "failed", "IndexError: x\nmore", folded=True, packed=True),
        outcome("test_static_0_x", "failed", "cache_implementation x: allowed", folded=True),
        outcome("test_c", "skipped", refused={"TinyModel": "no attention"}),
    ]
    told = {
        "transformers": "5.0",
        "families": ["llama"],
        "rows": [counts("unfolded", unfolded), counts("none", folded)],
    }
    assert told["rows"][1] == {"run": "none", "passed": 0, "failed": 2, "skipped": 1, "folded": 2, "packed": 1}
    told["differences"] = grouped({"none": differences(unfolded, folded, REASONS)})
    assert [(one["test"], one["why"], one["error"], one["tests"]) for one in told["differences"]] == [
        ("test_a", "", "IndexError: x", 1),
        ("test_static", "refused by name", "", 1),
    ]
    text = report(told | {"refused": {"none": refusals(folded)}})
    assert "| `none` | 0 | 2 | 1 | 2 | 1 |\n" in text
    assert "| `test_a` | passed -> failed | 1 | all | **unexplained**: IndexError: x |\n" in text
    assert "| `test_static` | passed -> failed | 1 | all | refused by name |\n" in text
    assert "`TinyModel` (no attention)" in text


def test_the_page_says_what_the_rows_say():
    page = peer_tests.PAGE.read_text(encoding="utf-8")
    assert page == peer_tests.written(page), "run: python scripts/peer_tests.py --write"
    assert "unexplained" not in page


def test_tests_of_compiled_models_run_if_they_are_asked_for():
    assert peer_tests.asked("test_greedy_generate", peer_tests.TESTS)
    assert not peer_tests.asked("test_generate_compile_model_forward", peer_tests.TESTS)
    assert peer_tests.asked("test_generate_compile_model_forward", ["compil"])


def test_a_line_that_was_cut_is_run_again(tmp_path):
    path = tmp_path / "none.jsonl"
    assert read(path) == []
    path.write_text(json.dumps({"test": "a/b/c/d::e", "ended": "passed"}) + '\n{"test": "a/b/c/d::f", "en')
    for _ in range(2):
        assert [(one.test, one.family, one.name) for one in read(path)] == [("a/b/c/d::e", "c", "e")]
        with path.open("a") as file:
            file.write('{"test')


CHECKOUT = {
    "tests/__init__.py": "",
    "tests/generation/__init__.py": "",
    "tests/models/__init__.py": "",
    "tests/models/llama/__init__.py": "",
    "tests/generation/test_utils.py": """
class GenerationTesterMixin:
    def _check_past_key_values_for_generate(self, batch_size, past_key_values, seq_length, config):
        for layer in past_key_values.layers:
            self.assertEqual(layer.keys.shape[:3], (batch_size, config.num_key_value_heads, seq_length))
""",
    "tests/models/llama/test_modeling_llama.py": """
import unittest

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.testing_utils import is_flaky

from tests.generation.test_utils import GenerationTesterMixin


class Tester:
    seq_length = 7

    def prepare_config_and_inputs_for_common(self):
        ids = torch.ones(2, self.seq_length, dtype=torch.long)
        sizes = dict(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        inputs = {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}
        return LlamaConfig(**sizes, eos_token_id=None), inputs


class LlamaModelTest(unittest.TestCase, GenerationTesterMixin):
    def setUp(self):
        self.model_tester = Tester()

    def built(self):
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return LlamaForCausalLM(config).eval(), inputs

    def test_generate(self):
        model, inputs = self.built()
        out = model.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
        self._check_past_key_values_for_generate(2, out.past_key_values, 41, model.config)

    def test_type_of_past_key_values(self):
        model, inputs = self.built()
        self.assertIs(type(model(**inputs).past_key_values), DynamicCache)

    @is_flaky
    def test_generate_without_parentheses(self):
        self.fail("it ran")

    @unittest.skip("for a reason")
    def test_generate_skipped(self):
        pass

    def test_compiled_generate(self):
        pass

    def test_something_else(self):
        self.fail("not asked for")
""",
}


@pytest.mark.slow
def test_a_checkout_of_small_tests(tmp_path):
    """Models are folded, blocks are packed, what differs is found, and what has ended does not run again."""
    for name, text in CHECKOUT.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ended = tmp_path / "out" / f"{transformers.__version__}-40" / "unfolded.jsonl"
    ended.parent.mkdir(parents=True)
    ended.write_text(json.dumps(asdict(outcome("test_generate_skipped", "passed"))) + "\n")
    command = [sys.executable, str(ROOT / "scripts" / "peer_tests.py"), "--checkout", str(tmp_path / "checkout")]
    command += ["--out", str(tmp_path / "out"), "--models", "llama", "--methods", "none"]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    told = json.loads((tmp_path / "rows.json").read_text())
    assert told["rows"] == [
        {"run": "unfolded", "passed": 3, "failed": 1, "skipped": 0, "folded": 0, "packed": 0},
        {"run": "none", "passed": 1, "failed": 2, "skipped": 1, "folded": 2, "packed": 2},
    ]
    skipped, typed = told["differences"]
    assert (skipped["test"], skipped["unfolded"], skipped["folded"]) == ("test_generate_skipped", "passed", "skipped")
    assert typed["test"] == "test_type_of_past_key_values" and "FoldedCache" in typed["error"]
    assert "unexplained" in done.stdout

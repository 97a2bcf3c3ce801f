"""Texts that are scored."""

import hashlib

import pytest
import torch
from tokenizers import processors

from kvfold.errors import KVFoldError
from kvfold.evaluation import Text, load_text
from kvfold.evaluation.windows import encode
from tiny_model import byte_tokenizer

PREFIX, TOKENS = 320, 96


def test_the_default_text_is_clean_prose_and_always_the_same():
    text = load_text()
    assert text == load_text() and len(text.text) > 100_000
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()
    assert ">>>" not in text.text and "::=" not in text.text and "****" not in text.text
    paragraphs = text.text.strip().split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_a_file_is_read_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffGrüße, folded.\n", encoding="utf-8")
    assert load_text(tmp_path / "a.txt").text == "Grüße, folded.\n"


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "empty"), (b" \n\t ", "empty"), (b"\xff\xfe\x00", "not UTF-8"), (b"a\0b", "zero bytes")]
)
def test_what_is_not_text_is_refused(tmp_path, content, says):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(KVFoldError, match=f"^text: .*{says}"):
        load_text(tmp_path / "x")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(KVFoldError, match=r"^text: cannot read"):
            load_text(path)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((63, 96, 8, None), "^prefix: 63 is too small"),
        ((320, 31, 8, None), "^tokens: 31 is too small"),
        ((320, 96, 1, None), "^new_tokens: 1 is too small; give at least 2"),
        ((320, 96, 8, 400), "^tokens: .*beyond the model's context of 400; give at most 72"),
        ((320, 96, 8, 300), "^prefix: 320 .* do not fit .* 300; give at most 196 with 96 tokens scored"),
        (([64, 320], 96, 8, 300), "^prefix: 320 .* do not fit .* 300"),
        (([320, 63], 96, 8, None), "^prefix: 63 is too small"),
        (([], 96, 8, None), "^prefix: none given"),
        (([64, 10**6], 96, 8, None), "^text: .* needed .prefix 1000000 "),
        ((10**6, 96, 8, None), "^text: .* give a longer text"),
    ],
)
def test_counts_that_do_not_fit_name_what_is_allowed(counts, says):
    with pytest.raises(KVFoldError, match=says):
        encode(byte_tokenizer(), load_text(), *counts)


def test_every_prefix_is_followed_by_the_same_tokens_and_begins_as_the_tokenizer_begins_texts():
    text = Text("abcdefghij" * 100, "t")
    found = encode(byte_tokenizer(), text, [320, 64, 320], 32, 2, None)
    assert list(found) == [64, 320] and [ids.shape for ids in found.values()] == [(1, 97), (1, 353)]
    assert torch.equal(found[64], found[320][:, -97:])
    begins = byte_tokenizer()
    begins.add_special_tokens({"bos_token": "<s>"})
    begins._tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 258)])
    found = encode(begins, text, [64, 320], 32, 2, None)
    assert found[64][0, 0] == found[320][0, 0] == 258
    assert torch.equal(found[64][:, 1:], found[320][:, -96:])


def test_a_text_has_its_files_name_wherever_it_lies(tmp_path):
    path = tmp_path / "a" / "prose.txt"
    path.parent.mkdir()
    path.write_text("words", encoding="utf-8")
    assert load_text(path).name == "prose.txt" and load_text(path).source == str(path)
    assert load_text().name == load_text().source

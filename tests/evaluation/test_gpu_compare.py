"""The comparison and the domains on a GPU: references on the device, decoding in graphs."""

import pytest
import torch

from kvfold import models
from kvfold.evaluation import compare, domains, load_text, reference, windows
from tiny_model import byte_tokenizer, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

METHODS = ["none", "kivi", "innerq:paper=true", "turboquant"]


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama(max_position_embeddings=4096).to("cuda", torch.bfloat16)


INFO = models.ModelInfo("tiny", "bfloat16", "cuda", 4096, 1)


def test_rows_on_a_gpu_are_decoded_in_graphs_or_say_why_not(tiny):
    options = {"prefix": [512, 2048], "tokens": 128, "new_tokens": 40, "chunk": 64}
    rows = compare(tiny, byte_tokenizer(), INFO, METHODS, load_text(), **options).rows
    assert [(row.method, row.prefix) for row in rows] == [(m, p) for p in (512, 2048) for m in METHODS]
    paths = {row.method: row.decode_path for row in rows}
    assert paths["kivi"] == paths["innerq:paper=true"] == "graph"
    assert all(path == "graph" or (path.startswith("steps: ") and len(path) > 10) for path in paths.values())
    for row in rows:
        assert row.tested == 128 and row.kld is not None and row.decode_tokens_per_s > 0
        assert row.kld < 1e-2 or row.method != "none"


def test_domains_on_a_gpu_score_what_the_cpu_scores(tiny):
    texts = windows.load_texts(["prose", "retrieval"], {})
    pieces = windows.make_windows(byte_tokenizer(), texts, [512, 1024], 128, 1)
    _, rows = domains.run(tiny, INFO, METHODS, pieces, texts=texts, chunk=64)
    assert reference(tiny, pieces[0].ids.cuda(), 512, 64).logits.is_cuda
    assert len(rows) == len(pieces) * len(METHODS)
    cpu = tiny_llama(max_position_embeddings=4096)
    _, expected = domains.run(cpu, INFO, METHODS, pieces, texts=texts, chunk=64)
    for got, want in zip(rows, expected, strict=True):
        assert got.key == want.key and got.tested == want.tested
        assert got.kld == pytest.approx(want.kld, rel=0.2, abs=2e-2)

"""What CONTRIBUTING shows is so: a format with a fast kernel is one format file and one reader."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

RUN = """
import blocks_case, own_method, reader
from kvfold.kernels.generic import readers
from kvfold.methods import LayerSpec

def formats(head_dim, device):
    layer = LayerSpec(0, 1, blocks_case.HEADS, 2 * blocks_case.HEADS, head_dim, fragments=False)
    method = own_method.ByteMethod()
    return method.key_format(layer), method.value_format(layer)

assert readers.why_not(formats(64, "cpu")[1]) is not None
readers.READERS[own_method.Bytes] = reader.BytesReader
print(blocks_case.Case(formats, head_dim=80, packed=(96, 32), slabs=(4,)).error())
"""


@pytest.mark.slow
def test_the_reader_that_is_shown_is_all_that_a_format_needs(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert "from kvfold.formats.yours import Bytes" in code
    (tmp_path / "reader.py").write_text(code.replace("kvfold.formats.yours", "own_method"))
    places = map(str, (tmp_path, ROOT / "examples", TESTS, *sys.path))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 2e-3

import pytest

from kvfold.bench.serve import main, workload
from kvfold.errors import KVFoldError


def test_work_is_written_as_counts_of_lengths():
    assert workload("8x32768") == [32768] * 8
    assert workload("1x131072+3x2048") == [131072, 2048, 2048, 2048]


@pytest.mark.parametrize("text", ["", "8", "8x", "x8", "8x1x2", "8x1k"])
def test_other_work_is_refused_by_name(text):
    with pytest.raises(KVFoldError, match=r"work: .* is not allowed; write 8x32768"):
        workload(text)


def test_fewer_than_two_steps_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(KVFoldError, match="steps: 1 is not allowed; time 2 or more"):
        main(["--steps", "1"])

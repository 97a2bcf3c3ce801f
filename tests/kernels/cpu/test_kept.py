"""What the CPU kernel makes once: for whom, how often when threads come at once, and where compiled code is kept."""

import copy
import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("numba")

from blocks_case import CASES, Case, grouped, lookup
from kvfold.kernels.cpu import CPUKernel, _attend, _numbers
from kvfold.kernels.cpu.readers import reader_of
from kvfold.kernels.cpu.readers.base import made


def at_once(count, do):
    """What ``do`` returns in threads that begin together."""
    found, begin = [], threading.Barrier(count)

    def run():
        begin.wait()
        found.append(do())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("name", ["groups-4-mean", "lookup-channel-keys-rope", "turboquant-2bit", "commvq-no-rope"])
def test_copies_and_pickles_begin_with_nothing(name, twin_of):
    """Addresses of compiled functions are another process's in a pickle."""
    call = Case(**CASES[name]).call
    expected = CPUKernel().attend(call)
    forms = call.key_format, call.value_format
    twins = tuple(twin_of(form) for form in forms)
    for form, twin in zip(forms, twins, strict=True):
        assert vars(form)["_cpu"] and vars(twin)["_cpu"] == {}
    twin = replace(call, key_format=twins[0], value_format=twins[1], rope=twin_of(call.rope))
    assert torch.equal(CPUKernel().attend(twin), expected)


def test_threads_that_come_at_once_have_the_same():
    """The tables of one that was replaced would be freed while the other thread reads them."""
    form, both = lookup(), threading.Barrier(2, timeout=10)

    def make():
        both.wait()  # neither is done when the other begins
        return object()

    found = at_once(2, lambda: made(form, "twice", make))
    assert found[0] is found[1] is made(form, "twice", make)


def test_a_decoder_is_compiled_once(monkeypatch):
    compiled = []

    def compile(how, function):
        compiled.append(function)
        threading.Event().wait(0.05)
        return SimpleNamespace(address=len(compiled), cache_hits=1)

    monkeypatch.setattr(_numbers, "_compiled", compile)
    decoder = _numbers.decoder(lambda: None)
    assert at_once(4, lambda: decoder.address) == [1] * 4


def test_equal_formats_with_other_tables_have_their_own_reader():
    a, b = grouped(), grouped()
    assert a == b and reader_of(a) is reader_of(a) is not reader_of(b)


def test_whole_numbers_of_a_configuration_compile_nothing_again():
    call = Case(**CASES["kvquant-2bit"]).call
    CPUKernel().attend(call)
    before = list(_attend.attend.signatures)
    rope = replace(call.rope, scaling=1)
    CPUKernel().attend(replace(call, scale=1, softcap=50, rope=rope))
    assert _attend.attend.signatures == before


# ---- where compiled code is kept -------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path, monkeypatch):
    """An installation's folder, and a home."""
    installed, home = tmp_path / "installed", tmp_path / "home"
    for folder in (installed, home):
        folder.mkdir()
    (installed / "_numbers.py").write_text("")
    monkeypatch.setattr(_numbers, "__file__", str(installed / "_numbers.py"))
    monkeypatch.setattr(_numbers.config, "CACHE_DIR", "")
    monkeypatch.setenv("HOME", str(home))
    return installed, home


def kept_in():
    return _numbers.Path(_numbers._kept_in.__wrapped__())


def test_compiled_code_lies_beside_its_sources_and_that_of_older_ones_goes(places):
    installed, _ = places
    first = kept_in()
    assert first.parent == installed / "__pycache__" and kept_in() == first
    (installed / "_numbers.py").write_text("x = 1")
    second = kept_in()
    assert second != first and second.is_dir() and not first.exists()


def test_where_another_user_has_written_the_home_is_taken(places, monkeypatch):
    """A folder that is there may still not be written: of an installation that its owner has used."""
    installed, home = places
    real = _numbers.TemporaryFile

    def checked(dir):
        if dir.is_relative_to(installed):
            raise PermissionError(dir)
        return real(dir=dir)

    kept_in()
    monkeypatch.setattr(_numbers, "TemporaryFile", checked)
    assert kept_in().parent == home / ".cache" / "kvfold"


def test_folders_of_others_stay(places, monkeypatch, tmp_path):
    """Other versions of kvfold, and other programs, may have theirs where NUMBA_CACHE_DIR points to, and at home."""
    installed, home = places
    own = kept_in()
    shared = tmp_path / "shared"
    others = [place / "numba-0123456789ab" for place in (shared, home / ".cache" / "kvfold")]
    for other in others:
        other.mkdir(parents=True)
    monkeypatch.setattr(_numbers.config, "CACHE_DIR", str(shared))
    assert kept_in().parent == shared
    monkeypatch.setattr(_numbers.config, "CACHE_DIR", "")
    (installed / "__pycache__").rename(tmp_path / "away")
    (installed / "__pycache__").write_text("not a folder")
    assert kept_in().parent == home / ".cache" / "kvfold"
    assert all(other.is_dir() for other in others) and own.name.startswith("numba-")

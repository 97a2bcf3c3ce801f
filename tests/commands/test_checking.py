"""Methods that are checked before an evaluation begins: which took long is said."""

from kvfold.commands import terminal


def test_methods_that_take_long_to_check_are_told_of(capsys, monkeypatch):
    clock = iter([0.0, 0.2, 0.2, 9.0, 9.0, 9.1, 9.1])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(clock))
    told = terminal.Checking()
    for number, name in enumerate(("none", "qjl", "fold"), 1):
        told(name, number, 3)
    assert capsys.readouterr().err == "kvfold: [2/3] methods checked: qjl, 9 s\n"

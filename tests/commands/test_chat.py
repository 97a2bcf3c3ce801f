"""Chats on one folded cache: against plain generation from scratch, interrupted, cut, refolded; in a process and a terminal."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold import methods
from kvfold.cli import main
from kvfold.commands import chat as command
from kvfold.commands.conversation import Conversation
from kvfold.commands.terminal import Stream
from kvfold.errors import KVFoldError, MethodError
from kvfold.models import load
from tiny_model import CONTEXT, TEMPLATE, byte_tokenizer, save, tiny_llama

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def speaker():
    """A tiny model that says letters only: what it says is rendered as it was made, and it never ends by itself."""
    model = tiny_llama(initializer_range=0.5)
    vocabulary = byte_tokenizer().get_vocab()
    silent = [i for name, i in vocabulary.items() if name not in LETTERS]
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save(tmp_path_factory.mktemp("speaker"), speaker()))


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


@pytest.fixture
def begin(loaded):
    """A conversation with what may be changed of it."""

    def begin(method="kivi:bits=4", template=None, **options):
        model, tokenizer, info = loaded
        if template is not None:
            tokenizer = byte_tokenizer()
            tokenizer.chat_template = template
        return Conversation(model, tokenizer, info, method, **{"max_new_tokens": 24, **options})

    yield begin
    kvfold.unfold(loaded[0])


def rendered(talk, messages):
    return talk.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def replayed(talk, *calls):
    """What the last of some (messages, new tokens) is answered, on a cache of its own.

    The same calls, since hidden states depend on what earlier layers read: a first call attends to nothing folded.
    """
    cache = kvfold.fold(talk.model, talk.method)
    for messages, tokens in calls:
        ids = torch.tensor([rendered(talk, messages)])
        with torch.inference_mode():
            out = talk.model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, do_sample=False
            )
    return talk.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def computed(loaded):
    """Tokens that the model computes, call by call."""
    counts = []
    handle = loaded[0].model.embed_tokens.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    yield counts
    handle.remove()


# ---- turns -----------------------------------------------------------------------------------------------------------


TEXTS = ("Hello there", "What did I say?", "Again, " + "please " * 30, "And now?")


def test_turns_on_one_cache_are_those_from_scratch(begin):
    talk = begin("none", system="Be brief.")
    for text in TEXTS:
        messages = [*talk.messages, user(text)]
        turn = talk.ask(text, io.StringIO())
        assert turn.text == replayed(talk, (messages, 24)) and turn.ended == "length"
        assert turn.dropped == 0 and turn.new_tokens == 24 and turn.tokens_per_s > 0
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 4]


@pytest.mark.parametrize("method", ["kivi", "fold:sink=0,recent=32", "squat"])
def test_turns_on_one_folded_cache_are_its_calls(begin, method):
    talk, calls = begin(method), []
    for text in TEXTS:
        calls.append(([*talk.messages, user(text)], 24))
        assert talk.ask(text, io.StringIO()).dropped == 0
    assert talk.messages[-1]["content"] == replayed(talk, *calls)


def test_a_turn_computes_its_new_tokens_only(begin, computed):
    talk = begin()
    first = talk.ask("x" * 200, io.StringIO())
    assert first.read_tokens == first.prompt_tokens == computed[0]
    computed.clear()
    second = talk.ask("More", io.StringIO())
    # the last token of the first answer, its end, and "<user>More\n<assistant>"
    assert second.read_tokens == computed[0] == 1 + len("\n<user>More\n<assistant>")
    assert second.prompt_tokens == first.prompt_tokens + 24 + len("\n<user>More\n<assistant>")
    assert sum(computed) == second.read_tokens + 23


def test_an_answer_is_streamed_as_it_is_remembered(begin):
    talk, out = begin(), io.StringIO()
    turn = talk.ask("Hello", out)
    assert out.getvalue() == turn.text + "\n" and talk.messages[-1]["content"] == turn.text


FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{{ m['content'][:CUT] }}{% else %}{{ m['content'] }}{% endif %}\n"
    "{% endfor %}<assistant>"
)


def test_an_answer_that_is_rendered_otherwise_is_taken_back_exactly(begin):
    """The windows still hold it: a crop gives the cache of before."""
    talk = begin("kivi:bits=2", template=FORGETFUL.replace("CUT", "10"))
    first = [user("x" * 300)]
    talk.ask("x" * 300, io.StringIO())
    messages = [*talk.messages, user("And?")]
    turn = talk.ask("And?", io.StringIO())
    assert turn.text == replayed(talk, (first, 11), (messages, 24))
    assert turn.dropped == 23 - 10 and "the last answer otherwise" in turn.why_dropped
    assert turn.read_tokens == len("<user>And?<assistant>")  # jinja eats line ends after tags


def test_turns_that_are_rendered_otherwise_are_read_again(begin):
    """What is packed cannot be cut in the middle of a block without a trace: the cache begins anew, and says so."""
    talk = begin("kivi:bits=2,sink=0,recent=0", template=FORGETFUL.replace("CUT", "2"), max_new_tokens=100)
    talk.ask("x" * 300, io.StringIO())
    messages = [*talk.messages, user("And?")]
    turn = talk.ask("And?", io.StringIO())
    assert turn.text == replayed(talk, (messages, 100))
    assert turn.read_tokens == turn.prompt_tokens and turn.dropped > 300 and "the last answer" in turn.why_dropped


def test_a_template_that_forgets_earlier_turns_is_said_to(begin):
    talk = begin(template=TEMPLATE.replace("messages", "messages[-2:]"))
    for text in ("One", "Two"):
        talk.ask(text, io.StringIO())
    messages = [*talk.messages, user("And?")][-2:]
    turn = talk.ask("And?", io.StringIO())
    assert turn.text == replayed(talk, (messages, 24)) and turn.prompt_tokens == len(rendered(talk, messages))
    assert "earlier turns" in turn.why_dropped and turn.dropped > 0


def test_another_method_folds_the_conversation_anew(begin):
    talk = begin("kivi:bits=2,sink=0,recent=0")
    talk.ask("x" * 200, io.StringIO())
    held = len(talk.held)
    assert talk.use("fold:bits=4,sink=0,recent=0") == held and talk.use("fold:bits=8,sink=0,recent=0") == held
    messages = [*talk.messages, user("And?")]
    turn = talk.ask("And?", io.StringIO())
    assert turn.text == replayed(talk, (messages, 24)) and turn.read_tokens == turn.prompt_tokens
    assert turn.dropped == held and turn.why_dropped == "now folded by fold:bits=8,sink=0,recent=0"
    assert talk.ask("So?", io.StringIO()).why_dropped == ""


def test_a_method_that_does_not_fit_changes_nothing(begin):
    talk = begin("kivi:bits=4")
    talk.ask("Hello", io.StringIO())
    cache, held = talk.cache, talk.held
    for wrong in ("abacus", "kivi:bits=5", "kivi:group=96"):
        with pytest.raises(MethodError):
            talk.use(wrong)
    assert talk.cache is cache and talk.held == held and str(talk.method) == "kivi:bits=4"
    assert talk.ask("And?", io.StringIO()).dropped == 0


def test_after_a_reset_nothing_is_left_but_the_system_message(begin):
    talk = begin(system="Be brief.")
    first = talk.ask("Hello", io.StringIO())
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    second = talk.ask("Hello", io.StringIO())
    assert (second.text, second.read_tokens, second.dropped) == (first.text, first.prompt_tokens, 0)


def test_an_answer_ends_where_the_context_does_and_the_next_message_is_refused(begin, loaded):
    talk = begin(max_new_tokens=100)
    text = "x" * (CONTEXT - 30 - len("<user>\n<assistant>"))
    turn = talk.ask(text, io.StringIO())
    assert (turn.ended, turn.new_tokens) == ("context", 30)
    before = list(talk.messages)
    with pytest.raises(
        KVFoldError, match=f"context: .* tokens with this message, the model's context {CONTEXT:,}; /reset"
    ):
        talk.ask("And?", io.StringIO())
    assert talk.messages == before
    talk.reset()
    assert talk.ask("Hello", io.StringIO()).ended == "length"


def test_an_answer_that_the_model_ends(begin):
    talk = begin()
    end = talk.tokenizer.get_vocab()["a"]
    talk.model.generation_config.eos_token_id = [end]
    try:
        for text in ("Hello", "x" * 40, "you"):
            turn = talk.ask(text, io.StringIO())
            assert (turn.ended == "answered") == (turn.new_tokens < 24 or turn.text.endswith("a"))
    finally:
        talk.model.generation_config.eos_token_id = 257


@pytest.mark.parametrize(
    ("template", "system", "says"),
    [
        ("{{ raise_exception('no system') if messages[0].role == 'system' }}" + TEMPLATE, "x", "system: "),
        ("", None, "no chat template; take an instruct model, or kvfold generate --raw"),
        ("{{ raise_exception('never') }}", None, "model: the chat template .* never"),
        ("{% if false %}x{% endif %}", None, "prompt: the tokenizer of .* makes no tokens of it"),
    ],
)
def test_templates_that_refuse(begin, template, system, says):
    with pytest.raises(KVFoldError, match=says):
        begin(template=template, system=system)


# ---- interrupted -----------------------------------------------------------------------------------------------------


class Pressing(io.StringIO):
    """Presses Ctrl-C once enough is printed, as often as asked."""

    def __init__(self, after, times):
        super().__init__()
        self.after, self.times = after, times

    def write(self, text):
        count = super().write(text)
        while self.times and len(self.getvalue()) >= self.after:
            self.times -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return count


@pytest.fixture
def words(loaded):
    """The speaker says spaces as well, so that words are printed before the answer ends."""
    model, tokenizer, _ = loaded
    space = tokenizer.get_vocab()["Ġ"]
    handle = model.lm_head.register_forward_hook(
        lambda module, args, out: out.index_add(
            -1, torch.tensor([space]), 50.0 * (args[0].sum(-1, keepdim=True) > 0).to(out.dtype)
        )
    )
    yield
    handle.remove()


@pytest.mark.parametrize("method", ["kivi:bits=2,sink=0,recent=0", "fold", "squat"])
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation_right(begin, words, method):
    before = signal.getsignal(signal.SIGINT)
    talk = begin(method, max_new_tokens=400)
    turn = talk.ask("x" * 300, Pressing(after=20, times=1))
    assert turn.ended == "interrupted" and 20 <= turn.new_tokens < 200
    assert talk.messages[-1] == {"role": "assistant", "content": turn.text}
    assert signal.getsignal(signal.SIGINT) is before
    talk.max_new_tokens = 24
    messages = [*talk.messages, user("And?")]
    second = talk.ask("And?", io.StringIO())
    calls = ([user("x" * 300)], turn.new_tokens), (messages, 24)
    assert second.text == replayed(talk, *calls) and second.dropped == 0


@pytest.mark.parametrize("times", [2, 3])
def test_ctrl_c_twice_breaks_off_and_the_next_turn_reads_again(begin, words, times):
    talk, out = begin("kivi:bits=2,sink=0,recent=0", max_new_tokens=400), Pressing(after=20, times=times)
    with pytest.raises(KeyboardInterrupt):
        try:
            talk.ask("x" * 300, out)
        finally:
            out.times = 0
    said = talk.messages[-1]["content"]
    assert said == out.getvalue() and len(said) >= 20
    talk.max_new_tokens = 24
    messages = [*talk.messages, user("And?")]
    second = talk.ask("And?", io.StringIO())
    assert second.text == replayed(talk, (messages, 24)) and second.read_tokens == second.prompt_tokens


def test_an_error_in_the_middle_leaves_a_conversation_that_goes_on_right(begin):
    talk = begin("kivi:bits=2,sink=0,recent=0")
    talk.ask("x" * 200, io.StringIO())
    before = list(talk.messages)
    calls = []

    def fails(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    handle = talk.model.model.layers[1].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        talk.ask("And?", shown := io.StringIO())
    handle.remove()
    said = shown.getvalue()  # Transformers' streamer shows letters at once from 5.24 on, and whole words before
    kept = [user("And?"), {"role": "assistant", "content": said}] if said else []
    assert talk.messages == [*before, *kept]
    messages = [*before, *kept, user("And?")]
    turn = talk.ask("And?", io.StringIO())
    assert turn.text == replayed(talk, (messages, 24)) and turn.dropped > 200 and turn.why_dropped == "after an error"


def test_ctrl_c_as_an_answer_has_just_ended_stops_nothing(begin, monkeypatch, capsys):
    talk = begin()
    session, sizes = command._Session(talk, io.StringIO()), talk.sizes

    def pressed():
        signal.raise_signal(signal.SIGINT)
        return sizes()

    monkeypatch.setattr(talk, "sizes", pressed)
    session.at_terminal = True
    assert session.take("Hello")
    assert [turn["user"] for turn in session.turns] == ["Hello"] and "tokens read" in capsys.readouterr().err
    monkeypatch.setattr(talk, "sizes", sizes)
    before = list(talk.messages)
    turn = talk.ask("And?", io.StringIO())
    assert turn.text == replayed(talk, ([*before, user("And?")], 24)) and not turn.dropped


def test_a_conversation_in_another_thread(begin):
    talk, found = begin(), []
    thread = threading.Thread(target=lambda: found.append(talk.ask("Hello", io.StringIO())))
    thread.start()
    thread.join()
    assert found[0].ended == "length"


# ---- the command -----------------------------------------------------------------------------------------------------


class Piped:
    def __init__(self, data):
        self.buffer = io.BytesIO(data)

    def isatty(self):
        return False


@pytest.fixture
def chat(capsys, monkeypatch, folder):
    def chat(data, *arguments):
        monkeypatch.setattr(sys, "stdin", Piped(data))
        capsys.readouterr()
        status = main(["chat", "--model", folder, "--max-new-tokens", "12", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return chat


def test_lines_of_standard_input_are_turns(chat, tmp_path):
    lines = b"Hello\n\n/method\n/method kivi:bits=4\nAnd\xc3\xa9?\r\n/help\n/reset\n//x\n/exit\nnever read\n"
    status, out, err = chat(lines, "--system", "Be brief.", "--json", str(tmp_path / "x.json"))
    assert status == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert [turn["user"] for turn in found["turns"]] == ["Hello", "Andé?", "//x"]
    assert out.splitlines() == [turn["text"] for turn in found["turns"]]
    assert [turn["method"] for turn in found["turns"]] == ["fold", "kivi:bits=4", "kivi:bits=4"]
    assert found["messages"][:2] == [{"role": "system", "content": "Be brief."}, user("/x")]
    assert found["turns"][1]["dropped"] > 0 and found["turns"][0]["cache_bytes"] > 0
    assert "[fold] method: fold\n" in err and "from now on, on a new cache; the next turn reads" in err
    assert "the conversation is forgotten" in err and "/method NAME" in err
    assert len(re.findall("tokens read", err)) == 3
    assert len(re.findall("packing begins at 160 tokens; at 1,024 tokens", err)) == 1
    assert all("nothing is packed yet" in line for line in err.splitlines() if "tokens read" in line)


def test_a_transcript_on_standard_output_is_json_alone(chat):
    status, out, err = chat(b"Hello\n", "--json", "-")
    found = json.loads(out)
    assert status == 0 and found["turns"][0]["text"] in err and found["method"] == "fold"


def test_no_turns_is_no_error(chat):
    assert chat(b"")[:2] == (0, "")


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (b"Hello\n/abacus\nAnd?\n", "command: /abacus is unknown; allowed: /help, /method, /reset, /exit"),
        (b"Hello\n/method abacus\nAnd?\n", "method: 'abacus' is not known"),
        (b"Hello\n" + b"x" * 2000 + b"\nAnd?\n", "context: the conversation has .* /reset begins"),
        (b"Hello\n\xff\xfe\nAnd?\n", "standard input: line 2 is not UTF-8 text"),
    ],
)
def test_piped_turns_end_at_the_first_error_and_the_transcript_is_kept(chat, tmp_path, lines, says):
    status, _, err = chat(lines, "--json", str(tmp_path / "x.json"))
    assert status == 2 and re.search(f"kvfold: error: {says}", err)
    assert [turn["user"] for turn in json.loads((tmp_path / "x.json").read_text())["turns"]] == ["Hello"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--method", "abacus"], "method: 'abacus'"),
        (["--max-new-tokens", "0"], "max-new-tokens: 0"),
        (["--temperature", "nan"], "temperature: nan"),
        (["--json", "/not/there/x"], "json: "),
    ],
)
def test_wrong_options(chat, arguments, says):
    status, out, err = chat(b"Hello\n", *arguments)
    assert status == 2 and out == "" and f"kvfold: error: {says}" in err


# ---- a terminal ------------------------------------------------------------------------------------------------------


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 500, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvfold", "chat", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # the session's terminal: Ctrl-C reaches it
            env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "dumb"},
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text):
        os.write(self.ours, text.encode())

    def type_at_prompt(self, text):
        """When input() waits: a prompt is written before it is ready for signals."""
        deadline = time.monotonic() + 90
        while not self.waits_for_input():
            assert time.monotonic() < deadline, "the prompt does not wait for input"
            time.sleep(0.01)
        self.type(text)

    def waits_for_input(self):
        """Whether input() has taken the terminal over, and the process's main thread sleeps."""
        taken = not termios.tcgetattr(self.ours)[3] & termios.ICANON
        return taken and Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    def wait_for(self, pattern, seconds=90):
        """Read until ``pattern`` is there; returns and forgets what was read up to its end."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.ours], [], [], 0.2)[0]:
                try:
                    read = os.read(self.ours, 65536).decode(errors="replace")
                    self.seen += re.sub(r"\x1b\[[0-9;?]*[a-z]|\r", "", read)
                except OSError:  # closed
                    match = re.search(pattern, self.seen)
                    assert match, f"no {pattern!r} in {self.seen!r}"
                    break
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def end(self):
        os.close(self.ours)
        return self.process.wait(timeout=30)


@pytest.mark.slow
def test_a_chat_with_the_demo_model_on_a_terminal(tmp_path):
    """Answers, Ctrl-C within one and at the prompt, another method, a wrong command, Ctrl-D; and the transcript."""
    talk = Terminal("--max-new-tokens", "300", "--json", str(tmp_path / "x.json"))
    try:
        talk.wait_for("/help for more.*\n> ")
        talk.type_at_prompt("Write a long story about a fox.\n")
        talk.wait_for(r"fox\.\n")  # as it was typed
        talk.wait_for(r"\w+ \w+ ")
        talk.type("\x03")
        assert "stopped; " in talk.wait_for(r"tokens read.*\n.*\n?> ")
        talk.type_at_prompt("\x03")
        talk.wait_for("Ctrl-D or /exit ends the chat\n> ")
        talk.type_at_prompt("/abacus\n")
        talk.wait_for("/abacus is unknown.*\n> ")
        talk.type_at_prompt("/method kivi:bits=4\n")
        talk.wait_for("the next turn reads the .* again\n> ")
        talk.type_at_prompt("What is the capital of France? One word.\n")
        talk.wait_for(r"Paris")
        talk.type("\x03")
        assert "now folded by kivi:bits=4" in talk.wait_for(r"tokens read.*\n> ")
        talk.type_at_prompt("\x04")
        assert talk.process.wait(timeout=30) == 0
    finally:
        talk.process.kill()
        talk.end()
    found = json.loads((tmp_path / "x.json").read_text())
    assert [turn["method"] for turn in found["turns"]] == ["fold", "kivi:bits=4"]
    assert (
        found["turns"][0]["ended"] == "interrupted"
        and [m["role"] for m in found["messages"]] == ["user", "assistant"] * 2
    )


@pytest.mark.slow
def test_ctrl_c_ends_piped_turns_and_the_transcript_is_kept(folder, tmp_path):
    command = [sys.executable, "-m", "kvfold", "chat", "--model", folder, "--max-new-tokens", "8"]
    command += ["--json", str(tmp_path / "x.json")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    while b"tokens read" not in (line := process.stderr.readline()):
        assert line, "ended before its first turn"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err and err.endswith(b"kvfold: interrupted\n")
    assert [turn["user"] for turn in json.loads((tmp_path / "x.json").read_text())["turns"]] == ["Hello"]


@pytest.mark.parametrize("seconds, speed", [
    ([0.0, 1.0, 9.0, 9.5, 10.0, 10.5], 2.0), ([0.0, 1.0, 9.0, 9.25], 4.0), ([0.0, 1.0, 9.0], None), ([0.0], None),
])  # fmt: skip
def test_speed_is_that_of_steps_which_only_decode(seconds, speed):
    """Not of the prompt, nor of the first step, in which a graph is captured: here it takes eight seconds."""
    stream = Stream(None, io.StringIO())
    stream.times = seconds
    assert stream.tokens_per_s() == speed


def test_ctrl_c_that_is_seen_when_the_input_has_ended_ends_the_chat_as_well(monkeypatch):
    """Pressed as input() is about to wait, it interrupts nothing until a line, or the end, has come."""

    class Late(io.StringIO):
        def isatty(self):
            return True

        def write(self, text):
            raise KeyboardInterrupt

    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    monkeypatch.setattr(sys, "stdout", Late())
    monkeypatch.setattr(sys, "stderr", Late())
    assert list(command._Session.typed(None)) == []


def test_conversations_take_every_default_method(begin):
    for spec in methods.DEFAULT:
        talk = begin(spec, max_new_tokens=4)
        talk.ask("x" * 180, io.StringIO())
        assert talk.ask("And?", io.StringIO()).dropped == 0

"""The command ``kvfold chat``. The turns are those of :mod:`kvfold.commands.conversation`."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from kvfold.commands.terminal import (
    as_text,
    check_temperature,
    json_target,
    load,
    method_option,
    model_options,
    publish,
    sampling_options,
    wake,
)
from kvfold.errors import KVFoldError

if TYPE_CHECKING:
    from kvfold.commands.conversation import Conversation, Turn

HELP = """\
/method       say which method folds the cache
/method NAME  fold the conversation with another one, for example /method kivi:bits=4
/reset        forget the conversation
/help         this
/exit         end; so does Ctrl-D
//text        a message that begins with /
Ctrl-C stops an answer and keeps what was said; again, at once."""


@click.command(short_help="Chat on one folded cache.")
@model_options
@method_option("Method of the cache.")
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options(512, "Longest answer, in tokens.")
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    help="Write the transcript to FILE as JSON when the chat ends; - prints it instead of the answers.",
)
def chat(
    model: str | None,
    dtype: str | None,
    device: str | None,
    spec: str,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    json_path: str | None,
) -> None:
    """Chat on one folded cache: every turn computes its new tokens only, and says the cache's size and the speed.

    /help lists what else can be typed. Where standard input is no terminal, each of its lines is a turn, answers go to
    standard output and everything else to standard error.
    """
    if max_new_tokens < 1:
        raise KVFoldError(f"max-new-tokens: {max_new_tokens}; give at least 1")
    check_temperature(temperature)
    system = None if system is None else as_text(system, "system")
    wake()
    import torch

    from kvfold import methods
    from kvfold.commands.conversation import Conversation

    method = methods.ready(spec)
    target = json_target(json_path)
    loaded, tokenizer, info = load(model, dtype, device)
    torch.manual_seed(seed)
    talk = Conversation(loaded, tokenizer, info, method, system, max_new_tokens, temperature)
    session = _Session(talk, sys.stderr if json_path == "-" else sys.stdout)
    try:
        session.run()
    finally:

        def keep() -> None:
            publish(session.transcript(), json_path, target, lambda: None)

        try:
            interrupted = _undisturbed(keep)
        except (
            KeyboardInterrupt
        ):  # of a pipe's end and Ctrl-C at once the end is seen first: it came before it was put off
            interrupted = _undisturbed(keep) or True
        if interrupted:
            raise KeyboardInterrupt


def _undisturbed(work: Callable[[], None]) -> bool:
    """Do what Ctrl-C must not cut short; returns whether it was pressed meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        work()
        return False
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        work()
    finally:
        signal.signal(signal.SIGINT, before)
    return bool(pressed)


class _Session:
    """Reads turns and commands, and prints what comes of them."""

    def __init__(self, talk: Conversation, out: Any) -> None:
        self.talk, self.out = talk, out
        self.at_terminal = sys.stdin is not None and sys.stdin.isatty()
        self.turns: list[dict[str, Any]] = []

    def run(self) -> None:
        info = self.talk.info
        self.tell(f"{info.name} in {info.dtype} on {info.device}, cache folded by {self.talk.method}; /help for more")
        for line in self.lines():
            if not line.strip():
                continue
            try:
                if not self.take(line):
                    return
            except KVFoldError as error:
                if not self.at_terminal:  # nobody would see that what follows is an answer to something else
                    raise
                self.tell(f"error: {error}")
            except KeyboardInterrupt:
                if not self.at_terminal:
                    raise
                print(file=self.out)
                self.tell("stopped; what was said so far is kept and will be read again")

    def take(self, line: str) -> bool:
        """Do what a line says; returns whether to go on."""
        if line.startswith("/") and not line.startswith("//"):
            return self.command(*line[1:].strip().partition(" ")[::2])
        if self.at_terminal:  # Ctrl-C stops an answer; pressed as it has just ended, it stops nothing
            _undisturbed(lambda: self.turn(line))
        else:
            self.turn(line)
        return True

    def turn(self, line: str) -> None:
        """Answer a line, and say what that took."""
        from kvfold.engines.transformers.sizes import ahead as foretell

        turn = self.talk.ask(line[1:] if line.startswith("//") else line, self.out, gently=self.at_terminal)
        sizes = self.talk.sizes()
        self.turns.append({"user": line, **dataclasses.asdict(turn), "method": str(self.talk.method), **sizes})
        self.tell(self.said(turn))
        cache, dtype, limit = self.talk.cache, self.talk.model.dtype, self.talk.info.max_context
        if len(self.turns) == 1 and (ahead := foretell(cache, dtype, limit)):
            self.tell(ahead)

    def command(self, name: str, value: str) -> bool:
        value = value.strip()
        if name in ("exit", "quit"):
            return False
        if name == "help":
            print(HELP, file=sys.stderr)
        elif name == "reset":
            self.talk.reset()
            self.tell("the conversation is forgotten")
        elif name == "method" and not value:
            self.tell(f"method: {self.talk.method}")
        elif name == "method":
            held = self.talk.use(value)
            later = f"; the next turn reads the {held:,} tokens so far again" if held else ""
            self.tell(f"method: {self.talk.method} from now on, on a new cache{later}")
        else:
            raise KVFoldError(f"command: /{name} is unknown; allowed: /help, /method, /reset, /exit (//{name} says it)")
        return True

    def said(self, turn: Turn) -> str:
        """One line on a turn: how it ended if not by itself, speed, what was read, and the cache."""
        from kvfold.engines.transformers import sizes

        how = {
            "answered": "",
            "length": ", cut at --max-new-tokens",
            "context": ", cut where the model's context ends: /reset begins anew",
            "interrupted": ", stopped",
        }[turn.ended]
        speed = "" if turn.tokens_per_s is None else f", {turn.tokens_per_s:.1f} tokens/s"
        dropped = f" ({turn.dropped:,} cached ones dropped: {turn.why_dropped})" if turn.dropped else ""
        read = f"{turn.read_tokens:,} of {turn.prompt_tokens:,} tokens read{dropped}"
        return f"{turn.new_tokens} tokens{speed}{how}; {read}; {sizes.said(self.talk.cache, self.talk.model.dtype)}"

    def tell(self, line: str) -> None:
        """Say something beside the answers."""
        from kvfold.sheet import wrap

        line = f"[{self.talk.method}] {line}" if self.turns else f"kvfold: {line}"
        if sys.stderr.isatty():
            line = "\n".join(wrap(line, max(shutil.get_terminal_size().columns, 20)))
        click.secho(line, err=True, dim=self.at_terminal)

    def lines(self) -> Iterator[str]:
        """Turns and commands, typed or piped."""
        if self.at_terminal:
            yield from self.typed()
        elif sys.stdin is not None:
            for number, line in enumerate(sys.stdin.buffer, 1):
                try:
                    yield line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise KVFoldError(f"standard input: line {number} is not UTF-8 text") from None

    def typed(self) -> Iterator[str]:
        try:
            import readline  # noqa: F401  # input() edits lines with it
        except ImportError:
            pass
        while True:
            try:
                if not sys.stdout.isatty():
                    print("> ", end="", file=sys.stderr, flush=True)
                line = input("> " if sys.stdout.isatty() else "")
                line.encode("utf-8")
            except EOFError:
                try:
                    print(file=sys.stderr)
                except KeyboardInterrupt:
                    pass  # pressed as input() was about to wait: it is seen when that has ended, which is what was wanted
                return
            except KeyboardInterrupt:
                print(file=sys.stderr)
                self.tell("Ctrl-D or /exit ends the chat")
                continue
            except (UnicodeDecodeError, UnicodeEncodeError):
                self.tell("error: that is not UTF-8 text")
                continue
            yield line

    def transcript(self) -> dict[str, Any]:
        """The whole chat, for JSON."""
        info = self.talk.info
        return {
            "model": info.name,
            "dtype": info.dtype,
            "device": info.device,
            "system": self.talk.system,
            "method": str(self.talk.method),
            "turns": self.turns,
            "messages": self.talk.messages,
        }

"""The command ``kvfold calibrate``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import TYPE_CHECKING

import click

from kvfold.commands.artefact import errors_text
from kvfold.commands.terminal import SeveralTexts, check_name, seed_option
from kvfold.errors import KVFoldError
from kvfold.files import expanded

if TYPE_CHECKING:
    from kvfold.calibration.run import LayerDone
    from kvfold.methods.base import Method
    from kvfold.methods.squat import SQuat


@click.command(cls=SeveralTexts, short_help="Learn a method's codebooks from text.")
@click.option(
    "--model", metavar="M", help="Hub id, local folder or .gguf file.  [default: embedded SmolLM2-135M-Instruct]"
)
@click.option("--method", "spec", metavar="X", default="commvq:bits=2", show_default=True, help="Method to learn.")
@click.option(
    "--text",
    "paths",
    metavar="FILE ...",
    multiple=True,
    help="UTF-8 text, one or more files. A profile (fold:budget=2.8) takes none: its prompts are built in.",
)
@click.option("--tokens", metavar="N", type=int, default=32768, show_default=True, help="Tokens of it to use.")
@click.option(
    "--out", metavar="FILE", required=True, help="Where the artefact goes; FILE.partial keeps finished layers."
)
@click.option("--device", metavar="DEVICE", help="cpu, cuda or cuda:N.  [default: cuda if there is one, else cpu]")
@click.option(
    "--preset",
    metavar="NAME",
    help="Of commvq. fast: minutes on a CPU. long: the same with more steps, for a GPU. paper: as published, for a GPU.  "
    "[default: fast]",
)
@click.option(
    "--encoder",
    metavar="NAME",
    help="Of commvq's values. scalar: closed form, seconds a layer. mlp: the paper's network, better at 1 bit, a minute a "
    "layer on a CPU.  [default: the preset's: scalar, for paper mlp]",
)
@seed_option("Same seed, same artefact.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
def calibrate(
    model: str | None,
    spec: str,
    paths: tuple[str, ...],
    tokens: int,
    out: str,
    device: str | None,
    preset: str | None,
    encoder: str | None,
    seed: int,
    force: bool,
) -> None:
    """Learn a method's codebooks from text and write them to a file; a killed run goes on where it stopped.

    Prints each layer's errors on held-out text: of keys and values (squared error over squared length); for commvq of
    scores (over their variance) and of attention outputs; for kvquant of keys and values weighted by sensitivity.
    """
    from kvfold import methods
    from kvfold.artefact import check_target
    from kvfold.evaluation.text import load_text
    from kvfold.methods.learned import LearnedMethod
    from kvfold.methods.squat import SQuat

    method = methods.get(spec)
    if method.spreads:
        _profile(method, model, device, paths, out, force)
        return
    if not isinstance(method, LearnedMethod) and type(method) is not SQuat:
        learn_something = [name for name, kind in methods.REGISTRY.items() if issubclass(kind, (LearnedMethod, SQuat))]
        learn_something.remove("squat_pre")
        learn_something.append("fold:budget=2.8")
        if parts := [str(part) for part in method.parts() if part is not method and isinstance(part, LearnedMethod)]:
            raise KVFoldError(
                f"method: {spec} has several parts, and one is learned at a time; give {' or '.join(parts)}"
            )
        raise KVFoldError(f"method: {method.name} learns nothing beforehand; allowed: {', '.join(learn_something)}")
    for option, value in (("preset", preset), ("encoder", encoder)):
        if value is not None and method.name != "commvq":
            raise KVFoldError(f"{option}: {method.name} has none; allowed: leave it out, or method commvq")
    if not paths:
        raise KVFoldError(f"text: {method.name} is learned from text; give one or more files with --text")
    if isinstance(method, SQuat):
        _subspace(method, model, device, paths, tokens, out, force)
        return
    if method.artefact:
        raise KVFoldError(
            f"method: artefact={method.artefact} is what calibrate makes; leave it out, and name it with --out"
        )
    target = expanded(out)
    check_name(out, "out")
    try:
        usable = dataclasses.replace(method, artefact=str(target))
    except KVFoldError as error:
        raise KVFoldError(f"out: {error}") from None
    check_target(target, force)
    texts = [load_text(path) for path in paths]

    from kvfold.calibration.commvq_schedule import ENCODERS, PRESETS
    from kvfold.calibration.run import calibrate as learn
    from kvfold.models import load

    if preset is not None and preset not in PRESETS:
        raise KVFoldError(f"preset: {preset!r} is not known; allowed: {', '.join(PRESETS)}")
    if encoder is not None and encoder not in ENCODERS:
        raise KVFoldError(f"encoder: {encoder!r} is not known; allowed: {', '.join(ENCODERS)}")
    loaded, tokenizer, info = load(model, None, device)
    progress = _Progress()
    result = learn(
        loaded,
        tokenizer,
        info.name,
        method,
        texts,
        tokens,
        target,
        preset=preset or "fast",
        encoder=encoder,
        seed=seed,
        force=force,
        on_layer=progress.layer,
        on_window=progress.window,
    )
    click.echo(f"held-out errors, mean over layers: {errors_text(result.mean_errors())}")
    click.echo(f"written: {target} ({result.nbytes / 1e6:.1f} MB); use it with --method {shlex.quote(str(usable))}")


def _subspace(
    method: SQuat, model: str | None, device: str | None, paths: tuple[str, ...], tokens: int, out: str, force: bool
) -> None:
    """SQuat's, for a server: ``kvfold.fold`` follows a sequence's queries itself."""
    from kvfold.artefact import check_target
    from kvfold.calibration.subspace import calibrate as look
    from kvfold.engines.vllm.subspace import FIELD
    from kvfold.evaluation.text import load_text
    from kvfold.models import load

    target = expanded(out)
    check_name(out, "out")
    check_target(target, force)
    texts = [load_text(path) for path in paths]
    loaded, tokenizer, info = load(model, None, device)
    result = look(loaded, tokenizer, info.name, method, texts, tokens, target, force=force)
    click.echo(
        f'written: {target} ({result.nbytes / 1e6:.1f} MB); use it in vLLM: {{"kvfold": "squat", "{FIELD}": "{target}"}}'
    )


def _profile(
    method: Method, model: str | None, device: str | None, paths: tuple[str, ...], out: str, force: bool
) -> None:
    """What a budget is spread by."""
    from rich.progress import MofNCompleteColumn

    from kvfold.artefact import check_target, load
    from kvfold.commands.terminal import progress_bar
    from kvfold.engines.transformers.profiles import measure
    from kvfold.methods.profile import recipe
    from kvfold.models import load as load_model

    if paths:
        raise KVFoldError("text: a profile is measured on prompts that are built in; leave --text out")
    if getattr(method, "artefact", ""):
        raise KVFoldError(f"method: {method} names what calibrate makes; leave artefact= out, and name it with --out")
    target = expanded(out)
    check_name(out, "out")
    usable = dataclasses.replace(method, artefact=str(target))  # type: ignore[call-arg]  # what spreads has one
    check_target(target, force)
    loaded, tokenizer, _ = load_model(model, None, device)
    with progress_bar(MofNCompleteColumn()) as bar:
        task = bar.add_task("measuring", total=None)
        measure(
            loaded,
            tokenizer,
            method,
            target,
            lambda done, count, what: bar.update(task, total=count, completed=done, description=what),
        )
    made = load(target)
    click.echo(f"bits by layer of {method}: {recipe(method, made)}")
    click.echo(f"written: {target} ({made.nbytes / 1e3:.0f} kB); use it with --method {shlex.quote(str(usable))}")


class _Progress:
    """A line per layer on standard error, with the time that is left."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def window(self, done: int, count: int) -> None:
        """A line per eighth of the backward passes."""
        if done == count or done % max(1, count // 8) == 0:
            print(f"gradients: {done}/{count} windows", file=sys.stderr, flush=True)

    def layer(self, done: LayerDone) -> None:
        if done.seconds:
            self.seconds.append(done.seconds)
            left = (done.num_layers - done.layer_idx - 1) * sum(self.seconds) / len(self.seconds)
            time = f"{done.seconds:.0f} s, {left / 60:.0f} min left"
        else:
            time = "taken over from an earlier run"
        errors = errors_text(done.errors) if done.errors else "kept in full precision"
        print(f"layer {done.layer_idx + 1}/{done.num_layers}: {errors}  ({time})", file=sys.stderr, flush=True)

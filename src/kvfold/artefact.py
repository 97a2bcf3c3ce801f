"""Learned codebooks as a file that can be published: safetensors, with who, what and how well in its metadata.

The metadata is one JSON text under the key ``kvfold``; a checksum covers it and every tensor, so that a file which was cut
short or changed is refused. Nothing in a file is ever executed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from kvfold import files
from kvfold.arithmetic import lasting
from kvfold.errors import KVFoldError

SCHEMA = 2
"""2: ``weights_hash``."""
FILE_NAME = "kvfold.safetensors"
"""The file's name in a folder or hub repository."""

KEY = "kvfold"

CONFIG_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "layer_types",
    "sliding_window",
    "attention_bias",
)
"""What of a model's configuration shapes its keys and values."""


class ArtefactError(KVFoldError):
    """An artefact that cannot be found or read, is damaged, or is for something else."""


def config_hash(config: Any) -> str:
    """SHA-256 of what of a model's configuration shapes its keys and values, hexadecimal.

    Names, paths, dtypes and library versions do not enter, so a copied or re-saved model keeps its hash.
    """
    text = config.get_text_config(decoder=True)
    kept = {name: getattr(text, name, None) for name in CONFIG_FIELDS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


SAMPLE = 1024
"""Elements of a parameter that :func:`weights_hash` reads."""


def weights_hash(model: torch.nn.Module) -> str:
    """SHA-256 of up to 1,024 elements, evenly spread, of every parameter of a model, hexadecimal.

    They are rounded to bfloat16 first, so that a model loaded in float32 has the hash it has in bfloat16.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        some = parameter.detach().flatten()
        some = some[:: max(1, -(-len(some) // SAMPLE))].to(torch.bfloat16).cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Artefact:
    """A learned method for one model.

    Attributes
    ----------
    model : str
        As the user named it.
    config_hash : str
        See :func:`config_hash`.
    method : str
        Spec of the method that reads it, without the artefact's place.
    shape : dict
        What has to agree with model and method: ``num_layers``, ``num_kv_heads``, ``head_dim``, ``rotary_dim``,
        ``no_rope_layers``, ``k_bits``, ``v_bits``, ``levels``, ``joint``.
    calibration : dict
        Texts (name, SHA-256), tokens, held-out tokens, window, preset, schedule, seed; where it matters, positions that keys
        were taken to lie at.
    errors : dict
        Layer index as text -> held-out errors by name.
    versions : dict
        Of kvfold, torch, transformers.
    created : str
        ISO 8601, UTC.
    tensors : dict
        ``layers.<index>.key.<name>`` and ``layers.<index>.value.<name>``.
    weights_hash : str
        See :func:`weights_hash`; empty in files of schema 1.
    """

    model: str
    config_hash: str
    method: str
    shape: dict[str, Any]
    calibration: dict[str, Any]
    errors: dict[str, dict[str, float]]
    versions: dict[str, str]
    created: str
    tensors: dict[str, torch.Tensor]
    weights_hash: str = ""

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """A layer's tensors; empty if the layer was not calibrated."""
        start = f"layers.{index}."
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}

    def mean_errors(self) -> dict[str, float]:
        """Held-out errors, averaged over layers."""
        names = sorted({name for row in self.errors.values() for name in row})
        return {n: sum(row.get(n, 0.0) for row in self.errors.values()) / max(1, len(self.errors)) for n in names}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    def check_model(self, config: Any) -> None:
        """Refuse another model.

        Raises
        ------
        ArtefactError
            If the configuration's hash differs.
        """
        if config_hash(config) != self.config_hash:
            raise ArtefactError(
                f"artefact: it was made for {self.model}, and this model's configuration differs "
                f"({config_hash(config)[:12]} instead of {self.config_hash[:12]}); calibrate this model"
            )

    def check_weights(self, model: torch.nn.Module) -> bool:
        """Refuse other weights; whether there was a hash to compare with.

        Raises
        ------
        ArtefactError
            If the weights' hash differs.
        """
        found = weights_hash(model) if self.weights_hash else ""
        if found != self.weights_hash:
            raise ArtefactError(
                f"artefact: it was made for {self.model}, and this model has the same configuration but other weights "
                f"({found[:12]} instead of {self.weights_hash[:12]}); calibrate this model"
            )
        return bool(self.weights_hash)

    def metadata(self) -> dict[str, Any]:
        """Everything but the tensors, and the checksum of all."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "tensors"}
        fields = {"schema": SCHEMA, **fields}
        return {**fields, "sha256": checksum(fields, self.tensors)}


def checksum(fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of metadata and tensors, hexadecimal."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name in sorted(tensors):
        t = tensors[name].contiguous()
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(artefact: Artefact, path: Path) -> None:
    """Write a file in one step.

    Raises
    ------
    ArtefactError
        If it cannot be written.
    """
    tensors = {key: t.contiguous() for key, t in artefact.tensors.items()}
    metadata = {KEY: json.dumps(artefact.metadata(), sort_keys=True)}
    try:
        files.write(path, lambda name: save_file(tensors, name, metadata=metadata))
    except (OSError, safetensors.SafetensorError) as error:
        raise ArtefactError(f"artefact: cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def check_target(path: Path, force: bool = False) -> None:
    """Refuse a path that an artefact cannot be written to, or where a file is that nobody asked to replace.

    Raises
    ------
    ArtefactError
        If it is a folder or device, nothing can be written there, or it exists and ``force`` is false.
    """
    try:
        files.check(path, "out")
    except KVFoldError as error:
        raise ArtefactError(str(error)) from None
    if files.is_stream(path):
        raise ArtefactError(f"out: {path} is a device or pipe, and an artefact is read again; give a file name")
    if not path.exists() or force:
        return
    try:
        found = read(path)
        what = f"{found.method} for {found.model}"
    except ArtefactError:
        what = "not a sound artefact"
    raise ArtefactError(f"out: {path} exists ({what}); allowed: another name, or --force (force=True) to replace it")


def read_checked(
    path: Path, key: str, newest: int, what: str, made: str, remedy: str, error: type[KVFoldError]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Metadata and tensors of a safetensors file of kvfold's that is whole; artefacts and saved caches are such files.

    Parameters
    ----------
    path
    key
        Entry of the metadata that holds the fields as JSON.
    newest
        Schema that is read, as are earlier ones.
    what, made, remedy
        For messages: what the file is, what writes such files, what helps against a newer schema.
    error
        What is raised.

    Raises
    ------
    KVFoldError
        If it is missing, of another kind, of a newer schema, cut short, or changed.
    """
    if not path.is_file():
        raise error(f"{what}: there is no file {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(key)
            if text is None:
                raise error(f"{what}: {path} is a safetensors file, but not one that {made}")
            fields = json.loads(text)
            schema = fields.get("schema") if isinstance(fields, dict) else None
            if not isinstance(schema, int):
                raise error(f"{what}: {path} is damaged: its metadata has no schema version")
            if schema > newest:
                raise error(
                    f"{what}: {path} has schema {schema}, and this version of kvfold reads up to {newest}; {remedy}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except error:
        raise
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError) as cause:
        raise error(f"{what}: {path} is cut short or not a safetensors file ({first_line(cause)})") from cause
    if fields.pop("sha256", None) != checksum(fields, tensors):
        raise error(f"{what}: {path} is damaged or was changed: its checksum does not agree")
    return fields, tensors


def first_line(error: BaseException) -> str:
    """Of an error's message; of none, the error's name."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def read(path: Path) -> Artefact:
    """Read and verify a file.

    Raises
    ------
    ArtefactError
        If it is missing, not an artefact, of a newer schema, cut short, or changed.
    """
    fields, tensors = read_checked(
        path, KEY, SCHEMA, "artefact", "kvfold calibrate wrote", "upgrade kvfold", ArtefactError
    )
    schema = fields.pop("schema")
    names = {f.name for f in dataclasses.fields(Artefact)} - {"tensors"}
    if schema < 2:
        names.remove("weights_hash")
    if set(fields) != names:
        raise ArtefactError(f"artefact: {path}: fields {sorted(set(fields) ^ names)} are missing or unknown")
    return Artefact(**fields, tensors=tensors)


def resolve(location: str) -> Path:
    """The file behind a location: a file, a folder that holds ``kvfold.safetensors``, or a hub id.

    A hub id is ``owner/name``, or ``owner/name/FILE.safetensors`` for another file of the repository; ``@revision`` may
    follow the name.

    Raises
    ------
    ArtefactError
        If there is nothing there, or the hub does not give it.
    """
    path = files.expanded(location)
    if path.is_file():
        return path
    if path.is_dir():
        if (path / FILE_NAME).is_file():
            return path / FILE_NAME
        raise ArtefactError(f"artefact: the folder {location} holds no {FILE_NAME}")
    parts = location.split("/")
    if path.is_absolute() or location.startswith((".", "~")) or len(parts) < 2 or not all(parts):
        raise ArtefactError(f"artefact: there is no file, folder or hub id {location}")
    name, _, revision = parts[1].partition("@")
    from huggingface_hub import hf_hub_download

    try:
        file = "/".join(parts[2:]) or FILE_NAME
        return Path(hf_hub_download(f"{parts[0]}/{name}", file, revision=revision or None, etag_timeout=10))
    except Exception as error:  # the hub's errors have many types
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArtefactError(
            f"artefact: {location} is not a local file or folder, and the hub did not give it ({first})"
        ) from error


def load(location: str | Path) -> Artefact:
    """Find, read and verify an artefact; see :func:`resolve` and :func:`read`."""
    return read(resolve(str(location)))


def load_cached(location: str) -> Artefact:
    """:func:`load`, once per content of a local file and once per process for a hub id."""
    path = files.expanded(location)
    path = path / FILE_NAME if path.is_dir() else path
    stamp = (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else (0, 0)
    return _load_cached(location, stamp)


@lasting(16)
def _load_cached(location: str, stamp: tuple[int, int]) -> Artefact:
    return load(location)


def push(path: Path, target: str, token: str | None = None) -> str:
    """Publish a verified file: copy it to a local folder, or upload it to a hub repository.

    Parameters
    ----------
    path : Path
    target : str
        An existing folder, or a hub id ``owner/name``; the repository is made if it does not exist.

    Returns
    -------
    str
        The location that :func:`load` takes.

    Raises
    ------
    ArtefactError
        If the file does not verify or the hub refuses.
    """
    read(path)
    folder = files.expanded(target)
    if folder.is_dir():
        try:
            files.write(folder / FILE_NAME, lambda name: shutil.copyfile(path, name))
        except OSError as error:
            raise ArtefactError(f"artefact: cannot write in {folder}: {error.strerror or error}") from error
        return str(folder)
    if folder.is_absolute() or target.startswith((".", "~")) or target.count("/") != 1:
        raise ArtefactError(f"artefact: {target} is neither an existing folder nor a hub id (owner/name)")
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=token)
        api.create_repo(target, exist_ok=True)
        api.upload_file(path_or_fileobj=str(path), path_in_repo=FILE_NAME, repo_id=target)
    except Exception as error:  # the hub's errors have many types
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArtefactError(f"artefact: the hub did not take {target} ({first})") from error
    return target

"""SQuat's update from a calibrated subspace: the same for all requests."""

import torch

from kvfold.artefact import load_cached
from kvfold.errors import KVFoldError
from kvfold.methods import LayerSpec, Method
from kvfold.methods.squat import SQuat, penalty_of, update_matrix

FIELD = "kvfold_subspace"
HOW = (
    f"calibrate its subspace with 'kvfold calibrate --method squat --text FILE --out FILE.safetensors' and give it beside the "
    f'method: {{"kvfold": "squat", "{FIELD}": "FILE.safetensors"}}'
)


def steers(method: Method) -> SQuat | None:
    """The part of a method that steers its keys, if there is one."""
    keys = getattr(method, "keys", method)  # of a pair
    return keys if isinstance(keys, SQuat) else None


def update_of(location: str, method: Method, spec: LayerSpec) -> torch.Tensor | None:
    """What the error of each slice of channels adds to those after it, float32 [num_kv_heads, d - width, d - width].

    Parameters
    ----------
    location : str
        The artefact; empty where there is none.

    Returns
    -------
    Tensor or None
        None for methods that steer nothing.

    Raises
    ------
    KVFoldError
        If the artefact is for something else.
    """
    squat = steers(method)
    if squat is None:
        return None
    found = load_cached(location)
    expected = {"num_layers": spec.num_layers, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    for name, value in expected.items():
        if found.shape.get(name) != value:
            raise KVFoldError(
                f"{FIELD}={location}: it is for {name}={found.shape.get(name)}, and the model has {value}"
            )
    moment = found.layer(spec.layer_idx).get("key.moment")
    if moment is None:
        raise KVFoldError(f"{FIELD}={location}: it has no queries of layer {spec.layer_idx}; {HOW}")
    return update_matrix(penalty_of(moment.double(), squat.rank, squat.lam, True), squat.slice_width(spec.head_dim))

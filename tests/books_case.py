"""Small artefacts of CommVQ, VQLLM, TaSQ and NOVA-KV with tables that suit normal vectors, and what layers store with them."""

import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from kvfold import methods
from kvfold.artefact import Artefact, config_hash, save
from kvfold.calibration.commvq_values import fit_codebook, scalar_encoder
from kvfold.engines.vllm.settings import stored
from kvfold.methods import LayerSpec
from kvfold.methods.commvq import CommVQ, ValueCodebook
from kvfold.methods.learned import LearnedMethod
from kvfold.methods.nova import ByteCodes
from kvfold.rope import Rope

TOKENS = 512


def key_tables(draw, heads, stages, levels, dim):
    """Centres that get smaller from stage to stage, and a metric that commutes with i."""
    centres = torch.randn(heads, stages, levels, dim, generator=draw) * 0.8 ** torch.arange(stages).view(-1, 1, 1)
    real, imaginary = (0.1 * torch.randn(heads, dim // 2, dim // 2, generator=draw) / dim**0.5 for _ in "ri")
    real = real + torch.eye(dim // 2)
    metric = torch.cat((torch.cat((real, imaginary), -1), torch.cat((-imaginary, real), -1)), -2)
    return {"centres": centres.half(), "metric": metric.half()}


def value_tables(draw, heads, codes, dim, network):
    """Codes of principal components, or of the paper's network, and a codebook fitted to them."""
    metric = torch.eye(dim) + 0.1 * torch.randn(heads, dim, dim, generator=draw) / dim**0.5
    values = torch.randn(heads, TOKENS, dim, generator=draw) @ metric
    if network:
        width = 4 * dim
        encoder = {
            "w1": torch.randn(heads, dim, width, generator=draw) / dim**0.5,
            "b1": torch.randn(heads, width, generator=draw),
        }
        encoder["w2"] = torch.randn(heads, width, codes, generator=draw) / width**0.5
        encoder["b2"] = 0.1 * torch.randn(heads, codes, generator=draw)
    else:
        encoder = scalar_encoder(values, torch.ones(heads, TOKENS), codes)
    held = {"codebook": torch.zeros(heads, codes, dim), "offset": torch.zeros(heads, dim), "metric": metric.half()}
    book = ValueCodebook(held | encoder)
    codebook, offset = fit_codebook(values, book.first_bits(values), torch.ones(heads, TOKENS))
    back = torch.linalg.inv(metric)
    return held | encoder | {"codebook": (codebook @ back).half(), "offset": (offset.unsqueeze(1) @ back)[:, 0].half()}


def map_tables(draw, heads, dim):
    """A mean, and a map that is far from orthogonal, with its inverse."""
    apply = torch.eye(dim) + 0.5 * torch.randn(heads, dim, dim, generator=draw) / dim**0.5
    apply = apply * torch.exp(0.3 * torch.randn(heads, 1, dim, generator=draw))
    return {"mean": torch.randn(heads, dim, generator=draw), "map": apply, "inverse": torch.linalg.inv(apply)}


def tables(method, draw, heads, dim, network=False):
    """One layer's, by name."""
    if isinstance(method, CommVQ):
        sides = {
            "key": key_tables(draw, heads, method.stages(dim), method.levels, dim),
            "value": value_tables(draw, heads, method.value_codes(dim), dim, network),
        }
    elif isinstance(method, ByteCodes):
        sides = {
            side: {
                "codes": torch.randn(heads, dim * bits // 8, 256, 8 // bits, generator=draw).half(),
                **({"mean": torch.randn(heads, dim, generator=draw).half()} if method.centres(side) else {}),
            }
            for side, bits in (("key", method.key_bits), ("value", method.value_bits))
        }
        if method.maps_keys:
            sides["key"] |= map_tables(draw, heads, dim)
    else:
        sides = {
            side: {
                "codes": (
                    torch.randn(method.stages(bits), method.codes, method.vector, generator=draw)
                    * 0.8 ** torch.arange(method.stages(bits)).view(-1, 1, 1)
                ).half()
            }
            for side, bits in (("key", method.key_bits), ("value", method.value_bits))
        }
    return {f"{side}.{name}": t for side, found in sides.items() for name, t in found.items()}


def artefact(spec, path, heads, dim, layers=1, rotary=None, config=None, network=False, seed=0):
    """Write an artefact for a method given by its string, and return the string with it."""
    method = methods.get(spec)
    draw = torch.Generator().manual_seed(seed)
    held = {}
    for layer in range(layers):
        made = tables(method, draw, heads, dim, network)
        held |= {f"layers.{layer}.{name}": t for name, t in made.items()}
    shape = {"num_layers": layers, "num_kv_heads": heads, "head_dim": dim, "rotary_dim": rotary or dim}
    shape |= method.learned_shape()
    whole = Artefact("small", config_hash(config) if config else "", spec, shape, {}, {}, {}, "", held)
    save(whole, path)
    return f"{spec}{',' if ':' in spec else ':'}artefact={path}"


@lru_cache(maxsize=16)
def layer(spec, dim=64, heads=2, per_head=2, rotary=None, network=False, dtype=torch.float32, device="cpu"):
    """A layer's formats and maps (:class:`kvfold.engines.vllm.settings.Stored`); of ``KEYS + VALUES``, those of two.
    What nothing is learned of is packed for tensor cores."""
    if " + " in spec:
        return Sides(*(layer(part, dim, heads, per_head, rotary, network, dtype, device) for part in spec.split(" + ")))
    rotary = rotary or dim
    rope = Rope(10000.0 ** (-torch.arange(0, rotary, 2).float() / rotary))
    path = Path(_folder().name) / f"{len(list(Path(_folder().name).iterdir()))}.safetensors"
    learned = isinstance(methods.get(spec), LearnedMethod)
    method = methods.get(artefact(spec, path, heads, dim, rotary=rotary, network=network) if learned else spec)
    found = stored(method, LayerSpec(0, 1, heads * per_head, heads, dim, dtype, rope, fragments=not learned))
    assert found is not None
    return found


class Sides:
    """Keys as one layer stores them and values as another one does (:class:`kvfold.engines.vllm.settings.Stored`)."""

    def __init__(self, keys, values):
        self.keys, self.values, self.method = keys, values, keys.method
        self.formats = keys.formats[0], values.formats[1]

    def maps(self, device):
        of_keys, of_values = self.keys.maps(device), self.values.maps(device)
        found = {name: of_keys[name] for name in ("rope", "encode_keys") if name in of_keys}
        return found | {name: of_values[name] for name in ("encode_values", "unproject", "bits") if name in of_values}


@lru_cache
def _folder():
    """There until the process ends: methods read their files again."""
    return tempfile.TemporaryDirectory()

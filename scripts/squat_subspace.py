"""Which queries SQuat's subspace may come from in a server: divergence by where it is taken, beside KIVI's.

usage: python scripts/squat_subspace.py MODEL --artefact SUBSPACE --text FILE... [--rows benchmarks/serving/squat-subspace.csv]

A window of a text goes through the model at once. In every layer a token sees what a server's request would see in steps of 64
tokens: the first 32 and the newest 96 tokens raw, others as their pages hold them. Pages are encoded with the subspace of

    calibrated  a text that was read beforehand (``kvfold calibrate --method squat``)
    page        the queries of the page's own 128 tokens
    half        those of its newest 64
    sofar       the queries of all tokens up to the page's end
    sketch      as page, from one vector a token: the sum of its query heads with signs at random
    turn        as page, from one query a token: that of a KV head's query heads in turn
    turnhalf    as half, likewise
    own         the newest 64 before 128, 256, 512, 1,024, 2,048, ... tokens: what kvfold's own caches take

and, as ``kivi``, without one.
"""

import argparse
import csv
import math
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvfold import methods
from kvfold.artefact import load_cached
from kvfold.methods import LayerSpec
from kvfold.methods.base import boundary
from kvfold.methods.squat import SQuat, penalty_of, steer, update_matrix

PAGE, BLOCK, STEP, SKIP = 128, 32, 64, 256
VARIANTS = ("none", "kivi", "own", "calibrated", "page", "half", "sofar", "sketch", "turn", "turnhalf")
ROWS = Path("benchmarks/serving/squat-subspace.csv")
HALF = PAGE // 2


class Folded:
    """An attention that reads tokens as a server's request does.

    Attributes
    ----------
    variant : str
    calibrated : dict
        Moments of the text that was read beforehand, by layer, float64 [num_kv_heads, head_dim, head_dim].
    """

    def __init__(self, calibrated: dict[int, torch.Tensor], layers: int) -> None:
        method = methods.get("squat")
        assert isinstance(method, SQuat)
        self.variant, self.calibrated, self.layers, self.method = "none", calibrated, layers, method

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        layer, scale = int(module.layer_idx), float(more["scaling"])  # type: ignore[arg-type]
        heads, kv_heads, dim, tokens = query.shape[1], key.shape[1], key.shape[3], key.shape[2]
        spec = LayerSpec(layer, self.layers, heads, kv_heads, dim)
        query, key, value = query.float(), key.float(), value.float()
        packed = [key, value]
        if self.variant != "none":
            steered = self.steered(layer, query, key)
            forms = self.method.key_format(spec), self.method.value_format(spec)
            packed = [form.decode(form.encode(x)) for form, x in zip(forms, (steered, value), strict=True)]
        at = torch.arange(tokens, device=key.device)
        until = ((at // STEP * STEP - self.method.recent) // BLOCK * BLOCK).clamp_min(self.method.sink)
        reads_packed = (at >= self.method.sink) & (at < until[:, None])
        out = torch.empty_like(query)
        per = heads // kv_heads
        for head in range(heads):
            of = head // per
            scores = torch.where(reads_packed, query[0, head] @ packed[0][0, of].T, query[0, head] @ key[0, of].T)
            weights = (scores * scale).masked_fill(at > at[:, None], -math.inf).softmax(-1)
            some = weights.masked_fill(~reads_packed, 0.0)
            out[0, head] = some @ packed[1][0, of] + (weights - some) @ value[0, of]
        return out.transpose(1, 2).to(module.q_proj.weight.dtype), None  # type: ignore[union-attr]

    def steered(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Keys as they are to be encoded, float32 [1, num_kv_heads, tokens, head_dim]."""
        if self.variant == "kivi":
            return key
        width = self.method.slice_width(key.shape[3])
        moments = self.moments(layer, query, key.shape[1])
        update = update_matrix(penalty_of(moments, self.method.rank, self.method.lam, True), width)
        return steer(key, update.transpose(0, 1).unsqueeze(0), width, self.method.key_bits, self.method.group)

    def moments(self, layer: int, query: torch.Tensor, kv_heads: int) -> torch.Tensor:
        """Second moments of queries, float64 [pages or blocks, num_kv_heads, head_dim, head_dim]."""
        pages = query.shape[2] // PAGE
        if self.variant == "calibrated":
            return self.calibrated[layer].to(query.device).expand(pages, -1, -1, -1)
        grouped = query[0].double().unflatten(0, (kv_heads, -1))  # [kv_heads, heads of each, tokens, d]
        if self.variant == "sketch":
            draw = torch.Generator().manual_seed(layer)
            signs = torch.randint(0, 2, (grouped.shape[1], grouped.shape[2]), generator=draw) * 2 - 1
            grouped = (grouped * signs.to(grouped)[..., None]).sum(1, keepdim=True)
        if self.variant.startswith("turn"):
            at = torch.arange(grouped.shape[2], device=grouped.device)
            grouped = grouped[:, at % 16 % grouped.shape[1], at].unsqueeze(1)
        halves = grouped.unflatten(2, (-1, HALF)).permute(2, 0, 1, 3, 4).flatten(2, 3)
        each = halves.mT @ halves  # [halves, kv_heads, d, d]
        if self.variant in ("page", "sketch", "turn"):
            return each[0::2] + each[1::2]
        if self.variant in ("half", "turnhalf"):
            return each[1::2]
        if self.variant == "sofar":
            return each.cumsum(0)[1::2]
        ends = torch.arange(BLOCK, query.shape[2] + 1, BLOCK)
        return each[[boundary(max(int(end) + self.method.recent, PAGE)) // HALF - 1 if int(end) + self.method.recent
                     <= query.shape[2] else boundary(query.shape[2]) // HALF - 1 for end in ends]]  # fmt: skip


def divergences(model: PreTrainedModel, folded: Folded, ids: torch.Tensor) -> dict[str, float]:
    """Mean KL divergence from the model's own distribution, in nats, over the tokens from ``SKIP`` on."""
    found, truth = {}, torch.empty(0)
    for variant in VARIANTS:
        folded.variant = variant
        logs = model(ids, use_cache=False).logits[0, SKIP:].float().log_softmax(-1)
        if variant == "none":
            truth = logs
            continue
        each = [(t.exp() * (t - x)).sum(-1) for t, x in zip(truth.split(256), logs.split(256), strict=True)]
        found[variant] = float(torch.cat(each).double().mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--name", help="of the model, in rows (default: the folder's)")
    parser.add_argument("--artefact", required=True, help="of kvfold calibrate --method squat")
    parser.add_argument("--text", nargs="+", required=True, help="UTF-8 files")
    parser.add_argument("--tokens", type=int, default=2048, help="of a window (default: 2048)")
    parser.add_argument("--windows", type=int, default=2, help="of each text, evenly over it (default: 2)")
    parser.add_argument("--rows", type=Path, default=ROWS)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    artefact, layers = load_cached(given.artefact), model.config.num_hidden_layers
    folded = Folded({i: artefact.layer(i)["key.moment"].double() for i in range(layers)}, layers)
    attend: Callable[..., tuple[torch.Tensor, None]] = lambda *a, **k: folded(*a, **k)  # noqa: E731
    AttentionInterface.register("squat_subspace", attend)
    model.set_attn_implementation("squat_subspace")
    for path in map(Path, given.text):
        ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        for window in range(given.windows):
            first = (len(ids) - given.tokens) * window // max(given.windows - 1, 1) if given.windows > 1 else 0
            with torch.inference_mode():
                found = divergences(model, folded, ids[None, first : first + given.tokens].to(device))
            write(given.rows, given.name or Path(given.model).name, path.name, first, given.tokens, found)


def write(rows: Path, model: str, text: str, first: int, tokens: int, found: dict[str, float]) -> None:
    new = not rows.exists()
    with rows.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if new:
            table.writerow(("model", "text", "first", "tokens", "variant", "kl"))
        for variant, kl in found.items():
            table.writerow((model, text, first, tokens, variant, f"{kl:.6g}"))
            print(f"{model} {text} {first:>8} {variant:<10} {kl:.4f} {kl / found['kivi']:.3f}", flush=True)


if __name__ == "__main__":
    main()

"""Tables of studies beside the evidence: small changes to methods at 1 bit."""

import math

from evidence import ROOT, markdown

from kvfold.evaluation.statistics import paired


def one_bit() -> str:
    """What small changes do to fold's fixed codebook at 1 bit."""
    found: dict[str, list[float]] = {}
    for line in (ROOT / "fold-one-bit.csv").read_text(encoding="utf-8").splitlines()[1:]:
        _, variant, _, _, times = line.split(",")
        found.setdefault(variant, []).append(math.log(float(times)))
    lines = []
    for variant, values in sorted(found.items(), key=lambda entry: sum(entry[1])):
        mean = paired(values, [0.0] * len(values), higher_is_better=False)
        assert mean.low is not None and mean.high is not None
        ends = f"{math.exp(mean.mean):.2f} [{math.exp(mean.low):.2f}, {math.exp(mean.high):.2f}]"
        lines.append([variant, ends, str(len(values)), mean.verdict])
    return markdown(["change", "times its KL [95%]", "windows", "verdict"], lines)


def learned_one_bit() -> str:
    """What means, maps and other ways to learn do to TaSQ at 1 bit, by model."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in (ROOT / "learned-one-bit.csv").read_text(encoding="utf-8").splitlines()[1:]:
        model, variant, _, _, times = line.split(",")
        found.setdefault(variant, {}).setdefault(model, []).append(math.log(float(times)))
    models = sorted({model for by_model in found.values() for model in by_model})
    lines = []
    for variant, by_model in sorted(found.items(), key=lambda entry: max(sum(v) / len(v) for v in entry[1].values())):
        cells = []
        for model in models:
            values = by_model[model]
            mean = paired(values, [0.0] * len(values), higher_is_better=False)
            assert mean.low is not None and mean.high is not None
            cells.append(f"{math.exp(mean.mean):.2f} [{math.exp(mean.low):.2f}, {math.exp(mean.high):.2f}]")
        lines.append([variant, *cells, str(min(len(v) for v in by_model.values()))])
    return markdown(["TaSQ with", *models, "windows times lengths"], lines)

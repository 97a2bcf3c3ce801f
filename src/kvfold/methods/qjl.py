"""QJL: one bit per random projection of a key, and its norm (Zandieh et al., 2024, arXiv 2406.03482)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvfold.errors import MethodError
from kvfold.formats import Format, SignSketch, Sketch, SplitSketch
from kvfold.formats.basis import gain
from kvfold.formats.packing import PLANES
from kvfold.methods.base import LayerSpec, Method
from kvfold.methods.options import Numbers, Problem

SKETCH = Numbers(0, 4096, 16)


@dataclass(frozen=True)
class QJL(Method):
    """Keys as ``sign(S k)`` and ``|k|``, read as an unbiased estimate of ``q . k`` (Definition 1); values as in KIVI.

    Parameters
    ----------
    k_bits : int
        Rows of S per channel: m = ``k_bits`` x head_dim.
    normalize : bool
        Divide keys by channel norms per page before the sketch, so that a few large channels do not fill ``|k|``.
    outliers : int
        Channels per KV head, those of largest norm in a page, that get a sketch of their own (sec. 4.1); under
        ``paper=true`` those of the whole first call.
    outlier_sketch : int
        Rows of that sketch; 0: 2 x head_dim.
    early_layers, early_k_bits : int
        The first layers, and their rows per channel.
    seed : int
        Of the projections.
    """

    center: str = "page"
    normalize: bool = True
    outliers: int = 0
    outlier_sketch: int = 0
    early_layers: int = 0
    early_k_bits: int = 3
    seed: int = 0

    name = "qjl"
    summary = "keys as signs of random projections and a norm, values per token"
    source = "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero Overhead (arXiv 2406.03482)"
    url = "https://arxiv.org/abs/2406.03482"
    published = {"sink": 0, "recent": 32, "center": "false", "normalize": False}  # noqa: RUF012
    centers = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.outliers < 0:
            yield Problem("outliers", (0,) if self.normalize else Numbers(0, text="0 to below head_dim"))
        if self.outlier_sketch not in SKETCH:
            yield Problem("outlier_sketch", SKETCH if self.outliers else (0,))
        if self.early_layers < 0:
            yield Problem("early_layers", Numbers(0))
        if self.early_k_bits not in PLANES:
            yield Problem("early_k_bits", tuple(PLANES))
        if self.outliers and self.normalize:
            yield Problem(
                "normalize", (False,), f" is not allowed beside outliers={self.outliers}, which serve the same end"
            )
        if self.outlier_sketch and not self.outliers:
            yield Problem("outlier_sketch", (0,), " has no effect without outliers")
        if self.early_k_bits != type(self).early_k_bits and not self.early_layers:
            yield Problem("early_k_bits", (type(self).early_k_bits,), " has no effect without early_layers")

    def shape_problems(self, spec: LayerSpec) -> Iterator[Problem]:
        if self.outliers >= spec.head_dim:
            yield Problem("outliers", range(spec.head_dim))

    @property
    def kernel_encodes(self) -> bool:
        return True

    def _rows(self, spec: LayerSpec) -> int:
        return (self.early_k_bits if spec.layer_idx < self.early_layers else self.key_bits) * spec.head_dim

    def key_format(self, spec: LayerSpec) -> Format:
        d, rows, operand = spec.head_dim, self._rows(spec), spec.operand("key")
        if d % 16:
            raise MethodError(f"{self.name}: head_dim={d} is not a multiple of 16")
        if self.outliers:
            with self.refusing():
                split = (rows, self.outlier_sketch or 2 * d)
                return SplitSketch(
                    d,
                    self.block,
                    operand,
                    split,
                    self.outliers,
                    self.centered,
                    self.seed,
                    page=self.page,
                    seen=self.seen,
                )
        signs = SignSketch(d, self.block, operand, (rows,), (gain(d) / rows,))
        return self.paged(signs, self.centered, "rms" if self.normalize else "", Sketch(d, rows, self.seed))

    def value_format(self, spec: LayerSpec) -> Format:
        return self.affine(spec, "value", axis="channel")

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        form = self.key_format(spec)
        if isinstance(form, SplitSketch):
            tables = form.tables(device)
        else:
            tables = Sketch(spec.head_dim, self._rows(spec), self.seed).tables(device)
        return {f"key.{name}": t for name, t in tables.items()}

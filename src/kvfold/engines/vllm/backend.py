"""The attention backend: what vLLM asks of one, and one layer's step."""

import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvfold.engines.vllm import refusals, report, rotation, subspace
from kvfold.engines.vllm.settings import PAGE, WINDOW_BLOCK, Stored, kept, layer_spec, method_of, stored, subspace_of
from kvfold.engines.vllm.spec import RecentSpec
from kvfold.engines.vllm.step import Batch, Bench, Layer, Step, run
from kvfold.engines.vllm.warming import try_to_warm
from kvfold.kernels.paged import Workspace
from kvfold.kernels.paged.long import PIECE
from kvfold.kernels.paged.work import PAGES
from kvfold.rope import Rope

MOST_CACHED = 1 << 22
"""Tokens of all sequences of a step that attention's pieces are planned for; beyond, pieces are longer."""
INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's environment variable: ``1`` asks for results that do not depend on the batch."""


@dataclass
class StepMetadata(AttentionMetadata):
    """A step, as vLLM describes it to the layers of one cache group.

    Attributes
    ----------
    block_table : Tensor, int32 [seqs, width]
    query_start, seq_lens : Tensor, int32 [seqs + 1], [seqs]
        On the device.
    max_query_len : int
    batch : Batch
        Which of the sequences decode.
    steps : dict
        What layers share whose windows share a table (vLLM may cut the windows into several groups); the first makes it.
    """

    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    batch: Batch
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)


class MetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Hands on what vLLM knows; a graph replays it with the same tensors."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        common = common_attn_metadata
        starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound  # exact for prompts
        short = 1 + refusals.drafts(self.vllm_config)
        if common.max_query_len <= short:
            batch = Batch(common.seq_lens.shape[0], common.max_query_len)
        else:
            batch = Batch.of(starts.tolist(), (common.seq_lens if lengths is None else lengths).tolist(), short)
        return StepMetadata(
            common.block_table_tensor, common.query_start_loc, common.seq_lens, common.max_query_len, batch
        )


class _Backend(AttentionBackend):
    """What packed pages and windows have in common."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # a name that vLLM's list of backends has

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_impl_cls() -> "type[FoldedImpl]":
        return FoldedImpl

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The bytes of a block and head lie side by side, and blocks of groups may differ in how they are cut."""
        return (KVCacheLayout.BLHNC,)


class FoldedBackend(_Backend):
    """vLLM's ``CUSTOM`` backend: pages of 128 tokens."""

    page_bytes: ClassVar[int] = 0
    """Of one KV head; layers that store alike share a subclass with theirs."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if not cls.page_bytes or not isinstance(spec, FullAttentionSpec):
            return spec
        return replace(spec, block_size=PAGE, state_content_bytes=cls.page_bytes // PAGE)

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        return refusals.named(super().validate_configuration(*args, **kwargs))

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class RecentBackend(_Backend):
    """Of the windows' layers, which store but do not attend."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [WINDOW_BLOCK]


_BACKENDS: dict[int, type[FoldedBackend]] = {}


def backend_of(page_bytes: int) -> type[FoldedBackend]:
    """The backend of layers whose pages have this many bytes per head."""
    if page_bytes not in _BACKENDS:
        _BACKENDS[page_bytes] = type(f"FoldedBackend{page_bytes}", (FoldedBackend,), {"page_bytes": page_bytes})
    return _BACKENDS[page_bytes]


class RecentLayer(AttentionLayerBase):
    """The window beside an attention layer: a cache of its own in vLLM's eyes."""

    def __init__(self, spec: RecentSpec) -> None:
        self.spec = spec
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RecentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> RecentSpec:
        return self.spec


def give_back(layer: Any, impl: "FoldedImpl", config: VllmConfig) -> None:
    """Let vLLM's own attention serve a layer that is kept in full precision, on a GPU."""
    selected = AttentionSelectorConfig(impl.head_size, layer.kv_cache_torch_dtype, layer.kv_cache_dtype, PAGE)
    with set_current_vllm_config(config):
        path = current_platform.get_attn_backend_cls(None, attn_selector_config=selected, num_heads=impl.num_heads)
        backend = resolve_obj_by_qualname(path)
        layer.impl = backend.get_impl_cls()(
            impl.num_heads,
            impl.head_size,
            impl.scale,
            impl.num_kv_heads,
            None,
            None,
            impl.kv_cache_dtype,
            None,
            AttentionType.DECODER,
            None,
        )
    layer.attn_backend, layer.backend = backend, AttentionBackendEnum[backend.get_name()]


class FoldedImpl(AttentionImpl[StepMetadata]):
    """One attention layer: writes a step's tokens, packs what they complete, attends."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.config = get_current_vllm_config()
        self.method = method_of(self.config.additional_config, self.config.model_config.hf_config)
        self.subspace = subspace_of(self.config.additional_config)
        refusals.check(self.config, self.method)
        refusals.check_layer(
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            others,
        )
        self.layer: Layer | None = None
        self.window_name = ""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Now the layer has a name: choose its pages, and put its window beside it."""
        layers = self.config.compilation_config.static_forward_context
        name, layer = next((n, found) for n, found in layers.items() if getattr(found, "impl", None) is self)
        total = self.config.model_config.get_total_num_hidden_layers()
        dtype, device = layer.kv_cache_torch_dtype, torch.device(self.config.device_config.device_type)
        self.method.check_layers(total)
        facts = extract_layer_index(name), total, self.num_heads, self.num_kv_heads, self.head_size, dtype
        found = self._stored(facts, device, self._rope(device))
        if found is None:
            give_back(layer, self, self.config)
            return
        recent = self._recent(found, layer)
        report.started(found, recent.window, self.config, refusals.check_kernel(found, device))
        self.window_name = f"{name}.recent"
        layer.attn_backend = backend_of(found.page_bytes)
        layers[self.window_name] = RecentLayer(recent)
        self.layer = Layer(found, self.scale, self._bench(device))
        if device.type != "cpu":
            scheduler, length = self.config.scheduler_config, self.config.model_config.max_model_len
            try_to_warm(self.layer, self.num_heads, scheduler.max_num_batched_tokens, length)

    def _rope(self, device: torch.device) -> Rope | None:
        """Where keys are stored before RoPE: how to rotate them. The first layer finds out, for all."""
        if not any(part.pre_rope for part in self.method.parts()):
            return None
        layers = self.config.compilation_config.static_forward_context
        others = (getattr(getattr(layer, "impl", None), "layer", None) for layer in layers.values())
        if (made := next((other.stored.spec.rope for other in others if other is not None), None)) is not None:
            return made
        self.method.check_model(self.config.model_config.hf_config)
        rope = rotation.rope_of_config(self.config.model_config.hf_config)
        rotation.check(rope)
        return replace(rope, inv_freq=rope.inv_freq.to(device))

    def _stored(
        self, facts: tuple[int, int, int, int, int, torch.dtype], device: torch.device, rope: Rope | None
    ) -> Stored | None:
        """What the layer of these ``facts`` (those of :func:`layer_spec`, in its order) stores: in the order of tensor cores
        where a kernel reads that, else in the plain one."""
        plain, ordered = layer_spec(*facts, False, rope), layer_spec(*facts, True, rope)
        if device.type == "cpu":
            return stored(self.method, plain, self.subspace) or kept(self.method, plain)
        found = stored(self.method, ordered, self.subspace, device)
        if found is None or found.why_not(device) is None:
            return found
        return stored(self.method, plain, self.subspace, device)

    def _bench(self, device: torch.device) -> Bench | None:
        """What the kernels of all layers write to: the first layer makes it."""
        if device.type == "cpu":
            return None
        config, layers = self.config, self.config.compilation_config.static_forward_context
        others = (getattr(getattr(layer, "impl", None), "layer", None) for layer in layers.values())
        if (made := next((other.bench for other in others if other is not None), None)) is not None:
            return made
        scheduler, length = config.scheduler_config, config.model_config.max_model_len
        workspace = Workspace.make(
            max_seqs=max(scheduler.max_num_seqs, config.compilation_config.max_cudagraph_capture_size or 0),
            max_tokens=scheduler.max_num_batched_tokens,
            max_len=length,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            device=device,
            piece_pages=PAGES if os.environ.get(INVARIANT) == "1" else None,
            cached_tokens=min(scheduler.max_num_seqs * length, MOST_CACHED),
            short=1 + refusals.drafts(config),
            update_size=self.num_kv_heads * (self.head_size // 2) ** 2 if self._follows else 0,
        )
        return Bench(workspace)

    @property
    def _follows(self) -> bool:
        """Whether pages of some layers follow their own queries."""
        count = self.config.model_config.get_total_num_hidden_layers()
        methods = filter(None, map(self.method.at, range(count)))
        return not self.subspace and any(subspace.steers(own) is not None for own in methods)

    def _recent(self, found: Stored, layer: Any) -> RecentSpec:
        method = found.method
        return RecentSpec(
            block_size=WINDOW_BLOCK,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=layer.kv_cache_torch_dtype,
            sliding_window=method.recent + PAGE,
            recent=method.recent,
            sink=method.sink,
            drafts=refusals.drafts(self.config),
            state_content_bytes=3 * self.head_size * layer.kv_cache_torch_dtype.itemsize if self._follows else None,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's tokens ``[tokens, heads, head_dim]``, into ``output``. Profiling runs have no metadata."""
        if attn_metadata is None:
            self._reserve(query)
            return output.zero_()
        assert self.layer is not None
        context = get_forward_context()
        windows = context.no_compile_layers[self.window_name]
        self.layer.bind(kv_cache, windows.kv_cache)
        run(self.layer, self._step(attn_metadata, context.attn_metadata[self.window_name]), query, key, value, output)
        return output

    def _reserve(self, query: torch.Tensor) -> None:
        """Take for a moment what a chunk's unpacked pieces take, so that vLLM leaves room for them."""
        if query.is_cuda:
            torch.empty(8, PIECE, self.num_kv_heads, self.head_size, dtype=torch.float32, device=query.device)

    def _step(self, packed: StepMetadata, window: StepMetadata) -> Step:
        assert self.layer is not None
        key = id(window), self.layer.seen
        if key not in packed.steps:
            method = self.layer.stored.method
            packed.steps[key] = Step.of(method, packed, window.block_table, WINDOW_BLOCK, self.layer)
        return packed.steps[key]

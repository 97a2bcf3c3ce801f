"""What a method is: a frozen dataclass whose fields are its options, and four maps from keys and queries to formats."""

import copy
import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from kvfold.errors import MethodError
from kvfold.formats import PAGE, AffineGroups, Basis, Fields, Format, Paged, PagedFormat
from kvfold.formats.binary import BitSearch
from kvfold.formats.packing import PLANES, UNIT
from kvfold.methods.eigenpairs import Eigh
from kvfold.methods.options import SEEDS, Numbers, Problem, kinds, listed, misfit, shown
from kvfold.rope import Rope

State = dict[str, torch.Tensor]
"""What a method's encoder knows of a sequence, by name, each ``[batch, num_kv_heads, ...]``; for blocks that have states of
their own, ``[batch, num_kv_heads, blocks, ...]``. Decoding never reads it."""


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """What a method may know of the attention layer it serves.

    Parameters
    ----------
    layer_idx, num_layers : int
    num_heads, num_kv_heads, head_dim : int
    dtype : torch.dtype
        Of the model's keys and values.
    rope : Rope or None
        The layer's rotation; None where the layer has none, or where the method does not need it.
    fragments : bool
        Whether codes are packed for tensor cores; if not, in plain order, as a CPU reads them.
    softcap : float or None
        Limit of the layer's scores: ``softcap * tanh(score / softcap)`` goes into its softmax.
    """

    layer_idx: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    rope: Rope | None = None
    fragments: bool = True
    softcap: float | None = None

    def operand(self, side: str) -> str:
        """Packing of the keys' ("key") or values' ("value") codes on this layer's device."""
        return side if self.fragments else "plain"


WINDOWS = Numbers(0, 1 << 20)
"""Tokens that windows may hold: beyond, nothing would ever be packed."""
GROUPS = (16, *range(32, 1025, 32))
SEED = Numbers(0, SEEDS)
STORED_AS = {"block": "group", "count": "outliers", "salient": "ratio", "sketch": "outlier_sketch"}
"""Names that formats have for what an option decides."""

PIECE = 4096
"""Tokens of which there are float32 copies at a time, where all of a prompt's are gone through."""


def finite(x: torch.Tensor) -> torch.Tensor:
    """Float32, within +-1e18: beyond what any format stores, and small enough that norms and means stay finite."""
    return x.float().clamp(-1e18, 1e18)


@dataclass(frozen=True)
class Observation:
    """Queries, from which a method computes what its encoder needs: a window of them for each state.

    Parameters
    ----------
    model_queries : Tensor [states, num_heads, tokens, head_dim]
        In the model's dtype, after RoPE.
    positions : Tensor, int64 [states, tokens]
    """

    model_queries: torch.Tensor
    positions: torch.Tensor

    @property
    def eigh(self) -> Eigh | None:
        """A solver that does not wait for the device, where there is one."""
        return None

    @property
    def queries(self) -> torch.Tensor:
        """As a float32 copy."""
        return finite(self.model_queries)

    def gram(self, num_kv_heads: int) -> torch.Tensor:
        """``Q'Q`` of the queries that each KV head serves, float64 [states, num_kv_heads, head_dim, head_dim]."""
        queries = self.queries.unflatten(1, (num_kv_heads, -1)).flatten(2, 3).double()
        return queries.transpose(-1, -2) @ queries


QUERY_WINDOW = 64
"""Newest queries that an encoder's state is made of: 128 or all of the prompt are not better (docs/lessons.md)."""

RENEWED = 1024
"""Tokens after which a state is made anew, once a sequence has as many; before, at powers of two."""


def boundary(tokens: int) -> int:
    """Where the encoder's state was made last when a sequence has ``tokens`` tokens: powers of two, then every 1,024."""
    return tokens // RENEWED * RENEWED if tokens >= RENEWED else 1 << (tokens.bit_length() - 1)


@dataclass(frozen=True)
class Method(ABC):
    """A way to fold keys and values. The fields are its options; every method has the ones below.

    Parameters
    ----------
    bits : {1, 2, 3, 4, 8}
        Bits per code of keys and values.
    k_bits, v_bits : int or None
        Bits of keys and values separately; None: ``bits``.
    sink : int
        First tokens kept in full precision.
    recent : int
        Newest tokens kept in full precision; they are packed in whole blocks once ``recent`` newer ones exist.
    group : int
        Elements that share a scale.
    center : {"page", "false"}
        Subtract the mean of the keys of each page of 128 tokens before they are quantized, and add its product with the query
        to the page's scores: exact, and constant channels (key biases) cost no codes any more.
    paper : bool
        The published method: its windows, no mean where it has none, and its statistics over the sequence's whole first
        call. ``name:paper=true`` sets all options to the paper's that are not given.
    """

    bits: int = 2
    k_bits: int | None = None
    v_bits: int | None = None
    sink: int = 32
    recent: int = 96
    group: int = 32
    center: str = "false"
    paper: bool = False

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    url: ClassVar[str]
    published: ClassVar[dict[str, Any]] = {"sink": 0, "recent": 128}
    """Options of ``paper=true`` that differ from the defaults."""
    bit_widths: ClassVar[tuple[int, ...]] = tuple(PLANES)
    """What ``bits`` may be."""
    centers: ClassVar[bool] = False
    """Whether ``center=page`` is allowed."""
    query_window: ClassVar[int] = 0
    """Newest queries from which :meth:`observe` makes the encoder's state; 0: it needs none."""
    pre_rope: ClassVar[bool] = False
    maps_values: ClassVar[bool] = False
    values_need_keys: ClassVar[bool] = False
    """Whether :meth:`encode_values` needs what :meth:`encode_keys` left in the state, so that it cannot serve values alone."""

    unused: ClassVar[tuple[str, ...]] = ()
    """Options that have no effect on a method, and are refused."""

    def __post_init__(self) -> None:
        allowed = kinds(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (wanted := misfit(value, allowed[field.name])) is not None:
                raise MethodError(f"{self.name}: {field.name}={value!r} is not allowed; it must be {wanted}")
            if field.name in self.unused and value != field.default:
                raise self.without_effect(field.name)
        for problem in self.problems():
            raise self.refusal(problem)

    def problems(self) -> Iterator[Problem]:
        """What is wrong with the options, whatever the model."""
        for field in ("bits", "k_bits", "v_bits"):
            allowed = self.bit_widths if field == "bits" else (None, *PLANES)
            if getattr(self, field) not in allowed:
                yield Problem(field, [bits for bits in allowed if bits is not None])
        for field in ("sink", "recent"):
            if getattr(self, field) not in WINDOWS:
                yield Problem(field, WINDOWS)
        if self.group not in GROUPS:
            yield Problem("group", Numbers(32, GROUPS[-1], 32, f"16 or multiples of 32 up to {GROUPS[-1]}"))
        centers = ("page", "false") if self.centers else ("false",)
        if self.center not in centers:
            why = ": a mean of keys before RoPE shifts scores by position" if self.pre_rope else ""
            yield Problem("center", centers, f" is not allowed{why}")
        if hasattr(self, "seed") and self.seed not in SEED:
            yield Problem("seed", SEED)

    def shape_problems(self, spec: LayerSpec) -> Iterator[Problem]:
        """What of the options does not suit a layer's shape; what formats refuse themselves need not be among it."""
        return iter(())

    def shapes(self, spec: LayerSpec) -> None:
        """Make the layer's formats, to see whether its shape suits them."""
        self.key_format(spec)
        self.value_format(spec)
        self.slice_width(spec.head_dim)

    def check_shape(self, spec: LayerSpec) -> None:
        """Refuse options that do not suit a layer's shape.

        Raises
        ------
        MethodError
            Names the option and the values that suit the shape together with the others, if there are any.
        """
        problem = self._unfit(spec)
        if isinstance(problem, Problem):
            raise self.refusal(problem, spec)
        if problem is not None:
            raise problem
        self.key_format(spec)
        self.value_format(spec)

    def _unfit(self, spec: LayerSpec) -> Problem | MethodError | None:
        """What does not suit a layer's shape: an option, or (an error) the shape itself."""
        for problem in self.shape_problems(spec):
            return problem
        try:
            with self.refusing():
                self.shapes(spec)
        except MethodError as error:
            found = re.match(r"(\w+)=[^: ]*((?::| ).*?)(; allowed.*|$)", error.reason or "")
            field = found and (STORED_AS.get(found[1], found[1]))
            if not found or field not in {f.name for f in dataclasses.fields(self)}:
                return error
            return Problem(str(field), self._candidates(str(field), spec.head_dim), found[2])
        return None

    def _candidates(self, field: str, head_dim: int) -> list[Any]:
        value = getattr(self, field)
        if field == "group":
            return list(GROUPS)
        if isinstance(value, bool):
            return [True, False]
        return list(range(head_dim + 1)) if isinstance(value, int) else []

    def refusal(self, problem: Problem, spec: LayerSpec | None = None) -> MethodError:
        """The error of a problem, with values that are really accepted beside the other options (and by ``spec``)."""
        value, allowed = getattr(self, problem.field), problem.allowed
        text = f"{self.name}: {problem.field}={shown(value)}{problem.why}"
        if isinstance(allowed, Numbers):
            return MethodError(f"{text}; allowed: {allowed}", problem.field, allowed)
        if fits := [v for v in allowed if self._accepts(problem.field, v, spec)]:
            return MethodError(f"{text}; allowed: {listed(fits)}", problem.field, fits)
        for field in dataclasses.fields(self):  # another one may be to blame
            others = [field.default, *PLANES] if field.name.endswith("bits") else [field.default]
            others = [v for v in others if v != getattr(self, field.name)]
            if fits := [v for v in dict.fromkeys(others) if self._accepts(field.name, v, spec)]:
                chosen = ", ".join(f"{field.name}={shown(v)}" for v in fits)
                return MethodError(f"{text}; allowed with another option: {chosen}", field.name, fits)
        return MethodError(f"{text}, and another option does not fit either", problem.field)

    def _accepts(self, field: str, value: Any, spec: LayerSpec | None) -> bool:
        """Whether another value of an option is right. Made without ``__post_init__``, which would ask again."""
        other = copy.copy(self)
        object.__setattr__(other, field, value)
        return next(other.problems(), None) is None and (spec is None or other._unfit(spec) is None)

    @classmethod
    def without_effect(cls, option: str) -> MethodError:
        """The error of an option that does nothing."""
        used = [f.name for f in dataclasses.fields(cls) if f.name not in cls.unused]
        return MethodError(f"{cls.name}: option {option!r} has no effect; allowed: {', '.join(sorted(used))}")

    @classmethod
    def defaults(cls, paper: bool = False) -> dict[str, Any]:
        """Options and their defaults: kvfold's, or those of the published method."""
        own = {f.name: f.default for f in dataclasses.fields(cls)}
        return {**own, **cls.published, "paper": True} if paper else own

    # ---- options -----------------------------------------------------------------------------------------------------

    @property
    def key_bits(self) -> int:
        return self.bits if self.k_bits is None else self.k_bits

    @property
    def value_bits(self) -> int:
        return self.bits if self.v_bits is None else self.v_bits

    @property
    def block(self) -> int:
        """Tokens that are encoded together."""
        return max(UNIT, self.group)

    @property
    def centered(self) -> bool:
        return self.center == "page"

    @property
    def page(self) -> int:
        """Tokens whose statistics are stored together: a page's, or (0) the sequence's, as papers have it."""
        return 0 if self.paper else PAGE

    @property
    def seen(self) -> int:
        """Tokens of a page that its statistics are taken of: those that are there when its first block is closed."""
        return min(PAGE, self.block + self.recent)

    @property
    def kernel_encodes(self) -> bool:
        """Whether ``transform_keys`` is no more than what the state's ``update`` says (or un-rotates, where formats search for
        codes), and values are encoded as they are, so that the encoding kernels can do it."""
        return False

    @property
    def most_probes(self) -> int:
        """Queries of a KV head that the encoder's state holds at most; 0: none."""
        return 0

    def value_tables(self, spec: LayerSpec, device: torch.device) -> Any:
        """What kernels encode a layer's values with beside the format; None where that has all."""
        return None

    def slice_width(self, head_dim: int) -> int | None:
        """Channels of a slice of the state's ``update``; None where there is none."""
        return None

    def group_mode(self, prompt: bool) -> str | None:
        """Mode of the groups of blocks that do, or do not, belong to the sequence's first call; None: the format's."""
        return None

    def __str__(self) -> str:
        """Canonical spec: the name and the options that differ from their defaults."""
        defaults = self.defaults(self.paper)
        options = [
            f"{f.name}={shown(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != defaults[f.name] or (f.name == "paper" and self.paper)
        ]
        return self.name + (":" + ",".join(options) if options else "")

    # ---- methods apart (kvfold.methods.recipe) -----------------------------------------------------------------------

    def at(self, layer_idx: int) -> "Method | None":
        """The method of a layer; None where the layer stays in full precision."""
        return self

    def parts(self) -> Iterator["Method"]:
        """The methods that this one is made of: itself, where it is not made of others."""
        yield self

    def joined(self, values: "Method") -> "Method | None":
        """This method's keys and another's values as one method, where an option of it says the same; None if none does."""
        return None

    @property
    def of_values(self) -> "Method":
        """What stores values: another method, where an option names one."""
        return self

    def mapped(self, change: "Callable[[Method], Method]") -> "Method":
        """The same with every part changed."""
        return change(self)

    @property
    def named(self) -> tuple[int, ...]:
        """Layers with a method of their own."""
        return ()

    @property
    def spreads(self) -> bool:
        """Whether bits are a budget that is spread over a model's layers by its profile (:mod:`kvfold.methods.profile`)."""
        return False

    def with_bits(self, bits: tuple[int, int]) -> "Method":
        """The same with so many bits of keys and of values, by its shortest name."""
        return dataclasses.replace(self, k_bits=bits[0], v_bits=bits[1])

    def check_layers(self, count: int) -> None:
        """Refuse layers that a model of ``count`` layers does not have."""
        return

    # ---- storage -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def key_format(self, spec: LayerSpec) -> Format:
        """Where keys go."""

    @abstractmethod
    def value_format(self, spec: LayerSpec) -> Format:
        """Where values go."""

    def tables(self, spec: LayerSpec, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Constant tensors shared by all sequences of a layer; the same objects where layers share them. Names begin with
        ``key.`` or ``value.`` where only one side reads them."""
        return {}

    def effective_bits(self, head_dim: int = 128, num_layers: int = 32) -> float:
        """Bits per element of the packed part in the limit of long contexts, averaged over layers and K and V."""
        specs = [LayerSpec(i, num_layers, 1, 1, head_dim) for i in range(num_layers)]
        return sum((self.key_format(s).bits + self.value_format(s).bits) / 2 for s in specs) / num_layers

    def check_model(self, config: object) -> None:
        """Refuse a model, given its configuration, that what the method learned is not for; most methods learn nothing."""
        return

    def notes(self, config: object) -> list[str]:
        """What a user should know of the method with a model of this configuration; most have nothing to say."""
        return []

    # ---- maps --------------------------------------------------------------------------------------------------------

    def observe(self, seen: Observation, spec: LayerSpec) -> State:
        """The encoder's state from the newest ``query_window`` queries before a boundary (128, 256, 512, 1,024,
        2,048, 3,072, ... tokens), ``[states, num_kv_heads, ...]``.

        Under ``paper=true`` from the queries of all tokens before the first packing, once.
        """
        return {}

    def transform_keys(
        self, keys: torch.Tensor, state: State, spec: LayerSpec, positions: torch.Tensor
    ) -> torch.Tensor:
        """Keys as the key format is to encode them.

        Parameters
        ----------
        keys : Tensor, float32 [batch, num_kv_heads, tokens, head_dim]
            After RoPE; whole blocks.
        positions : Tensor, int64 [batch, 1, tokens]
        """
        return keys

    def restore_keys(self, stored: torch.Tensor, spec: LayerSpec, positions: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`transform_keys` up to quantization: float32 keys after RoPE."""
        return stored

    def value_map(self, spec: LayerSpec, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """:meth:`unproject_values` of a layer, for values on ``device``; with a matrix for kernels, if there is one."""
        return partial(self.unproject_values, spec=spec)

    def value_search(self, spec: LayerSpec, device: torch.device) -> BitSearch | None:
        """How bits of values are chosen, for kernels that encode them; None where values are not bits."""
        return None

    def unproject_values(self, values: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
        """Decoded values, or sums of them, as values of the model; linear. Override together with ``maps_values``.

        Parameters
        ----------
        values : Tensor, float32 [batch, num_kv_heads, n, value_format.width]

        Returns
        -------
        Tensor, float32 [batch, num_kv_heads, n, head_dim]
        """
        return values

    def encode_keys(
        self,
        keys: torch.Tensor,
        state: State,
        spec: LayerSpec,
        positions: torch.Tensor,
        prompt: bool,
        page: Fields | None = None,
    ) -> Fields:
        """Transform and encode whole blocks; ``prompt`` says whether they belong to the sequence's first call.

        ``page`` has the statistics of the blocks' pages where the format has any. ``state`` is a dict of the caller's own,
        and :meth:`encode_values` gets the same one right afterwards with the values of these tokens: what keys determine for
        values may be left in it.
        """
        return store(self.key_format(spec), self.transform_keys(keys, state, spec, positions), page)

    def encode_values(
        self, values: torch.Tensor, state: State, spec: LayerSpec, prompt: bool, page: Fields | None = None
    ) -> Fields:
        """Encode whole blocks of values, float32 [batch, num_kv_heads, tokens, head_dim]."""
        return store(self.value_format(spec), values, page)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def affine(self, spec: LayerSpec, operand: str, axis: str, mode: str = "asym") -> AffineGroups:
        """An affine format with this method's options; refuses shapes by name.

        Raises
        ------
        MethodError
            If ``head_dim`` does not suit the group size.
        """
        bits = self.key_bits if operand == "key" else self.value_bits
        with self.refusing():
            return AffineGroups(spec.head_dim, self.block, spec.operand(operand), bits, axis, mode, self.group)

    def paged(self, inner: Format, mean: bool, norm: str = "", basis: Basis | None = None) -> Format:
        """``inner`` with statistics per page; ``inner`` itself where there is nothing to add.

        Raises
        ------
        MethodError
            If blocks do not divide pages, or ``head_dim`` does not suit the basis.
        """
        if not mean and not norm and basis is None:
            return inner
        with self.refusing():
            return Paged(
                inner.head_dim, inner.block, inner.operand, inner, mean, norm, basis, page=self.page, seen=self.seen
            )

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Errors of formats as errors of this method's options."""
        try:
            yield
        except MethodError:
            raise
        except ValueError as error:
            raise MethodError(f"{self.name}: {error}", reason=str(error)) from None


def store(form: Format, x: torch.Tensor, page: Fields | None, **how: object) -> Fields:
    """Encode, with the statistics of the blocks' pages where the format has any."""
    return form.encode(x, page, **how) if isinstance(form, PagedFormat) else form.encode(x, **how)

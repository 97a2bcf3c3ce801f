"""The methods, by name. Adding one: a file here, a page in docs/methods/, and a line in ``METHODS`` and ``DEFAULT``."""

from kvfold.methods.base import LayerSpec, Method, Observation, State
from kvfold.methods.commvq import CommVQ
from kvfold.methods.fold import Fold
from kvfold.methods.gear import GEAR
from kvfold.methods.gsrq import GSRQ
from kvfold.methods.innerq import InnerQ
from kvfold.methods.kivi import KIVI
from kvfold.methods.kvarn import KVarN
from kvfold.methods.kvquant import KVQuant
from kvfold.methods.learned import ready
from kvfold.methods.none import NoFolding
from kvfold.methods.nova import NOVA, TaSQ
from kvfold.methods.qjl import QJL
from kvfold.methods.recipe import Pair, Recipe, canonical, get
from kvfold.methods.specs import PRESETS, REGISTRY, options_of
from kvfold.methods.squat import SQuat, SQuatPre
from kvfold.methods.turboquant import TurboQuant
from kvfold.methods.vqllm import VQLLM
from kvfold.methods.zipcache import ZipCache

METHODS: tuple[type[Method], ...] = (
    NoFolding,
    Fold,
    KIVI,
    SQuat,
    SQuatPre,
    InnerQ,
    QJL,
    CommVQ,
    TurboQuant,
    GEAR,
    ZipCache,
    KVarN,
    KVQuant,
    VQLLM,
    GSRQ,
    NOVA,
    TaSQ,
)

REGISTRY.update({method.name: method for method in METHODS})

DEFAULT_METHOD = "fold"
"""What ``kvfold.fold(model)``, ``generate`` and ``explain`` take when no method is named."""

DEFAULT: tuple[str, ...] = (
    "fold",
    "none",
    "fold:bits=2",
    "fold:k_bits=4,v_bits=3",
    "kivi",
    "kivi:bits=4",
    "kivi:bits=1",
    "squat",
    "squat_pre",
    "innerq",
    "innerq:mode=sym",
    "innerq:mode=asym",
    "innerq:mode=hybrid_prefill",
    "qjl",
    "turboquant",
    "turboquant:bits=3",
    "turboquant:bits=3,residual=true",
    "gear",
    "gear:outliers=0.02",
    "zipcache",
    "kvarn",
    "kivi:paper=true",
    "squat:paper=true",
    "squat_pre:paper=true",
    "innerq:paper=true",
    "qjl:paper=true",
    "qjl_outliers",
    "turboquant:paper=true",
    "gear:paper=true",
    "zipcache:paper=true",
)
"""What ``kvfold compare --all`` runs: every method at equal windows, then as published; the tests run over it too."""

FEW: tuple[str, ...] = ("fold", "none", "kivi:k_bits=3,v_bits=2,group=64", "kivi", "kivi:bits=8")
"""What ``kvfold compare`` runs by default: fold, full precision, KIVI with the best split of its 3.00 bits, KIVI as it is
known, and KIVI at 8 bits, as careful as the caches that servers have at 8 bits."""


__all__ = [
    "DEFAULT",
    "DEFAULT_METHOD",
    "FEW",
    "METHODS",
    "PRESETS",
    "REGISTRY",
    "LayerSpec",
    "Method",
    "Observation",
    "Pair",
    "Recipe",
    "State",
    "canonical",
    "get",
    "options_of",
    "ready",
]

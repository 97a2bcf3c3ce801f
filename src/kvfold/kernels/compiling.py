"""Compilation of kernels: said once, and kept apart from what is measured as speed.

Triton compiles a kernel at its first launch and keeps it in a cache on disk. The first process that meets a GPU, a shape or a
version of kvfold so takes seconds where later ones take none. On a CPU, Numba does the same.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

KERNELS = 12
"""Kernels that a method's prompt, its decode steps and a longer call take, about."""

log = logging.getLogger("kvfold")


class Compiling:
    """Listens to Triton's compiler, and is told of Numba's.

    Attributes
    ----------
    seconds : float
        Spent compiling kernels of kvfold and models in this process; kernels that came from the cache count for nothing.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._before: Callable[..., Any] | None = None
        self._listens = self._told = self._told_of_model = self._told_of_cpu = False
        self._depth, self._begun = 0, 0.0

    def listen(self) -> None:
        """Begin, in place of whoever listened before, who is told as well."""
        if self._listens or find_spec("triton") is None:
            return
        from triton import knobs

        self._before, knobs.compilation.listener = knobs.compilation.listener, self
        self._listens = True

    def __call__(self, **about: Any) -> None:
        if self._before is not None:
            self._before(**about)
        module = getattr(getattr(about.get("src"), "fn", None), "__module__", "")
        if about.get("cache_hit") or not str(module).startswith("kvfold."):
            return
        took = about["times"].total / 1e6
        self.seconds += took
        if not self._told:
            self._told = True
            log.warning(
                "kvfold: compiling kernels for this GPU, about %d s; they are cached for the next time",
                max(1, round(took * KERNELS)),
            )

    def begin(self) -> None:
        """Numba compiles a function, perhaps for another one that it compiles; :meth:`end` follows. One thread at a time."""
        if not self._told_of_cpu:
            self._told_of_cpu = True
            log.warning("kvfold: compiling kernels for this CPU, up to 15 s; they are cached for the next time")
        if not self._depth:
            self._begun = time.perf_counter()
        self._depth += 1

    def end(self) -> None:
        """It is done."""
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._begun

    @contextmanager
    def model(self) -> Iterator[None]:
        """``torch.compile`` is given a model within: that is said once, and all of the time counts."""
        if not self._told_of_model:
            self._told_of_model = True
            log.warning(
                "kvfold: compiling the model's layers, about 15 s; what can be cached is, and later processes take less"
            )
        begun, before = time.perf_counter(), self.seconds
        try:
            yield
        finally:
            self.seconds = before + time.perf_counter() - begun  # kernels that were compiled meanwhile are in it


compiling = Compiling()
"""The one of this process."""

"""What launches ask of a device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvfold.arithmetic import lasting


def no_gpu(device: torch.device) -> str | None:
    """Why no kernel of a GPU runs on a device; None if they do."""
    if device.type != "cuda":
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device)[0] < 8:  # asked before a device has properties
        return "needs compute capability 8.0"
    return None


def no_triton(device: torch.device) -> str | None:
    """Why no kernel in plain Triton runs on a device; None if they do."""
    return no_gpu(device) or (None if find_spec("triton") else "triton is not installed")


@dataclass(frozen=True)
class DeviceInfo:
    """What launch shapes depend on.

    Attributes
    ----------
    sms : int
        Multiprocessors; 1 of a CPU, where kernels are interpreted.
    capability : tuple of int
        Compute capability; (0, 0) of a CPU.
    shared_memory, shared_memory_per_sm : int
        Bytes of shared memory that a program may have, and that programs of a multiprocessor share.
    registers : int
        Of a multiprocessor.
    """

    sms: int
    capability: tuple[int, int]
    shared_memory: int
    shared_memory_per_sm: int
    registers: int = 64 * 1024

    @property
    def has_wgmma(self) -> bool:
        """Whether four warps of a program may multiply together, as those of sm_90 and no other do."""
        return self.capability[0] == 9

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel can be launched while the one before it still runs (sm_90 and later)."""
        return self.capability[0] >= 9

    def programs(self, shared: int) -> int:
        """How many programs with so many bytes of shared memory a multiprocessor holds, at least one. Each takes a KB more, and
        one is left."""
        return max(1, (self.shared_memory_per_sm - 1024) // (shared + 1024))

    def threads(self, registers: int) -> int:
        """How many threads with so many registers each a multiprocessor holds, in whole warps."""
        return self.registers // registers // 32 * 32


HOPPER = DeviceInfo(132, (9, 0), 227 * 1024, 228 * 1024)
"""An H100 or H200, for which launch shapes were measured."""
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a program has on every GPU without asking for more."""
LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on every GPU from sm_80 on."""


@lasting()
def device_info(device: torch.device) -> DeviceInfo:
    """What is known of a device."""
    if device.type != "cuda":
        return DeviceInfo(1, (0, 0), 0, HOPPER.shared_memory_per_sm)
    found = torch.cuda.get_device_properties(device)
    most: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceInfo(
        found.multi_processor_count, (found.major, found.minor), most, found.shared_memory_per_multiprocessor
    )


def launching(device: torch.device) -> AbstractContextManager[object]:
    """Within it kernels start on ``device``: Triton launches on the current GPU and its stream, wherever the arguments lie,
    and a model split over several GPUs leaves the first one current. Nothing changes for a CPU, nor where a GPU is only asked
    about."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.is_initialized() else nullcontext()


def settled(table: torch.Tensor) -> torch.Tensor:
    """``table``, when it has been computed; waits for the device, once a table, but not while a graph is captured.

    Kernels that are launched early read tables before they wait for the kernel before them, which may be what makes them.
    """
    if table.is_cuda and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(table.device).synchronize()
    return table


@lasting()
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Aside:
    """Launches beside those of the current stream of a GPU, on another one; elsewhere one after the other. Those of each
    ``number`` have a stream of their own.

    What is launched in :meth:`launches` waits for what was launched before it, and :meth:`wait` lets what comes next wait for
    it. Tensors that are made there and used after have to be named to :meth:`wait`. A block that fails waits as well::

        with Aside(device) as aside:
            with aside.launches():
                ...
            aside.wait(result)
    """

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self._stream = _stream(device, number) if device.type == "cuda" else None
        self._began = False

    def __enter__(self) -> "Aside":
        return self

    def __exit__(self, *exc: object) -> None:
        self.wait()

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Within it the other stream is the current one."""
        if self._stream is None:
            yield
            return
        self._began = True
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, *made: torch.Tensor) -> None:
        """The current stream waits for all launches aside, and uses the tensors ``made`` there."""
        self.meet(*made)
        self._began = False

    def meet(self, *made: torch.Tensor) -> None:
        """As :meth:`wait`, but other streams may come to wait as well; that of the block has to in the end."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        if self._began:
            current.wait_stream(self._stream)
        for tensor in made:
            tensor.record_stream(current)

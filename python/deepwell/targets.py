"""Where a captured graph runs: this CPU, a GPU, or an emulated GPU.

A target makes the tensors and arenas of a run, and passes them to the plan. On a GPU all memory is PyTorch's,
so that ``torch.cuda.memory_allocated`` counts it, and all work goes to PyTorch's current stream; no call waits for it.
An emulated GPU has its own memory: the operands of each run, which are on the CPU, are copied there and back.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ContextManager, Sequence

import torch

from deepwell import _deepwell

if TYPE_CHECKING:
    from deepwell.arena import Lease
    from deepwell.precision import PrecisionPolicy

EMULATED = ("emulator:sm_90a", "emulator:sm_120a")
# The GPUs on which the engine runs any model. "auto" chooses the first alone: the others' kernels have not run on hardware.
ENGINES = ("sm_90a", "sm_120a")
# GPUs that the engine runs a model on if a precision and the target are named: it has not run on them.
BLACKWELL = ("sm_100a", "sm_103a", "emulator:sm_100a", "emulator:sm_103a")

Tensors = Sequence["torch.Tensor | None"]

_NOTHING = contextlib.nullcontext()


class Target:
    """This CPU, and what all targets share."""

    name = "cpu"  # of the engine's device
    kind = "cpu"  # the type of PyTorch's device on which the tensors are
    cuda_graphs = False
    # The most segments of an arena. One on a CPU, where memory that was released costs a page fault per page.
    arena_segments = 1
    # Plans need the address of a tensor to be a multiple of this number of bytes.
    alignment = 1
    # Gradients of fewer bytes lie in one allocation with the others of their part. Larger ones have their own, so that
    # each can be freed alone.
    shared_gradients = 1 << 20
    # A comparison with PyTorch runs calls with more bytes than this on smaller sizes.
    large_call = 64 << 20

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._zero: torch.Tensor | None = None

    def engine(
        self, *arguments: Any, policy: PrecisionPolicy | None, keep_values: bool = False
    ) -> _deepwell.Engine:
        return _deepwell.Engine(
            *arguments,
            policy=None if policy is None else policy._policy,
            device=self.name,
            cuda_graphs=self.cuda_graphs,
            arena_segments=self.arena_segments,
            part_bytes=self.part_bytes(),
            keep_values=keep_values,
        )

    def part_bytes(self) -> int:
        """Returns the bytes of gradients, at least, that a part of backward completes; 0: the engine's default."""
        return 0

    def begin(self) -> None:
        """Called before each run."""
        _use_pytorchs_threads()

    def plan_key(self) -> int:
        """Returns what plans depend on, except for the sizes."""
        return _deepwell.get_threads()

    def tf32(self) -> bool:
        """Returns whether matrix products of F32 operands round these to TF32."""
        return False

    def current(self) -> ContextManager[Any]:
        """Plans are made and run while this is entered."""
        return _NOTHING

    def wait(self) -> None:
        """Waits until the work on the current stream is done."""

    def is_recorded(self) -> bool:
        """Returns whether the caller records the current stream in a CUDA graph."""
        return False

    # ---- tensors -------------------------------------------------------------------------------------

    def accepts(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.kind

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def operand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy if a plan cannot read it where it lies."""
        made = tensor.contiguous()
        return made if made.data_ptr() % self.alignment == 0 else made.clone()

    def operands(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors, or a list with copies of those that a plan cannot read where they lie."""
        unreadable = _deepwell.unreadable(tensors, self.alignment)
        if not unreadable:
            return tensors
        made = list(tensors)
        for position in unreadable:
            made[position] = self.operand(tensors[position])
        return made

    def fresh_seed(self) -> torch.Tensor:
        """Returns the Philox key and offset of one call, from PyTorch's generator: torch.manual_seed repeats them."""
        return torch.empty(2, dtype=torch.int64, device=self.device).random_()

    def token(self) -> torch.Tensor:
        """Returns a new scalar that holds 0. Its memory is shared."""
        if self._zero is None:
            self._zero = torch.zeros((), dtype=torch.float32, device=self.device)
        return self._zero.detach()

    # ---- arenas --------------------------------------------------------------------------------------

    def arena_key(self) -> Any:
        """Returns what an idle arena must agree in with a run."""
        return None

    def arena(self, size: int) -> Any:
        """Returns memory for a segment, with the attributes ``address`` and ``bytes`` and the method
        ``copy_from(other, bytes)``."""
        return _deepwell.Arena(size)

    # ---- runs ----------------------------------------------------------------------------------------

    def forward(
        self, plan: _deepwell.Plan, arena: Lease, leaves: Tensors, outputs: Tensors
    ) -> None:
        plan.forward(arena.addresses, leaves, outputs)

    def keep(self, plan: _deepwell.Plan, segments: Sequence[int | None], leaves: Tensors) -> None:
        """Computes what depends on parameters alone. ``segments``: addresses of an arena and of the kept values. Leaves that
        it does not read may be None."""
        plan.keep(segments, leaves)

    def backward(self, plan: _deepwell.Plan, part: int, arena: Lease, *tensors: Tensors) -> None:
        """``tensors``: leaves, outputs, gradients of outputs, gradients of leaves. ``part`` -1 runs all parts."""
        plan.backward(part, arena.addresses, *tensors)

    def run_alone(self, instruction: _deepwell.Instruction) -> None:
        """Runs one instruction of a plan by itself."""
        self.begin()
        instruction.run()

    # A target has no state that a copied or unpickled model needs.
    def __reduce__(self):
        return (type(self), ())


class _Memory:
    """A segment of an arena, in PyTorch's memory on a GPU: PyTorch's allocator has it again when this is deleted."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=device)
        self.address, self.bytes = self.tensor.data_ptr(), size

    def copy_from(self, other: "_Memory", size: int) -> None:
        self.tensor[:size].copy_(other.tensor[:size])


# PyTorch's own generated code asks for the current stream in this way, which makes no object.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)


class Gpu(Target):
    """One NVIDIA GPU."""

    name = "cuda"
    kind = "cuda"
    cuda_graphs = True
    arena_segments = 15
    alignment = 16
    # An allocation takes the host 5 to 10 us. A part completes gradients of about 64 MiB, which hooks free together.
    shared_gradients = 32 << 20
    large_call = 8 << 30

    def __init__(self, index: int) -> None:
        super().__init__()
        self.device = torch.device("cuda", index)

    def part_bytes(self) -> int:
        # A part costs the host 0.1 to 0.2 ms (a graph launch, a node of autograd, allocations), and 64 MiB are little
        # beside a GPU's memory. DistributedDataParallel sends buckets of 25 MiB while later parts run.
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return (25 if distributed else 64) << 20

    def begin(self) -> None:
        pass

    def plan_key(self) -> int:
        return self.tf32()

    def tf32(self) -> bool:
        # Set by torch.set_float32_matmul_precision and by torch.backends.
        return torch.backends.cuda.matmul.fp32_precision == "tf32"

    def current(self) -> ContextManager[Any]:
        here = torch.cuda.current_device() == self.device.index
        return _NOTHING if here else torch.cuda.device(self.device)

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def is_recorded(self) -> bool:
        with self.current():
            return torch.cuda.is_current_stream_capturing()

    def accepts(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def _stream(self) -> int:
        return _raw_stream(self.device.index)

    def arena_key(self) -> Any:
        # Another stream may still work in an arena that was given back.
        return self.device.index, self._stream()

    def arena(self, size: int) -> _Memory:
        return _Memory(size, self.device)

    def forward(
        self, plan: _deepwell.Plan, arena: Lease, leaves: Tensors, outputs: Tensors
    ) -> None:
        with self.current():
            plan.forward(arena.addresses, leaves, outputs, self._stream())

    def keep(self, plan: _deepwell.Plan, segments: Sequence[int | None], leaves: Tensors) -> None:
        with self.current():
            plan.keep(segments, leaves, self._stream())

    def backward(self, plan: _deepwell.Plan, part: int, arena: Lease, *tensors: Tensors) -> None:
        with self.current():
            plan.backward(part, arena.addresses, *tensors, self._stream())

    def run_alone(self, instruction: _deepwell.Instruction) -> None:
        with self.current():
            instruction.run(self._stream())

    def __reduce__(self):
        return (Gpu, (self.device.index,))


class PlannedGpu(Target):
    """A Hopper GPU that need not be there. Plans are made for it, and nothing runs."""

    name = "plan:sm_90a"
    kind = "cuda"
    cuda_graphs = True
    arena_segments = Gpu.arena_segments
    alignment = Gpu.alignment
    shared_gradients = Gpu.shared_gradients
    part_bytes = Gpu.part_bytes

    def begin(self) -> None:
        pass

    def plan_key(self) -> int:
        return 0


class EmulatedGpu(Target):
    """An emulated GPU, for a model on the CPU: as slow as the emulator is."""

    cuda_graphs = True
    arena_segments = 15

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def begin(self) -> None:
        pass

    def plan_key(self) -> int:
        return 0

    def arena_key(self) -> Any:
        return self.name

    def arena(self, size: int) -> _deepwell.Arena:
        return _deepwell.Arena(size, self.name)

    def _send(self, tensors: Tensors) -> list[_deepwell.Arena | None]:
        sent = []
        for tensor in tensors:
            memory = None
            if tensor is not None:
                memory = _deepwell.Arena(tensor.nbytes, self.name)
                memory.copy_in(tensor.data_ptr(), tensor.nbytes)
            sent.append(memory)
        return sent

    @staticmethod
    def _fetch(tensors: Tensors, sent: Sequence[_deepwell.Arena | None]) -> None:
        for tensor, memory in zip(tensors, sent):
            if tensor is not None and memory is not None:
                memory.copy_out(tensor.data_ptr(), tensor.nbytes)

    @staticmethod
    def _addresses(sent: Sequence[_deepwell.Arena | None]) -> list[int | None]:
        return [None if memory is None else memory.address for memory in sent]

    def forward(
        self, plan: _deepwell.Plan, arena: Lease, leaves: Tensors, outputs: Tensors
    ) -> None:
        sent, made = self._send(leaves), self._send(outputs)
        plan.forward(arena.addresses, self._addresses(sent), self._addresses(made))
        plan.synchronize(0)
        self._fetch(outputs, made)

    def keep(self, plan: _deepwell.Plan, segments: Sequence[int | None], leaves: Tensors) -> None:
        sent = self._send(leaves)
        plan.keep(segments, self._addresses(sent))
        plan.synchronize(0)

    def backward(self, plan: _deepwell.Plan, part: int, arena: Lease, *tensors: Tensors) -> None:
        # Gradients are sent as well: an earlier part may have begun them.
        sent = [self._send(each) for each in tensors]
        plan.backward(part, arena.addresses, *map(self._addresses, sent))
        plan.synchronize(0)
        self._fetch(tensors[-1], sent[-1])

    def __reduce__(self):
        return (EmulatedGpu, (self.name,))


_threads_set = 0


def _use_pytorchs_threads() -> None:
    """Sets the number of threads to PyTorch's current one. A run keeps the number that its plan was made for."""
    global _threads_set
    threads = torch.get_num_threads()
    if threads != _threads_set or threads != _deepwell.get_threads():
        _deepwell.set_threads(threads)
        _threads_set = threads

"""Run megatron-core on a machine without a GPU by redirecting CUDA calls to the CPU.

megatron-core hard-codes the device "cuda". Here that name means the CPU, streams and events are
no-ops, and CUDA's RNG state is the CPU's. Nothing is patched on a machine with a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from slime.config.env import set_default_env
from slime.utils.device import device_type

Function = Callable[..., Any]

_CPU = torch.device("cpu")
_installed = False


def install_cpu_adapter() -> None:
    """Patch torch and megatron once, before megatron is used. A no-op on a machine with a GPU."""
    global _installed
    if _installed or device_type() == "cuda":
        return
    _installed = True
    _replace_cuda_functions()
    InterceptTorch(_call_on_cpu).__enter__()
    with _hidden("wandb"):  # its import takes 1 s, for an inference engine not used here
        _patch_megatron()
    _patch_uneven_collectives()
    _share_groups()


class InterceptTorch(TorchFunctionMode):
    """Intercept torch functions and call `handler(function, args, kwargs)` instead while active."""

    def __init__(self, handler: Callable[[Function, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handler = handler

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._handler(func, args, kwargs or {})


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Make `import name` fail inside the block, unless it is already imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def _call_on_cpu(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `func` with "cuda" replaced by the CPU, so that tensors are created there."""
    if func in _RETURN_SELF:
        return args[0]
    if func is torch.Tensor.record_stream:
        return None
    if func is torch.Tensor.type and len(args) == 1 and not kwargs:
        # Optimizers compare it with names such as torch.cuda.FloatTensor.
        return func(*args).replace("torch.", "torch.cuda.")
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": _CPU}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    if func is torch.Tensor.to:
        args = [_CPU if _is_cuda(arg) else arg for arg in args]
    return func(*args, **kwargs)


_RETURN_SELF = {torch.Tensor.cuda, torch.Tensor.pin_memory}


class _Stream:
    """A no-op stream, as everything on a CPU runs in order."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Event:
    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _replace_cuda_functions() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()
    cuda.current_device = lambda: _CPU
    cuda.set_device = lambda *_: None
    cuda.device_count = lambda: 1
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.current_stream = cuda.default_stream = lambda *_, **__: stream
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed


def _patch_megatron() -> None:
    # Compiling megatron's small functions takes minutes on a CPU.
    set_default_env(TORCHDYNAMO_DISABLE="1")
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # It converts split sizes to numpy only if they are on a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = moe_utils.maybe_move_tensor_to_cpu = _to_host


def _patch_uneven_collectives() -> None:
    """Patch collectives of tensor-parallel experts, whose unequal shards gloo does not support."""
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        padded = input_.new_zeros(max(output_split_sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(parts, output_split_sizes, strict=True)])

    def scatter_parts(
        input_: torch.Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def _share_groups() -> None:
    """Reuse one process group for the same ranks, within a layout and across layouts.

    Megatron creates about forty groups per layout, and every gloo group has a thread that polls a
    hundred times a second: a process that has used thirty layouts does little else.
    """
    from megatron.core import parallel_state

    create = parallel_state.create_group
    made: dict[tuple[int, ...], Any] = {}
    world: list[Any] = [None]  # the default group that `made` belongs to

    def create_or_reuse(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        if world[0] is not dist.group.WORLD:
            made.clear()
            world[0] = dist.group.WORLD
        key = tuple(ranks)
        if key not in made:
            made[key] = create(ranks, *args, **kwargs)
        return made[key]

    parallel_state.create_group = create_or_reuse


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")

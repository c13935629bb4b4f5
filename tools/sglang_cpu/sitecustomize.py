"""Stand-ins that let SGLang run on a machine without a GPU; read by Python at start-up.

`torchvision` and `sgl_kernel` exist for CUDA only. SGLang imports them at the top of modules but calls
nothing in them on the torch-native CPU path, so an import that yields inert objects is enough.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STAND_INS = {"torchvision", "sgl_kernel"}


class Inert:
    """Any attribute of it is inert too; as a decorator it leaves the function alone."""

    def __init__(self, name):
        self.__dict__["_name"] = name

    def __getattr__(self, key):
        if key.startswith("__") and key.endswith("__"):
            raise AttributeError(key)
        return Inert(f"{self._name}.{key}")

    def __call__(self, *args, **kwargs):
        bare = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if bare and not isinstance(args[0], Inert) else self

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __getitem__ = __or__


class InertModule(types.ModuleType):
    def __getattr__(self, key):
        if key.startswith("__") and key.endswith("__"):
            raise AttributeError(key)
        return Inert(f"{self.__name__}.{key}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in STAND_INS:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = []
        return spec

    def create_module(self, spec):
        return InertModule(spec.name)

    def exec_module(self, module):
        module.__path__ = []
        module.__dict__["__version__"] = "0.0.0"


class PatchFinder(importlib.abc.MetaPathFinder):
    """Patches modules of SGLang right after they are executed."""

    def find_spec(self, name, path=None, target=None):
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module):
                original(module)
                PATCHES[name](module)

            spec.loader.exec_module = exec_module
        return spec


def pin_nothing(module):
    """Pinning host memory for a GPU would ask the CUDA driver."""
    module._cuda_host_register = lambda *args, **kwargs: None


def pin_no_tensors(module):
    """Leave tensors of adapters in plain host memory, for the same reason."""
    import torch

    def unpinned(make):
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    torch.Tensor.pin_memory = lambda self, device=None: self
    for name in ("tensor", "zeros", "empty", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))


def multiply_in_torch(module):
    """Replace the FP8 matmuls, which SGLang implements for AMX, by dequantised ones in fp32."""
    import torch

    def by_block(x, weight, scales, block, bias, dtype, is_vnni):
        spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = weight.float() * spread[: weight.shape[0], : weight.shape[1]]
        return torch.nn.functional.linear(x.float(), wide, _wide(bias)).to(dtype)

    def by_tensor(x, weight, scale, bias, dtype, is_vnni):
        wide = weight.float() * scale.float().reshape(-1, 1)
        return torch.nn.functional.linear(x.float(), wide, _wide(bias)).to(dtype)

    ops: Any = torch.ops.sgl_kernel
    ops.fp8_scaled_mm_cpu = by_block
    ops.fp8_per_tensor_scaled_mm_cpu = by_tensor
    module._is_cpu = False  # weights are kept as for a GPU: those for AMX cannot be updated
    module.use_intel_amx_backend = lambda layer: hasattr(layer, "weight")
    take_float32(module.Fp8Config)


def multiply_channels_in_torch(module):
    """The same for the layout of compressed-tensors, whose kernels exist for GPUs only."""
    import torch

    def linear(input, weight, weight_scale, bias=None, **kwargs):
        wide = weight.t().float() * weight_scale.float().reshape(-1, 1)
        return torch.nn.functional.linear(input.float(), wide, _wide(bias)).to(input.dtype)

    module.apply_fp8_linear = linear


def allow_channels(module):
    """A GPU would be asked how new it is."""
    config = module.CompressedTensorsConfig
    config._check_scheme_supported = lambda self, min_capability, error=True: True
    take_float32(config)


def take_float32(config):
    """So that results can be compared closely."""
    import torch

    every = [torch.float32, torch.bfloat16, torch.float16]
    config.get_supported_act_dtypes = classmethod(lambda cls: every)


def _wide(bias):
    return None if bias is None else bias.float()


_FP8 = "sglang.srt.layers.quantization"
PATCHES = {
    "sglang.srt.mem_cache.pool_host.common": pin_nothing,
    "sglang.srt.lora.lora_manager": pin_no_tensors,
    f"{_FP8}.fp8": multiply_in_torch,
    f"{_FP8}.compressed_tensors.compressed_tensors": allow_channels,
    f"{_FP8}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8": multiply_channels_in_torch,
}
sys.meta_path[:0] = [PatchFinder(), StandIns()]

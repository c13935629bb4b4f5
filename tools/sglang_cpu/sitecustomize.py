"""Stand-ins that let SGLang be imported on a machine without a GPU; read by Python at start-up.

`torchvision` and `sgl_kernel` exist for CUDA only. SGLang imports them at the top of modules but calls
nothing in them on the torch-native CPU path, so an import that yields inert objects is enough.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STAND_INS = {"torchvision", "sgl_kernel"}
HOST_POOL = "sglang.srt.mem_cache.pool_host.common"


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
        module.__version__ = "0.0.0"


class HostPool(importlib.abc.MetaPathFinder):
    """Pinning host memory for a GPU would ask the CUDA driver."""

    def find_spec(self, name, path=None, target=None):
        if name != HOST_POOL:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module):
                original(module)
                module._cuda_host_register = lambda *args, **kwargs: None

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [HostPool(), StandIns()]

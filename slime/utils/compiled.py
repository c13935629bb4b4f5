"""torch.compile for functions that gain from it: on a GPU, at their first call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_on_gpu(function: Function) -> Function:
    """Compile a function for any shape when it is called with GPU tensors; on a CPU run it as written.

    If the compiler does not work (it needs a C compiler besides Triton), one warning is logged.
    """
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if not first.is_cuda:
            return function(first, *rest, **options)
        if not compiled:
            compiled.append(_compile(function))
        try:
            return compiled[0](first, *rest, **options)
        except Exception as error:
            if compiled[0] is function or not _is_compiler_error(error):
                raise
            logger.warning("%s runs uncompiled: %s", function.__name__, error)
            compiled[0] = function
            return function(first, *rest, **options)

    return call  # type: ignore[return-value]


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return torch.compile(function, dynamic=True)


def _is_compiler_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))

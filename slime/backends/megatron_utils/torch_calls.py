"""Calls of torch's functions, answered by somebody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]


class TorchCalls(TorchFunctionMode):
    """Inside, `answer(function, args, kwargs)` gives the result of every call."""

    def __init__(self, answer: Callable[[Function, Sequence[Any], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._answer(func, args, kwargs or {})

"""Records the experts that every cached token was routed to, for routing replay in the trainer.

Stored by slot of the KV cache, beside the keys and values, so that prefix cache hits and interrupted
requests keep their routing.
"""

from __future__ import annotations

import base64
import re

import numpy as np
import torch
from transformers import PreTrainedModel

from slime.core.errors import UserError
from slime.engine.models.attention import AttentionPlan
from slime.engine.scheduler.request import Request

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class RoutedExperts:
    """Records the choices of the routers of `model` by forward hooks; layers without experts stay -1."""

    def __init__(self, model: PreTrainedModel, num_pages: int, page_size: int) -> None:
        config = model.config.get_text_config()
        routers = {
            int(match[1]): module
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("topkrouter")
            and (match := _LAYER.search(name))
        }
        if not routers:
            raise UserError(
                f"--enable-return-routed-experts: {type(model).__name__} has no routers that the "
                "embedded engine can read; remove it or use --rollout-engine sglang"
            )
        self._page_size = page_size
        shape = (
            (num_pages + 1) * page_size,
            config.num_hidden_layers,
            config.num_experts_per_tok,
        )
        self._chosen = np.full(shape, -1, np.int32)
        self._seen: dict[int, torch.Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(self._note(layer, type(model).__name__))

    def _note(self, layer: int, model_name: str):
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            for part in reversed(parts):
                if torch.is_tensor(part) and not part.is_floating_point():
                    self._seen[layer] = part
                    return
            raise UserError(
                f"--enable-return-routed-experts: the routers of {model_name} do not return which experts "
                "they choose; remove it or use --rollout-engine sglang"
            )

        return hook

    def keep(self, plan: AttentionPlan) -> None:
        """Store the choices of the last forward in the slots of its plan."""
        slots = plan.slots.cpu().numpy()
        for layer, experts in self._seen.items():
            self._chosen[slots, layer] = experts.reshape(len(slots), -1).cpu().numpy()
        self._seen.clear()

    def of(self, request: Request) -> str:
        """Return the routing in SGLang's format: base64 of int32 [tokens - 1, layers, experts per token]."""
        wanted = len(request.token_ids) - 1
        positions = np.arange(min(wanted, request.num_computed))
        pages = np.array(request.pages, np.int64)[positions // self._page_size]
        slots = pages * self._page_size + positions % self._page_size
        chosen = np.full((wanted, *self._chosen.shape[1:]), -1, np.int32)
        chosen[: len(slots)] = self._chosen[slots]
        return base64.b64encode(chosen.tobytes()).decode()

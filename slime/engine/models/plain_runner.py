"""The plain execution path: steps of any Hugging Face model, with attention over the paged KV cache.

Only this path can record the experts that each token was routed to, for routing replay in the trainer.
They are stored by slot of the KV cache, beside the keys and values, so that prefix cache hits and
interrupted requests keep their routing.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from slime.core.errors import UserError
from slime.engine.kernels.lora import group_rows
from slime.engine.kv_cache import KVCache
from slime.engine.lora.bank import LoraBank
from slime.engine.models.attention import AttentionPlan, plan_attention, use_plan
from slime.engine.models.delta_net import plan_states
from slime.engine.models.fast_model import text_model
from slime.engine.models.vision_tower import VisionTower
from slime.engine.scheduler.request import Request
from slime.engine.scheduler.sampling import sample, score
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.step import (
    FinishedStep,
    Step,
    StepBatch,
    StepOutput,
    join_outputs,
    make_batch,
    split_fixed,
)

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class PlainRunner:
    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        scheduler: Scheduler,
        deterministic: bool,
        routed_experts: RoutedExperts | None = None,
        lora: LoraBank | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        self._lora = lora
        self._tower = tower
        self._model: Any = model
        self._cache = cache
        self._scheduler = scheduler
        self._deterministic = deterministic
        self._routed_experts = routed_experts

    @torch.inference_mode()
    def launch(self, step: Step) -> FinishedStep:
        """Compute all tokens of the step and sample the next tokens."""
        if self._scheduler.new_pages:
            self._cache.wipe([0, *self._scheduler.new_pages])
        if self._cache.states is not None and self._scheduler.states is not None:
            self._cache.states.copy(self._scheduler.states.copies)
        batch = make_batch(step)
        batch.ids[: len(step.decoding)] = [request.token_ids[-1] for request in step.decoding]
        parts = split_fixed(batch, self._scheduler.padding_row) if self._deterministic else [batch]
        return FinishedStep(output=join_outputs([self._forward(part) for part in parts]))

    def invalidate(self) -> None:
        """Do nothing: no state here depends on the addresses of the weights or the cache."""

    def _forward(self, batch: StepBatch) -> StepOutput:
        device = self._cache.device
        outputs = np.concatenate([batch.sampled_at, batch.scored_at])
        # In deterministic mode the output layer, too, has the same number of rows every time.
        kept = np.arange(len(batch.ids)) if self._deterministic else outputs
        plan = plan_attention(batch, self._scheduler.page_table, self._cache)
        if self._cache.states is not None:
            row, fixed = self._scheduler.padding_row, self._deterministic
            plan.states = plan_states(batch, self._cache.states, row, fixed=fixed)
        if self._lora is not None:
            slots = self._scheduler.row_slots[batch.rows]
            self._lora.rows = group_rows(slots, device, fixed=self._deterministic)
        with use_plan(plan):
            logits = self._logits(batch, torch.from_numpy(kept).to(device))
        if self._deterministic:
            logits = logits[torch.from_numpy(outputs).to(device)]
        if self._routed_experts is not None:
            self._routed_experts.keep(plan)
        output = StepOutput(requests=batch.sampled, tokens=[], log_probs=[], scored=[])
        count = len(batch.sampled)
        if count:
            sampled = sample(logits[:count], batch.sampled, batch.positions[batch.sampled_at] + 1)
            output.tokens, output.log_probs = sampled.tokens, sampled.log_probs
        if batch.scored:
            positions = batch.positions[batch.scored_at].tolist()
            output.scored = score(logits[count:], batch.scored, positions)
        return output

    def _logits(self, batch: StepBatch, kept: torch.Tensor) -> torch.Tensor:
        """Return the logits of the tokens with indices `kept`."""
        device = self._cache.device
        ids = torch.from_numpy(batch.ids).long().to(device).unsqueeze(0)
        positions = torch.from_numpy(batch.positions).long().to(device).unsqueeze(0)
        if batch.rope is None or self._tower is None:
            return self._model(
                input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept
            ).logits[0]
        rope = torch.from_numpy(batch.rope).long().to(device)
        options: dict[str, Any] = {"position_ids": rope.T.unsqueeze(1)}  # [3, 1, T]
        hidden = self._model.get_input_embeddings()(ids)
        images = self._tower.inputs(batch.images)
        if images is not None:
            hidden[0].index_copy_(0, images.at, images.embeddings)
            if images.deepstack:
                is_image = torch.zeros_like(ids, dtype=torch.bool)
                is_image[0, images.at] = True
                options |= {
                    "visual_pos_masks": is_image,
                    "deepstack_visual_embeds": images.deepstack,
                }
        body = text_model(self._model)
        output = body(inputs_embeds=hidden, use_cache=False, **options).last_hidden_state
        return self._model.get_output_embeddings()(output[0, kept])


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
            router.register_forward_hook(self._make_hook(layer, type(model).__name__))

    def _make_hook(self, layer: int, model_name: str):
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

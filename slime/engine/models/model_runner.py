"""The model on its device, and whoever runs its steps."""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from slime.core.errors import UserError
from slime.engine.arguments import EngineArgs
from slime.engine.cache.kv_cache import KVCache, LayerShape
from slime.engine.models.attention import record_layers
from slime.engine.models.fused_model import Forward, FusedModel, make_forward
from slime.engine.models.loading import context_len, load_model
from slime.engine.models.plain_runner import PlainRunner
from slime.engine.models.routed_experts import RoutedExperts
from slime.engine.models.select import make_fast, make_fast_runner
from slime.engine.models.self_check import check_served
from slime.engine.scheduler.scheduler import Scheduler, Step
from slime.engine.scheduler.speculation import GuessFlight
from slime.engine.scheduler.step_output import Flight
from slime.utils.device import device_type

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    def launch(self, step: Step) -> Flight: ...

    def forget(self) -> None: ...


class ModelRunner:
    """`layers` says what each layer stores in the KV cache."""

    def __init__(self, args: EngineArgs) -> None:
        self.device = torch.device(args.device or device_type())
        self.model = load_model(args, self.device)
        self.dtype: torch.dtype = self.model.dtype
        self.deterministic = args.enable_deterministic_inference
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.context_len = context_len(args, self.model)
        self._returns_experts = args.enable_return_routed_experts
        self.routed_experts: RoutedExperts | None = None
        self._fast = None if self._returns_experts else make_fast(self.model, self.context_len)
        self._plain: Forward | None = None if self._fast else make_forward(self.model)
        self.layers = self._fast.model.layers if self._fast else self._find_layers()
        if self._plain is not None and not isinstance(self._plain, FusedModel):
            check_served(self.model, self._plain, self.layers, self.context_len)
        self.cache: KVCache | None = None
        self._steps: StepRunner | None = None

    def prepare(self, num_pages: int, scheduler: Scheduler) -> None:
        """Take the memory of the KV cache; from here on steps can run."""
        page_size = scheduler.pool.page_size
        cache = KVCache(self.layers, num_pages, page_size, self.dtype, self.device)
        self.cache = cache
        if self._fast is not None:
            self._steps = make_fast_runner(self._fast, cache, scheduler, self.deterministic)
        else:
            assert self._plain is not None
            if self._returns_experts:
                self.routed_experts = RoutedExperts(self.model, num_pages, page_size)
            self._steps = PlainRunner(
                self._plain, cache, scheduler, self.deterministic, self.routed_experts
            )

    def launch(self, step: Step) -> Flight:
        """Start one step: compute all its tokens and draw the next one where one is due."""
        assert self._steps is not None
        flight = self._steps.launch(step)
        if not step.guesses:
            return flight
        return GuessFlight(flight=flight, drafts={g.request: g.draft for g in step.guesses})

    def forget(self) -> None:
        """The cache or the weights are about to go away or to move."""
        if self._steps is not None:
            self._steps.forget()

    @torch.inference_mode()
    def _find_layers(self) -> dict[int, LayerShape]:
        """Run one token with attention that only takes notes: works for any model definition."""
        assert self._plain is not None
        token = torch.zeros(1, dtype=torch.int64, device=self.device)
        reason = ""
        try:
            with record_layers() as layers:
                self._plain(token, token, token)
        except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
            layers, reason = {}, f" ({error})"
        if not layers:
            raise UserError(
                f"the embedded engine cannot serve {type(self.model).__name__}: its attention does not "
                f"go through transformers' attention interface{reason}; use --rollout-engine sglang"
            )
        return layers

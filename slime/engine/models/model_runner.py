"""The model on its device, and the choice of the forward that runs it.

There are two execution paths::

    fast    FastModel on our kernels     CpuRunner (C, float32) or CudaRunner (Triton, CUDA graphs)
    plain   the Hugging Face modules     PlainRunner, with attention over the paged KV cache

`find_kernels` is the only place that decides between them.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from slime.core.errors import ConfigError, UserError
from slime.data.images import ImageProcessor, load_image_processor
from slime.engine.arguments import EngineArgs
from slime.engine.kernels.cpu_kernels import SOURCE, CpuKernels
from slime.engine.kernels.interface import Kernels
from slime.engine.kv_cache import KVCache, LayerShape, StateCache
from slime.engine.lora.store import make_bank
from slime.engine.models.attention import record_layers
from slime.engine.models.cpu_runner import CpuRunner
from slime.engine.models.delta_net import serve_delta_nets, state_shape
from slime.engine.models.fast_model import FastModel, text_model
from slime.engine.models.hybrid_layers import is_hybrid
from slime.engine.models.loading import context_len, load_model
from slime.engine.models.plain_runner import PlainRunner, RoutedExperts
from slime.engine.models.self_check import check_served
from slime.engine.models.vision_tower import VisionTower
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.speculation import PendingDraftStep
from slime.engine.scheduler.step import PendingStep, Step
from slime.utils.compiled import load_library
from slime.utils.device import device_type

logger = logging.getLogger(__name__)
FAMILIES = {
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
}
_NO_DRAFTS = (
    "--speculative-algorithm {}: {} has recurrent layers, whose states cannot be taken back when a draft "
    "token is rejected; remove it"
)
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # a position's angles never change


def find_kernels(args: EngineArgs, model: PreTrainedModel) -> Kernels | str:
    """Return the kernels of the fast path, or the reason why this model takes the plain path."""
    if args.enable_return_routed_experts:
        return "--enable-return-routed-experts reads the routers of the Hugging Face modules"
    if not _is_known_family(model):
        return f"there is no fast forward for {type(model).__name__}"
    config: Any = model.config.get_text_config()
    body: Any = text_model(model)
    if config.hidden_act not in ("silu", "swish"):
        return f"the fast forward has no activation {config.hidden_act!r}"
    if body.rotary_emb.rope_type not in _STATIC_ROPE:
        return f"the fast forward has no RoPE of type {body.rotary_emb.rope_type!r}"
    rotated = 2 * body.rotary_emb.inv_freq.shape[-1]
    if not is_hybrid(model) and rotated != body.layers[0].self_attn.head_dim:
        return "the fast forward has no partial RoPE"
    if model.device.type == "cuda":
        try:
            from slime.engine.kernels.cuda_kernels import CudaKernels
        except ImportError as error:
            return f"Triton cannot be imported ({error})"
        return CudaKernels()
    if model.dtype != torch.float32:
        return f"the CPU kernels compute in float32, not in {model.dtype}"
    library = load_library(SOURCE)
    return "gcc did not compile the CPU kernels" if library is None else CpuKernels(library)


class StepRunner(Protocol):
    def launch(self, step: Step) -> PendingStep: ...

    def invalidate(self) -> None: ...


class ModelRunner:
    """Runs the steps of one model; `layers` holds what each layer stores in the KV cache."""

    def __init__(self, args: EngineArgs) -> None:
        self.device = torch.device(args.device or device_type())
        self.model = load_model(args, self.device)
        self.dtype: torch.dtype = self.model.dtype
        self.deterministic = args.enable_deterministic_inference
        self.vocab_size: int = self.model.config.get_text_config().vocab_size
        self.context_len = context_len(args, self.model)
        self.routed_experts: RoutedExperts | None = None
        self._returns_experts = args.enable_return_routed_experts
        self.lora = make_bank(args, self.model)
        self.tower: VisionTower | None = None
        self.images: ImageProcessor | str = (
            f"a {self.model.config.model_type} model takes no images"
        )
        if hasattr(self.model.base_model, "visual"):
            self._load_tower(args.model_path)
        kernels = find_kernels(args, self.model)
        self._fast: FastModel | None = None
        self.state_shape = state_shape(self.model)  # None without recurrent layers
        if self.state_shape is not None and args.speculative_algorithm is not None:
            raise UserError(_NO_DRAFTS.format(args.speculative_algorithm, args.model_path))
        if isinstance(kernels, str):
            logger.info(
                "%s runs on its Hugging Face modules: %s", type(self.model).__name__, kernels
            )
            if self.lora is not None:
                self.lora.hook_linears()
            serve_delta_nets(self.model)
            self.layers = _find_layers(self.model)
            if self.lora is not None:
                self.lora.forget_unused()
            if not _is_known_family(self.model):
                check_served(self.model, self.layers, self.context_len, self.state_shape)
        else:
            self._fast = FastModel(self.model, kernels, self.context_len, self.lora)
            self.layers = self._fast.layers
        self.cache: KVCache | None = None
        self._steps: StepRunner | None = None

    def _load_tower(self, model_path: str) -> None:
        """Load image processor and vision tower; if that is impossible, serve text only."""
        try:
            self.images = load_image_processor(model_path)
            self.tower = VisionTower(self.model, self.images)
        except (ConfigError, ImportError) as error:
            self.images = str(error)
            logger.warning("requests with images are refused: %s", error)

    def prepare(self, num_pages: int, scheduler: Scheduler) -> None:
        """Allocate the KV cache; after this, steps can run."""
        page_size = scheduler.pool.page_size
        states = None
        if self.state_shape is not None:
            states = StateCache(self.state_shape, scheduler.num_state_rows, self.dtype, self.device)
        cache = KVCache(self.layers, num_pages, page_size, self.dtype, self.device, states)
        self.cache = cache
        if self._returns_experts:
            self.routed_experts = RoutedExperts(self.model, num_pages, page_size)
        if self._fast is None:
            self._steps = PlainRunner(
                *(self.model, cache, scheduler, self.deterministic, self.routed_experts, self.lora),
                tower=self.tower,
            )
        elif self.device.type == "cuda":
            from slime.engine.models.cuda_runner import CudaRunner

            with_lora = self.lora is not None
            self._steps = CudaRunner(
                *(self._fast, cache, scheduler, self.deterministic, with_lora, self.tower)
            )
        else:
            self._steps = CpuRunner(self._fast, cache, scheduler, self.deterministic, self.tower)

    def launch(self, step: Step) -> PendingStep:
        """Start one step: compute all its tokens and sample the next ones."""
        assert self._steps is not None
        pending = self._steps.launch(step)
        if not step.drafts:
            return pending
        return PendingDraftStep(
            pending=pending, drafts={span.request: span.draft for span in step.drafts}
        )

    def invalidate(self) -> None:
        """Drop what depends on the addresses of the cache and the weights, which are about to move."""
        if self._steps is not None:
            self._steps.invalidate()


def _is_known_family(model: PreTrainedModel) -> bool:
    kind = type(model)
    return kind.__name__ in FAMILIES and kind.__module__.startswith("transformers.")


@torch.inference_mode()
def _find_layers(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Run one token with attention that only records shapes, which works for any model definition."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    forward: Any = model
    reason = ""
    try:
        with record_layers() as layers:
            forward(input_ids=token, position_ids=token, use_cache=False)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:
        layers, reason = {}, f" ({error})"
    if not layers:
        raise UserError(
            f"the embedded engine cannot serve {type(model).__name__}: its attention does not "
            f"go through transformers' attention interface{reason}; use --rollout-engine sglang"
        )
    return layers

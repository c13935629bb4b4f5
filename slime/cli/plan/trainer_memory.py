"""GPU memory of a trainer rank: resident, in a training step, in a log-prob pass, in an update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime.backends.model_size import AdapterCount, ModelCount, RankModel
from slime.cli.plan.activations import LayerCost, layer_cost, uses_te
from slime.cli.plan.memory import GIB, Item
from slime.cli.plan.model_shape import Shape
from slime.cli.plan.rank_layout import Batches, Sizes
from slime.config.arguments import Args
from slime.config.lora import served_adapter

# Assumed: memory of a CUDA process before its first tensor, and the buffers of a communicator.
CUDA_CONTEXT = int(0.5 * GIB)
NCCL_GROUP = int(0.2 * GIB)
GRADIENTS = "gradients"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    args: Args
    shape: Shape
    sizes: Sizes
    batches: Batches
    count: ModelCount

    # ---- resident

    def resident(self, rank: RankModel) -> list[Item]:
        """Return parameters, gradients and optimizer state that are not offloaded to the CPU."""
        weights = 0 if self.args.fsdp_cpu_offload else rank.weight_bytes
        items = [Item(name="parameters", nbytes=weights, note=self._dtype_note())]
        if self._is_megatron:
            note = f"accumulated in {self.args.main_grads_dtype or 'fp32'}"
            items.append(Item(name=GRADIENTS, nbytes=rank.gradient_bytes, note=note))
        master, moments = self._optimizer(rank)
        items.append(Item(name="fp32 master weights", nbytes=master))
        items.append(Item(name=moments_name(self.args), nbytes=moments))
        copies = fp8_copy_bytes(self.args, self.shape, rank, self.sizes.tp)
        items.append(Item(name="FP8 copies of weights", nbytes=copies, note="both ways"))
        items += self._frozen(rank)
        if self.args.needs_critic and not self.args.offload_train:  # else only one is on the GPU
            both = sum(item.nbytes for item in items)
            items.append(Item(name="critic", nbytes=both, note="as much as the actor"))
        return [item for item in items if item.nbytes]

    def between_steps(self, rank: RankModel) -> list[Item]:
        """Return what is resident between steps; an offloaded trainer drops its gradients."""
        items = self.resident(rank)
        if not self.args.offload_train:
            return items
        return [item for item in items if item.name != GRADIENTS]

    def overhead(self) -> list[Item]:
        s = self.sizes
        sizes = (s.tp, s.pp, s.cp, s.dp, s.dp * s.cp, s.ep, s.etp, s.expert_dp)
        groups = sum(size > 1 for size in sizes)
        items = [Item(name="CUDA context", nbytes=CUDA_CONTEXT, note="assumed")]
        if groups:
            nccl = groups * NCCL_GROUP
            items.append(Item(name="NCCL buffers", nbytes=nccl, note=f"assumed, {groups} groups"))
        return items

    # ---- per phase

    def training(self, rank: RankModel) -> list[Item]:
        tokens, cost = self.batches.tokens_per_gpu, self._layer_cost()
        kept = self._kept(rank, cost) * tokens * self._element
        working = cost.backward * tokens * self._element
        if self._recomputes_layers:
            working += cost.largest * tokens * self._element
        head = self._head(tokens, backward=True) if rank.has_head else 0
        items = [
            Item(name="activations", nbytes=int(kept), note=f"{tokens} tokens"),
            Item(name="logits and loss", nbytes=head, note="in chunks"),
            Item(name="layer at work", nbytes=int(max(working - head, 0))),
        ]
        return [item for item in [*items, *self._gathered(training=True)] if item.nbytes]

    def log_probs(self, rank: RankModel) -> list[Item]:
        tokens = self.batches.log_prob_tokens_per_gpu
        working = int(self._layer_cost().largest * tokens * self._element)
        head = self._head(tokens, backward=False) if rank.has_head else 0
        items = [
            Item(name="layer at work", nbytes=working, note=f"{tokens} tokens"),
            Item(name="logits", nbytes=head, note="in chunks"),
        ]
        return [item for item in [*items, *self._gathered(training=False)] if item.nbytes]

    def update(self) -> list[Item]:
        """Return the memory of buckets: one being gathered, one being sent (two with tensor transport).

        An adapter that is sent alone is gathered as a whole, into a buffer that engines read.
        """
        if self.count.adapters is not None and served_adapter(self.args):
            size = adapter_bytes(self.args, self.count.adapters)
            return [Item(name="adapter being sent", nbytes=size, note=self.args.precision)]
        size = self.args.update_weight_buffer_size
        largest = self.count.whole.largest_tensor * self._element
        bucket = max(size, largest)
        shared = 2 if self.args.update_weight_transport == "tensor" else 1
        parts = self._gathered_at_once()
        return [
            Item(
                name="weight buckets", nbytes=(1 + shared) * bucket, note=f"{1 + shared} at a time"
            ),
            Item(name="tensors being gathered", nbytes=parts),
        ]

    # ---- helpers

    @property
    def _is_megatron(self) -> bool:
        return self.args.train_backend == "megatron"

    @property
    def _element(self) -> int:
        return 2 if self.args.precision == "bf16" else 4

    @property
    def _recomputes_layers(self) -> bool:
        if self._is_megatron:
            return self.args.recompute_granularity == "full"
        return bool(self.args.gradient_checkpointing)

    def _dtype_note(self) -> str:
        if self.args.lora_rank:
            sharded = "" if self._is_megatron else ", sharded"
            base = "fp8" if self._base_in_fp8 else self.args.precision
            return f"{base}{sharded}; adapters fp32"
        return self.args.precision if self._is_megatron else "fp32, sharded"

    def _optimizer(self, rank: RankModel) -> tuple[int, int]:
        if self.args.fsdp_cpu_offload:
            return 0, 0
        if self._is_megatron and self.args.optimizer_cpu_offload:
            left = 1 - offloaded_share(self.args)
            # Without the precision-aware optimizer only the moments are offloaded.
            master = rank.master_bytes if not self.args.use_precision_aware_optimizer else 0
            return max(master, int(rank.master_bytes * left)), int(rank.moment_bytes * left)
        return optimizer_bytes(self.args, rank)

    def _frozen(self, rank: RankModel) -> list[Item]:
        """Return reference and teacher, which FSDP keeps on the GPU and Megatron on the host."""
        if self._is_megatron or self.args.fsdp_cpu_offload:
            return []
        each = rank.parameters * self._element
        return [Item(name=f"{name} weights", nbytes=each) for name in frozen_models(self.args)]

    def _layer_cost(self) -> LayerCost:
        return layer_cost(
            self.args,
            self.shape,
            self.sizes,
            repeats_keys=self.count.attention_repeats_keys,
            long_samples=self.batches.longest_sample >= self.count.long_sample,
            adapters=self.count.adapters,
        )

    def _kept(self, rank: RankModel, cost: LayerCost) -> float:
        """Return the elements per token saved for backward, over all micro-batches in flight."""
        in_flight = self._in_flight(rank)
        layers = rank.dense_layers + rank.moe_layers
        if not self._recomputes_layers:
            whole = rank.dense_layers * cost.dense.total + rank.moe_layers * cost.moe.total
            return in_flight * whole
        each, method = self.args.recompute_num_layers or 1, self.args.recompute_method
        if not self._is_megatron:
            return layers * cost.dense.boundary
        if method == "block":  # the first ones only
            recomputed = min(each, layers)
            rest = (layers - recomputed) * cost.largest
            return in_flight * (recomputed * cost.dense.boundary + rest)
        extra = (each - 1) * cost.largest  # of the group being recomputed
        return in_flight * math.ceil(layers / each) * cost.dense.boundary + extra

    def _in_flight(self, rank: RankModel) -> float:
        """Return the micro-batches that wait for their backward pass when the pipeline is full."""
        stage = rank.rank // (self.sizes.world // self.sizes.pp)
        stages = virtual_stages(self.args, self.shape.layers)
        count = float(self.sizes.pp - stage)
        if stages > 1:
            chunks = 2 * (self.sizes.pp - stage - 1) + (stages - 1) * self.sizes.pp + 1
            count = chunks / stages
        return min(count, max(self.batches.samples_per_dp_rank, 1))

    def _head(self, tokens: int, *, backward: bool) -> int:
        """Return the bytes of chunked logits, hidden states and, in backward, head gradients."""
        vocab = math.ceil(self.shape.vocab / self.sizes.tp)
        chunk = min(self.args.log_probs_chunk_size, tokens)
        whole = self.sizes.tp == 1 and self._element == 2
        logits = chunk * vocab * ((4 if backward else 2) if whole else 14 if backward else 10)
        hidden = tokens * self.shape.hidden * self._element
        if not backward:
            return logits + hidden
        gradient = vocab * self.shape.hidden * (4 + 2 if self._element == 2 else 4)
        return logits + 2 * hidden + (0 if self.args.lora_rank else gradient)

    def _gathered(self, *, training: bool) -> list[Item]:
        """Return what FSDP gathers: all parameters on one rank, else two layers and the head.

        With LoRA one rank also copies layer by layer, without prefetching the next one, and only adapters
        have gradients.
        """
        if self._is_megatron:
            return []
        whole = self.count.whole
        parts = whole.total * self._element
        if self.sizes.world > 1 or self.args.lora_rank:
            base = 1 if self._base_in_fp8 else self._element
            layer = self._gathered_layer() * base + self._adapter_layer() * self._element
            at_once = 2 if self.sizes.world > 1 else 1
            parts = at_once * layer + self._outside_layers() * self._element
        items = [Item(name="gathered parameters", nbytes=parts)]
        if self._base_in_fp8:
            size = self._largest_matrix() * (4 + self._element)
            items.append(Item(name="matrix being dequantized", nbytes=size, note="in fp32"))
        if training:
            own = self.count.ranks[0].trained_parameters
            here = 0 if self.args.fsdp_cpu_offload else own * 4
            whole_ones = 2 * self._gathered_layer() + self._outside_layers()
            work = 0 if self.sizes.world == 1 or self.args.lora_rank else whole_ones * 4
            items.append(Item(name=GRADIENTS, nbytes=here + work, note="fp32, until the step"))
        return items

    @property
    def _base_in_fp8(self) -> bool:
        """Return whether the frozen base of a LoRA run is stored in block-wise FP8."""
        return self.count.ranks[0].fp8_parameters > 0

    def _largest_matrix(self) -> int:
        """Return the elements of the largest weight of one matmul; the experts of a layer count as one."""
        shape = self.shape
        widest = max(shape.ffn, shape.heads * shape.head_dim)
        return shape.hidden * max(widest, 2 * shape.expert_ffn * shape.num_experts)

    def _adapter_layer(self) -> int:
        adapters = self.count.adapters
        return 0 if adapters is None else adapters.layer * adapters.rank

    def _gathered_layer(self) -> int:
        """Return the elements of a layer that a rank gathers, with only the experts it computes."""
        whole, ep = self.count.whole, self.sizes.ep
        sparse = self.count.ranks[0].moe_layers
        experts = whole.by_part.get("experts", 0) // sparse if sparse else 0
        return whole.layer - experts + experts // ep

    def _outside_layers(self) -> int:
        return sum(self.count.whole.by_part.get(part, 0) for part in ("embedding", "head"))

    def _gathered_at_once(self) -> int:
        """Return the bytes of one full tensor and its shards; for experts, of all expert ranks."""
        expert = 2 * self.shape.hidden * self.shape.expert_ffn * self.sizes.ep
        widest = max(self.count.whole.largest_tensor, expert)
        spread = self.sizes.world > 1
        return int(widest * self._element * (2 if spread else 1))


def adapter_bytes(args: Args, adapters: AdapterCount) -> int:
    """Return the bytes of an adapter in the precision in which engines hold it."""
    return adapters.rank * adapters.widths * (2 if args.precision == "bf16" else 4)


def moments_name(args: Args) -> str:
    names = {"adam": "Adam's moments", "sgd": "SGD's momentum"}
    return names.get(args.optimizer, "Muon's momentum, Adam's moments")


def frozen_models(args: Args) -> list[str]:
    """Return the models beside the actor that are not trained; with LoRA the reference is the base itself."""
    names = ["reference"] if (args.use_kl_loss or args.kl_coef) and not args.lora_rank else []
    return [*names, "teacher"] if args.use_opd and args.opd_type == "megatron" else names


def offloaded_share(args: Args) -> float:
    """Return the share of the optimizer offloaded by --optimizer-cpu-offload; default: all."""
    fraction = args.optimizer_offload_fraction
    return 1.0 if fraction is None else fraction


def virtual_stages(args: Args, layers: int) -> int:
    if args.train_backend != "megatron":
        return 1
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if per_stage:
        return layers // args.pipeline_model_parallel_size // per_stage
    chosen = args.virtual_pipeline_model_parallel_size or args.num_virtual_stages_per_pipeline_rank
    return chosen or 1


# FP8 matmuls of Hopper read both operands along the summed dimension, so the backward pass needs
# transposed weights: one byte per element each way. Scales, of 128 x 128 or more, are under 0.1 %.
_FP8_COPIES = 2
_BYTES = {"float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1}


def fp8_copy_bytes(args: Args, shape: Shape, rank: RankModel, tp: int) -> int:
    """Return the bytes of the FP8 copies of linear weights, which persist between steps."""
    if not (uses_te(args) and args.fp8_format):
        return 0
    tables = rank.has_embedding + (rank.has_head and not (shape.tied and rank.has_embedding))
    outside = tables * math.ceil(shape.vocab / tp) * shape.hidden
    return _FP8_COPIES * max(rank.parameters - outside, 0)


def optimizer_bytes(args: Args, rank: RankModel) -> tuple[int, int]:
    """Return (master weights, moments) on the GPU, as the precision-aware optimizer keeps them."""
    precision_aware = args.use_precision_aware_optimizer and not args.optimizer_cpu_offload
    if not precision_aware:
        return rank.master_bytes, rank.moment_bytes
    # The upper half of an fp32 master is the bf16 weight, so only the lower 16 bits are stored.
    halved = args.store_param_remainders is not False or _size(args.main_params_dtype) == 2
    master = rank.master_bytes // 2 if halved else rank.master_bytes
    first, second = (_size(args.exp_avg_dtype), _size(args.exp_avg_sq_dtype))
    return master, int(rank.moment_bytes * (first + second) / 8)


def _size(dtype: object) -> int:
    return 4 if dtype is None else _BYTES.get(str(dtype).removeprefix("torch."), 4)

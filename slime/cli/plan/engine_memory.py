"""GPU memory of an engine: weights, KV cache, CUDA graphs; and how many requests fit."""

from __future__ import annotations

from dataclasses import dataclass

from slime.backends.model_size import AdapterCount, ModelCount, WholeModel
from slime.cli.plan.memory import GIB, Item
from slime.cli.plan.model_shape import Shape, read_shape
from slime.cli.plan.rank_layout import longest_sample
from slime.cli.plan.trainer_memory import CUDA_CONTEXT, NCCL_GROUP
from slime.config.arguments import Args
from slime.config.engine_groups import default_model, engines_of

_DEFAULT_FRACTION = 0.85
_DEFAULT_CHUNK = 8192
_DEFAULT_SLOTS = 8  # adapters of an engine, of SGLang too
_DEFAULT_RUNNING = 256  # running requests of the embedded engine
_STATE_SHARE = 0.9 / 1.9  # of the cache is for recurrent states, in both engines
_GRAPH_ROW = 2 << 20  # bytes that SGLang reserves per row of its largest CUDA graph
_SCALE_BYTES = 4 / (128 * 128)
_MATRICES = ("attention", "kv", "latent", "mlp", "shared", "experts")


@dataclass(frozen=True, kw_only=True)
class KVCache:
    """KV cache of one engine; a request at full length is the longest prompt plus response."""

    bytes_per_gpu: int
    bytes_per_token: int  # on one GPU
    tokens: int
    longest_request: int
    requests_at_full_length: int
    requests_wanted: int  # concurrent requests of a rollout to each engine

    @property
    def holds_one(self) -> bool:
        return self.tokens >= self.longest_request


@dataclass(frozen=True, kw_only=True)
class States:
    """Recurrent states of one engine: of running requests, of padding, and saved for prefixes."""

    each: int  # bytes on one GPU
    running: int
    saved: int

    @property
    def nbytes(self) -> int:
        return self.each * (self.running + 1 + self.saved)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One engine; `args` are its own, which differ between groups of --sglang-config."""

    args: Args
    shape: Shape
    whole: WholeModel
    capacity: float  # bytes of one GPU
    adapters: AdapterCount | None = None  # of the model, if it serves some

    @property
    def tp(self) -> int:
        return max(self.args.rollout_num_gpus_per_engine // (self.args.sglang_pp_size or 1), 1)

    @property
    def dp(self) -> int:
        """Return the size of data-parallel attention inside the engine."""
        if self.args.sglang_enable_dp_attention:
            return self.args.sglang_dp_size or 1
        return self.args.sglang_attn_dp_size or 1

    @property
    def attention_tp(self) -> int:
        return max(self.tp // self.dp, 1)

    def weights(self) -> int:
        element = 1 + _SCALE_BYTES if self._in_fp8 else self._element
        size = 0.0
        for part, count in self.whole.by_part.items():
            each = element if part in _MATRICES else self._element
            size += count / self._split(part) * each
        return int(size / (self.args.sglang_pp_size or 1))

    @property
    def _in_fp8(self) -> bool:
        """Whether weights are served in FP8: the embedded engine dequantizes them when it loads."""
        return self.shape.fp8 and self.args.rollout_engine != "slime"

    def static(self) -> list[Item]:
        """Return weights and KV cache, which --sglang-mem-fraction-static bounds."""
        cache = self.cache().bytes_per_gpu
        given = self.args.sglang_mem_fraction_static is not None
        note = f"fraction {self.fraction:g}" + ("" if given else ", the default")
        kind = "fp8" if self._in_fp8 else self.args.precision
        items = [
            Item(name="engine weights", nbytes=self.weights(), note=kind),
            Item(name="adapter slots", nbytes=self.slots(), note=f"{self._num_slots} slots"),
            Item(name="KV cache", nbytes=cache, note=note),
        ]
        states = self.states()
        if states is not None:
            kept = f"{states.running} requests, {states.saved} prefixes"
            items.append(Item(name="recurrent states", nbytes=states.nbytes, note=kept))
        return [item for item in items if item.nbytes or item.name != "adapter slots"]

    def slots(self) -> int:
        """Return the bytes of the adapter slots, which exist for every linear module."""
        if self.adapters is None or not self.args.sglang_enable_lora:
            return 0
        rank = self.args.sglang_max_lora_rank or self.adapters.rank
        return self._num_slots * rank * self.adapters.served * self._element

    def working(self) -> list[Item]:
        items = [Item(name="engine activations", nbytes=self._activations(), note="prefill chunk")]
        graphs = self._graph_rows() * _GRAPH_ROW
        if graphs and not self.args.sglang_disable_cuda_graph:
            note = f"up to {self._graph_rows()} rows"
            items.append(Item(name="CUDA graphs", nbytes=graphs, note=note))
        return items

    def overhead(self) -> list[Item]:
        items = [Item(name="engine's CUDA context", nbytes=CUDA_CONTEXT, note="assumed")]
        if self.args.rollout_num_gpus_per_engine > 1:
            items.append(Item(name="engine's NCCL buffers", nbytes=2 * NCCL_GROUP, note="assumed"))
        return items

    @property
    def fraction(self) -> float:
        return self.args.sglang_mem_fraction_static or _DEFAULT_FRACTION

    def _free(self) -> float:
        """Return the bytes for the KV cache and recurrent states."""
        overheads = sum(item.nbytes for item in self.overhead())
        if self.args.rollout_engine == "slime":  # its fraction is of the whole GPU
            return self.capacity * self.fraction - self.weights() - self.slots() - overheads
        return (self.capacity - overheads) * self.fraction - self.weights() - self.slots()

    def states(self) -> States | None:
        """Return the recurrent states that the embedded engine allocates; SGLang's are about as large."""
        shape = self.shape
        if not shape.linear_layers:
            return None
        layers = -(-shape.linear_layers // (self.args.sglang_pp_size or 1))
        size = 4 * shape.state_size + self._element * shape.window_size
        each = layers * size // self.attention_tp
        rows = max(int(self._free() * _STATE_SHARE) // each - 1, 1)
        cached = not self.args.sglang_disable_radix_cache
        most = min(max(rows // 2, 1) if cached else rows, _DEFAULT_RUNNING)
        running = self.args.sglang_max_running_requests or most
        saved = min(max(rows - running, 0), running) if cached else 0
        return States(each=each, running=running, saved=saved)

    def cache(self) -> KVCache:
        per_token, states = self._bytes_per_token(), self.states()
        free = self._free() - (0 if states is None else states.nbytes)
        page = self.args.sglang_page_size or 1
        tokens = max(int(free // per_token) // page * page, 0)
        if given := self.args.sglang_max_total_tokens:  # SGLang takes fewer where they do not fit
            tokens = given if self.args.rollout_engine == "slime" else min(tokens, given)
        longest = longest_sample(self.args, self.shape)
        return KVCache(
            bytes_per_gpu=tokens * per_token,
            bytes_per_token=per_token,
            tokens=tokens * self.dp,
            longest_request=longest,
            requests_at_full_length=min(tokens // longest * self.dp, self._max_running()),
            requests_wanted=self._wanted(),
        )

    def _wanted(self) -> int:
        engines = max(self.args.rollout_num_gpus // self.args.rollout_num_gpus_per_engine, 1)
        samples = self.args.over_sampling_batch_size * self.args.n_samples_per_prompt
        return min(-(-samples // engines), self.args.sglang_server_concurrency)

    def _max_running(self) -> int:
        states = self.states()
        if states is not None:
            return states.running
        given = self.args.sglang_max_running_requests
        return given or (_DEFAULT_RUNNING if self.args.rollout_engine == "slime" else 1 << 30)

    @property
    def _num_slots(self) -> int:
        return self.args.sglang_max_loras_per_batch or _DEFAULT_SLOTS

    @property
    def _element(self) -> int:
        return 2 if self.args.precision == "bf16" else 4

    def _split(self, part: str) -> int:
        """Return the number of GPUs that a part is sharded over; all other GPUs hold replicas."""
        alone = self.dp > 1 and self.args.sglang_moe_dense_tp_size
        deepep = self.args.sglang_moe_a2a_backend in ("deepep", "mooncake")
        shards = {
            "experts": self.tp,
            "attention": self.attention_tp,
            "kv": min(self.attention_tp, self.shape.kv_heads),
            "mlp": self.args.sglang_moe_dense_tp_size if alone else self.tp,
            "shared": 1 if deepep else self.tp,
            "embedding": self.tp if self.dp == 1 else 1,
            "head": self.attention_tp if self.args.sglang_enable_dp_lm_head else self.tp,
        }
        return shards.get(part) or 1

    def _bytes_per_token(self) -> int:
        dtype = str(self.args.sglang_kv_cache_dtype or "auto")
        element = 1 if dtype.startswith("fp8") else self._element
        attending = self.shape.layers - self.shape.linear_layers
        layers = -(-attending // (self.args.sglang_pp_size or 1))
        if self.shape.latent:
            return layers * (self.shape.kv_lora + self.shape.rope_dim) * element
        heads = max(self.shape.kv_heads / self.attention_tp, 1)
        return int(layers * 2 * heads * self.shape.head_dim * element)

    def _activations(self) -> int:
        chunk = self.args.sglang_chunked_prefill_size or _DEFAULT_CHUNK
        if self.dp > 1:
            chunk = max(chunk // self.dp, 1)
        shape = self.shape
        dense = 3 * shape.ffn / self.tp
        expert = shape.experts_per_token * (3 * shape.expert_ffn + 2 * shape.hidden) / self.tp
        wide = max(dense, expert * self.dp) + 4 * shape.hidden
        logits = min(self._wanted(), 512) * shape.vocab * (4 + 2)
        return int(chunk * wide * self._element + logits)

    def _graph_rows(self) -> int:
        given = self.args.sglang_cuda_graph_bs or self.args.sglang_cuda_graph_max_bs
        if given:
            return max(given) if isinstance(given, list) else given
        if self.args.rollout_engine == "slime":
            return self.args.sglang_max_running_requests or _DEFAULT_RUNNING
        if self.capacity < 60 * GIB:
            return 80
        return 256 if self.tp < 4 else 512


@dataclass(frozen=True, kw_only=True)
class PlannedEngine:
    model: str
    role: str
    colocated: bool  # on a GPU of the trainer
    memory: Engine

    @property
    def title(self) -> str:
        return self.model if self.role == "regular" else f"{self.model} {self.role}"


def planned_engines(args: Args, count: ModelCount, capacity: float) -> list[PlannedEngine]:
    """Return every engine of the run in the order of its GPUs; those of one group share one `memory`."""
    specs = [] if args.rollout_external else engines_of(args)
    training = args.num_training_gpus
    engines: list[PlannedEngine] = []
    for spec in specs:
        last = engines[-1].memory if engines else None
        size, number = len(spec.gpus), sum(other.model == spec.model for other in specs)
        own = spec.args
        if args.engine_models:  # requests of a rollout are spread over the engines of one model
            own = spec.args.replace(rollout_num_gpus=size * number)
        if last is None or last.args != own:
            last = Engine(
                args=own,
                shape=read_shape(own.hf_checkpoint),
                whole=count.served.get(own.hf_checkpoint, count.whole),
                capacity=capacity,
                adapters=count.adapters if own.hf_checkpoint == args.hf_checkpoint else None,
            )
        engines.append(
            PlannedEngine(
                model=spec.model,
                role=spec.worker_type,
                colocated=args.colocate and spec.gpus.start < training,
                memory=last,
            )
        )
    return engines


def policy_engine(args: Args, engines: list[PlannedEngine]) -> PlannedEngine | None:
    """Return an engine of the model that is trained."""
    if not engines:
        return None
    name = default_model(args).name
    return next(engine for engine in engines if engine.model == name)

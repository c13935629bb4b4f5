"""The perf/ metrics: seconds per phase, FLOPs counted from a model's shape, throughput.

A multiply-add is two FLOPs. A forward pass costs two per token and weight of the matrices that the
token passes through, plus attention; a backward pass costs twice the forward.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from slime.core.types import Activity
from slime.diagnosis.process_status import in_phase
from slime.utils.machine import process_memory

_MAX_SPANS = 2000  # kept between two reports
TRAIN_FLOPS = "perf/train_flops"  # what train_flops() counts, over all ranks
# Dense bf16 FLOP/s from the vendor's data sheet, by the driver's name of the GPU.
_PEAK_BF16 = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "A10": 125e12,
}


@dataclass(kw_only=True, frozen=True)
class ModelShape:
    """The matrices of a causal transformer. Qwen3-4B: hidden 2560, 36 layers, 32 heads of 128, 8 KV."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int  # of a dense layer
    experts_per_token: int = 0  # in an MoE layer
    expert_ffn: int = 0
    shared_ffn: int = 0
    num_experts: int = 0
    dense_layers: int | None = None  # None: all of them, or none in an MoE model
    linear_layers: int = 0  # gated delta nets; the other layers' attention then has a gate
    linear_width: int = 0  # rows of the projections of one
    linear_state: int = 0  # elements of its state
    latent_weights: int = 0  # of the projections of one layer with multi-head latent attention
    latent_dims: int = 0  # of a head's queries and values there

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the content of config.json, or a HF config's to_dict()."""
        config = {**config, **(config.get("text_config") or {})}  # beside a vision tower
        heads = config["num_attention_heads"]
        experts = config.get("num_experts") or config.get("n_routed_experts") or 0
        experts = experts or config.get("num_local_experts") or 0
        width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
        shared = config.get("shared_expert_intermediate_size")
        shared = shared or width * (config.get("n_shared_experts") or 0)
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            ffn=config.get("intermediate_size") or 0,
            num_experts=experts,
            experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
            expert_ffn=width,
            shared_ffn=shared,
            dense_layers=config.get("first_k_dense_replace"),
            **_delta_nets(config),
            **_latent_attention(config),
        )

    @property
    def weights_per_token(self) -> int:
        """Count the weights that one token is multiplied with, including the output head."""
        heads = 2 * self.heads + 2 * self.kv_heads  # q and o, k and v
        heads += self.heads if self.linear_layers else 0
        full, linear = self.layers - self.linear_layers, self.linear_layers * self.linear_width
        one = self.latent_weights or self.hidden * heads * self.head_dim
        attention = full * one + self.hidden * linear
        dense = 3 * self.hidden * self.ffn
        expert = 3 * self.hidden * (self.experts_per_token * self.expert_ffn + self.shared_ffn)
        expert += self.hidden * self.num_experts  # the router
        dense_layers = self.dense_layers or 0 if self.num_experts else self.layers
        mixed = dense_layers * dense + (self.layers - dense_layers) * expert
        return attention + mixed + self.hidden * self.vocab


def _latent_attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of multi-head latent attention (DeepSeek-V3), as the trainer computes it."""
    kv_rank, q_rank = config.get("kv_lora_rank"), config.get("q_lora_rank")
    if not kv_rank:
        return {}
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    query, value = heads * (nope + rope), heads * config["v_head_dim"]
    q = q_rank * (hidden + query) if q_rank else hidden * query
    kv = hidden * (kv_rank + rope) + kv_rank * (heads * nope + value)
    return {
        "latent_weights": q + kv + value * hidden,
        "latent_dims": nope + rope + config["v_head_dim"],
    }


def _delta_nets(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of gated delta nets; by default three in four layers have one."""
    values = config.get("linear_num_value_heads")
    if not values:
        return {}
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types")
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * key_dim
    return {
        "linear_layers": kinds.count("linear_attention") if kinds else layers - layers // every,
        "linear_width": 2 * keys + 3 * values * value_dim + 2 * values,  # q, k; v, z, out; b, a
        "linear_state": values * key_dim * value_dim,
    }


def forward_flops(shape: ModelShape, lens: Iterable[int]) -> float:
    """Return the FLOPs of a forward pass over sequences of these lengths, with causal attention."""
    lens = list(lens)
    pairs = sum(n * (n + 1) / 2 for n in lens)
    full = shape.layers - shape.linear_layers
    dims = shape.latent_dims or 2 * shape.head_dim  # scores, and the sum of values
    attention = 2 * full * shape.heads * dims * pairs
    # A token reads a state with its key, writes to it, and reads it with its query.
    states = 6 * shape.linear_layers * shape.linear_state * sum(lens)
    return 2.0 * shape.weights_per_token * sum(lens) + attention + states


def train_flops(shape: ModelShape, lens: Iterable[int]) -> float:
    """Return the FLOPs of a forward and backward pass; recomputation does not count."""
    return 3.0 * forward_flops(shape, lens)


def peak_flops(gpu_name: str) -> float | None:
    """Return the bf16 FLOP/s of a GPU from its data sheet; None if it is not in the table."""
    matches = [name for name in _PEAK_BF16 if name in gpu_name]
    return _PEAK_BF16[max(matches, key=len)] if matches else None


def throughput_metrics(
    metrics: Mapping[str, float], *, num_gpus: int, train_gpus: int, peak_flops: float | None
) -> dict[str, float]:
    """Return the speeds that follow from the given metrics of a rollout; see docs/metrics.md.

    1,000 response tokens in a step of 4 s on 2 GPUs: perf/tokens_per_second is 250 and
    perf/tokens_per_gpu_per_second 125. On a CPU "GPU" means process, and there is no MFU.
    """
    rates: dict[str, float] = {}
    step, train = metrics.get("perf/step_time"), metrics.get("perf/train_time")
    if step and "rollout/tokens" in metrics:
        rates["perf/tokens_per_second"] = metrics["rollout/tokens"] / step
        rates["perf/tokens_per_gpu_per_second"] = metrics["rollout/tokens"] / step / num_gpus
    if train and "perf/train_tokens" in metrics:
        rates["perf/train_tokens_per_second"] = metrics["perf/train_tokens"] / train
    if train and TRAIN_FLOPS in metrics:
        per_gpu = metrics[TRAIN_FLOPS] / train / train_gpus
        rates["perf/train_tflops_per_gpu"] = per_gpu / 1e12
        if peak_flops:
            rates["perf/mfu"] = per_gpu / peak_flops
    return rates


class Timer:
    """Sums the seconds spent in named phases; `take()` returns and resets them.

    A phase inside another carries both names. Three seconds in `phase("train")`, one of them in
    `phase("log_probs")` within it, taken 5 seconds after the previous take::

        {"perf/train_time": 3.0, "perf/train/log_probs_time": 1.0, "perf/step_time": 5.0}

    Each thread nests on its own, so phases of two threads may overlap and exceed `perf/step_time`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds: dict[str, float] = {}
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_MAX_SPANS)
        self._taken_at = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = getattr(self._local, "path", "")
        path = f"{outer}/{name}" if outer else name
        self._local.path = path
        started, began = self._clock(), time.time()
        try:
            with in_phase(path):
                yield
        finally:
            self._local.path = outer
            self.add(path, self._clock() - started)
            self._spans.append((path, round(began, 3), round(time.time(), 3)))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere, such as in another process."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds per phase and in total since the previous take, as metrics."""
        with self._lock:
            now = self._clock()
            metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
            metrics["perf/step_time"] = now - self._taken_at
            self._seconds, self._taken_at = {}, now
        return metrics

    def activity(self) -> Activity:
        """Return the phases that ended since the previous call, and the memory of this process."""
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        return Activity(spans=spans, memory=process_memory())

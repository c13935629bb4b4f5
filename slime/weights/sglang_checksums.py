"""Predict the checksums of an SGLang server from the Hugging Face tensors that are sent to it.

SGLang fuses q, k and v, and gate and up, into one parameter each, all experts of a layer into two,
pads the vocabulary with zeros, and shards the result over its tensor-parallel ranks. Where all of
that is known, the checksum of each parameter follows from what is sent. SGLang's hash of a tensor
is computed here in plain torch: SGLang need not be installed with the trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.weights.fp8 import FP8, dequantize
from slime.weights.fp8_format import Choice, Fp8Format, format_of, is_quantized

_EXACT = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3VLForConditionalGeneration",
    }
)
# Models of which the vision tower is known, and the language model is not.
_TOWER_ONLY = frozenset(
    {
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
_TOWER, _LANGUAGE = "model.visual.", "model.language_model."  # prefixes of Hugging Face's names
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_PART = {part: (fused, parts) for fused, parts in _FUSED.items() for part in parts}
_ROW_PARALLEL = ("o_proj", "down_proj")
_EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")
_VOCABULARY = ("embed_tokens", "lm_head")
_VOCABULARY_MULTIPLE = 64
_MAX_EXPERT_BYTES = 2**31  # of one layer: they are kept until all have arrived
# Settings that change the layout of parameters in ways that are not modelled here.
_OTHER_SHARDING = (
    "dp_size",
    "attn_dp_size",
    "attn_cp_size",
    "moe_dp_size",
    "moe_dense_tp_size",
    "enable_dp_attention",
    "enable_dp_lm_head",
    "enable_eplb",
    "ep_num_redundant_experts",
    "enable_lora",
    "speculative_algorithm",
    "torchao_config",
)


@dataclass(kw_only=True, frozen=True)
class Sharding:
    """How a server shards a model: tensor-parallel ranks, and expert-parallel groups of them."""

    tp_size: int = 1
    ep_size: int = 1
    num_kv_heads: int | None = None
    num_experts: int | None = None

    width_multiple: int = 1  # the inner width of MLPs and experts is zero-padded to it
    sums_experts: bool = True  # whether experts keep the layout in which they are sent
    only_tower: bool = False  # whether the layout of the language model is not known

    def kv_shard(self, rank: int) -> tuple[int, int]:
        """Return (number of KV shards, index of this rank's); few heads are replicated over ranks."""
        if self.tp_size == 1:
            return 1, 0
        assert self.num_kv_heads is not None
        parts = min(self.tp_size, self.num_kv_heads)
        return parts, rank * parts // self.tp_size


@dataclass(kw_only=True, frozen=True)
class ModelFacts:
    """What the layout depends on besides the tensors."""

    num_kv_heads: int | None = None
    num_experts: int | None = None
    fp8: Fp8Format | None = None
    quantizes: Choice = is_quantized  # with `fp8`: which tensors are in FP8


def model_facts(config: dict[str, Any]) -> ModelFacts:
    """Read a Hugging Face config.json."""
    inner = config.get("text_config") or config
    counts = (inner.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
    return ModelFacts(
        num_kv_heads=inner.get("num_key_value_heads") or inner.get("num_attention_heads"),
        num_experts=next((count for count in counts if count), None),
        fp8=format_of(config),
    )


def sharding_of(
    server: Mapping[str, object], architectures: list[str] | None, model: ModelFacts
) -> Sharding | None:
    """Read the reply of /server_info; return None if the layout is not known exactly."""
    names = set(architectures or ())
    only_tower = bool(names) and names <= _TOWER_ONLY
    known = bool(names) and (names <= _EXACT or only_tower)
    in_bytes = model.fp8 is not None and model.fp8.scale_suffix == "weight_scale_inv"
    quantized = server.get("quantization") is not None or model.fp8 is not None
    if not known or not all(_is_plain(server.get(name)) for name in _OTHER_SHARDING):
        return None
    if quantized and not in_bytes:
        return None
    tp_size, ep_size = _number(server, "tp_size"), _number(server, "ep_size")
    if tp_size > 1 and not (model.num_kv_heads and _divides(tp_size, model.num_kv_heads)):
        return None
    if model.num_experts and (model.num_experts % ep_size or tp_size % ep_size):
        return None
    if tp_size > 1 and any("ConditionalGeneration" in name for name in names):
        return None  # how the tower is sharded is not modelled here
    on_cpu = server.get("device") == "cpu"
    if on_cpu and (model.num_kv_heads or 1) % tp_size:  # heads are padded there
        return None
    return Sharding(
        tp_size=tp_size,
        ep_size=ep_size,
        num_kv_heads=model.num_kv_heads,
        num_experts=model.num_experts,
        width_multiple=tp_size * (model.fp8.block[0] if model.fp8 else 32) if on_cpu else 1,
        sums_experts=on_cpu or server.get("moe_runner_backend") == "triton",
        only_tower=only_tower,
    )


def _is_plain(setting: object) -> bool:
    """Return whether a setting is unset, off, or the size of a group of one."""
    return not setting or (setting == 1 and setting is not True)


def _number(server: Mapping[str, object], name: str) -> int:
    value = server.get(name)
    return value if isinstance(value, int) and value > 0 else 1


def _divides(one: int, other: int) -> bool:
    return max(one, other) % min(one, other) == 0


class PredictedChecksums:
    """Checksums of the parameters as each rank holds them; tensors may be added in any order."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        self.sums: list[dict[str, str]] = [{} for _ in range(sharding.tp_size)]
        self._parts: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor by its Hugging Face name."""
        if name.startswith(_TOWER):
            self._add_of_tower(name.removeprefix("model."), tensor)
        elif not self.sharding.only_tower:
            self._add_of_language_model(name.replace(_LANGUAGE, "model.", 1), tensor)

    def may_be_unsent(self, name: str) -> bool:
        """Return whether an engine may hold a parameter that is not among the sums.

        These are a tied output layer, a frozen tower, experts whose checksums could not be predicted,
        and tables that SGLang computes itself.
        """
        if self.sharding.only_tower and not name.startswith("visual."):
            return True
        computed = name.endswith(".rotary_emb.axis_map")
        groups = (part for part in ("visual.", ".experts.") if part in name)
        unsent = any(not any(part in sent for sent in self.sums[0]) for part in groups)
        return name.startswith("lm_head.") or computed or unsent

    def _add_of_tower(self, name: str, tensor: torch.Tensor) -> None:
        name = name.replace(".attn.qkv.", ".attn.qkv_proj.")
        if name == "visual.pos_embed.weight":
            tensor = _padded_vocabulary(tensor, 1)
        elif ".mlp.linear_fc1." in name:
            tensor = self._padded_width(tensor, 0)
        elif name.endswith(".mlp.linear_fc2.weight"):
            tensor = self._padded_width(tensor, 1)
        self._put(name, lambda rank: [tensor])

    def _add_of_language_model(self, name: str, tensor: torch.Tensor) -> None:
        module, _, rest = name.rpartition(".")
        prefix, _, last = module.rpartition(".")
        if tensor.dtype == FP8 or rest == "weight_scale_inv":
            self._add_fp8(module, rest, tensor)
        elif last in _VOCABULARY or module in _VOCABULARY:
            whole = _padded_vocabulary(tensor, self.sharding.tp_size)
            self._put(name, lambda rank: [_shard(whole, 0, self.sharding.tp_size, rank)])
        elif ".experts." in prefix and last in _EXPERT_PARTS:
            self._add_expert(prefix, last, tensor)
        elif last in _PART:
            fused, order = _PART[last]
            self._add_part(f"{prefix}.{fused}.{rest}", last, order, tensor)
        elif last in _ROW_PARALLEL and tensor.ndim == 2:
            wide = self._padded_width(tensor, 1) if last == "down_proj" else tensor
            self._put(name, lambda rank: [_shard(wide, 1, self.sharding.tp_size, rank)])
        else:
            self._put(name, lambda rank: [tensor])

    def _add_fp8(self, module: str, rest: str, tensor: torch.Tensor) -> None:
        """Dequantize to bfloat16, of which SGLang computes the checksum of block-wise FP8."""
        parts = self._collect(f"{module} (fp8)", rest, tensor, 2)
        if parts is not None:
            weight, scale = parts["weight"], parts["weight_scale_inv"]
            block = -(-weight.shape[1] // scale.shape[1])
            layout = Fp8Format(strategy="block", block=(block, block))
            self._add_of_language_model(
                f"{module}.weight", dequantize(weight, scale, layout).bfloat16()
            )

    def _add_part(
        self, fused: str, part: str, order: tuple[str, ...], tensor: torch.Tensor
    ) -> None:
        parts = self._collect(fused, part, tensor, len(order))
        if parts is not None:
            self._put(fused, lambda rank: [self._part(parts[one], one, rank) for one in order])

    def _part(self, tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        parts, place = self.sharding.tp_size, rank
        if name in ("k_proj", "v_proj"):
            parts, place = self.sharding.kv_shard(rank)
        wide = tensor if name in _FUSED["qkv_proj"] else self._padded_width(tensor, 0)
        return _shard(wide, 0, parts, place)

    def _add_expert(self, prefix: str, part: str, tensor: torch.Tensor) -> None:
        experts, _, number = prefix.rpartition(".")
        count = self.sharding.num_experts or 0
        if not self.sharding.sums_experts or 3 * count * tensor.nbytes > _MAX_EXPERT_BYTES:
            return
        parts = self._collect(experts, f"{number}.{part}", tensor, 3 * count)
        if parts is None:
            return
        local, size = count // self.sharding.ep_size, self.sharding.tp_size // self.sharding.ep_size

        def of(rank: int, names: tuple[str, ...], dim: int) -> list[torch.Tensor]:
            first = rank // size * local
            return [
                _shard(self._padded_width(parts[f"{expert}.{name}"], dim), dim, size, rank % size)
                for expert in range(first, first + local)
                for name in names
            ]

        self._put(f"{experts}.w13_weight", lambda rank: of(rank, ("gate_proj", "up_proj"), 0))
        self._put(f"{experts}.w2_weight", lambda rank: of(rank, ("down_proj",), 1))

    def _padded_width(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return _zero_padded(tensor, dim, self.sharding.width_multiple)

    def _collect(
        self, whole: str, part: str, tensor: torch.Tensor, count: int
    ) -> dict[str, torch.Tensor] | None:
        """Keep one part; return all parts once the last has arrived."""
        parts = self._parts.setdefault(whole, {})
        parts[part] = tensor.clone()  # the buffer of its bucket is reused
        return self._parts.pop(whole) if len(parts) == count else None

    def _put(self, name: str, of_rank: Callable[[int], list[torch.Tensor]]) -> None:
        for rank, sums in enumerate(self.sums):
            sums[name] = _digest(of_rank(rank))


def _shard(tensor: torch.Tensor, dim: int, parts: int, place: int) -> torch.Tensor:
    size = tensor.shape[dim] // parts
    return tensor if parts == 1 else tensor.narrow(dim, place * size, size)


def _padded_vocabulary(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    multiple = _VOCABULARY_MULTIPLE
    if (tensor.shape[0] + -tensor.shape[0] % multiple) % parts:
        multiple *= parts
    return _zero_padded(tensor, 0, multiple)


def _zero_padded(tensor: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    after = (0, 0) * (tensor.ndim - 1 - dim)  # pad counts dimensions from the last one
    return torch.nn.functional.pad(tensor, (*after, 0, missing))


def _digest(tensors: list[torch.Tensor]) -> str:
    if tensors[0].is_cuda:
        flat = [tensor.reshape(-1) for tensor in tensors]
        return f"{gpu_hash(flat[0] if len(flat) == 1 else torch.cat(flat)):016x}"
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


_WORD = 0xFFFFFFFF
_TILE = 8192  # words
_CHUNK_TILES = 512  # at once: 4 Mi words
_SEED = 0x243F6A88
# For each half of the result: factor of the position, its rotation, seed.
_HALVES = (
    (0x27D4EB2D, 15, _SEED),
    (0x165667B1, 13, ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD),
)


@torch.no_grad()
def gpu_hash(tensor: torch.Tensor) -> int:
    """Return the checksum, an unsigned 64-bit integer; works on any device."""
    words = _words(tensor)
    total = 0
    for start in range(0, words.numel(), _TILE * _CHUNK_TILES):
        chunk = words[start : start + _TILE * _CHUNK_TILES]
        total += _sum_of_tiles(chunk, start, 4 * words.numel())
    return _splitmix(total) if words.numel() else 0


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() % 4:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 4))
    return flat.view(torch.int32)


def _sum_of_tiles(words: torch.Tensor, start: int, nbytes: int) -> int:
    place = torch.arange(start, start + words.numel(), device=words.device) & _WORD
    value = words.long() & _WORD
    halves = []
    for factor, turn, seed in _HALVES:
        mixed = _mix(value ^ ((place * factor + seed) & _WORD) ^ _rotate(place, turn))
        rows = torch.nn.functional.pad(mixed, (0, -mixed.numel() % _TILE)).view(-1, _TILE)
        halves.append(_mix((rows.sum(1) & _WORD) ^ (nbytes & _WORD)))
    return int(((halves[0] << 32) | halves[1]).sum()) % 2**64  # sums wrap around


def _mix(word: torch.Tensor) -> torch.Tensor:
    word = word ^ (word >> 16)
    word = (word * 0x85EBCA6B) & _WORD
    word = word ^ (word >> 13)
    word = (word * 0xC2B2AE35) & _WORD
    return word ^ (word >> 16)


def _rotate(word: torch.Tensor, turn: int) -> torch.Tensor:
    return ((word << turn) | (word >> (32 - turn))) & _WORD


def _splitmix(value: int) -> int:
    value %= 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)

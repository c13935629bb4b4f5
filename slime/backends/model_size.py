"""Tensor sizes of trainer ranks and of a full model, counted on the meta device.

`count_models` counts in subprocesses, `python -m slime.backends.model_size`, because building
Megatron on the meta device patches torch process-wide. A subprocess reads pickled requests from
stdin, which only `count_models` writes, and prints one JSON line.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import slime
from slime.config.checks.model_types import in_tower, takes_images
from slime.config.env import child_env, read_env
from slime.config.peft_files import is_experts
from slime.core.errors import ConfigError, UserError
from slime.utils.machine import usable_cores

if TYPE_CHECKING:
    from slime.config.arguments import Args
    from slime.config.lora import LoraConfig

_ANSWER = "COUNTED "
_MOST_CHILDREN = 8  # each needs up to 1 GB of host memory
# A parameter belongs to the part of the first pattern that matches its name.
_PARTS = (
    ("other", r"\bvisual\."),  # a vision tower
    ("embedding", r"embed_tokens|wte"),
    ("head", r"lm_head"),
    ("experts", r"\.experts\."),
    ("router", r"router|\.gate\."),
    ("shared", r"shared_expert"),
    ("kv", r"self_attn\.(k_proj|v_proj)"),
    ("latent", r"self_attn\.(q_a_proj|kv_a_proj)"),
    ("other", r"norm"),
    ("attention", r"self_attn|attn"),
    ("mlp", r"\.mlp\."),
)


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """Sizes on one trainer rank; `*_sizes` are histograms {bytes or elements: number of tensors}.

    Two of 64 GPUs that share a pipeline stage of GLM-4.5 hold `parameters=5_353_918_464` each, of
    which 4_718_592_000 are experts that no other rank has; the optimizer state of a rank covers all
    of those and half of the rest.
    """

    rank: int
    parameters: int
    expert_parameters: int
    trained_parameters: int
    weight_sizes: dict[int, int]  # bytes of parameters and buffers
    weight_storages: list[int]  # bytes of their storages, padding included
    gradient_storages: list[int]  # bytes of persistent gradient buffers; empty for FSDP
    master_sizes: dict[int, int]  # elements of the optimizer's fp32 master weights
    moment_sizes: dict[int, int]  # elements with two fp32 moments (Adam)
    dense_layers: int
    moe_layers: int
    has_embedding: bool
    has_head: bool
    momentum_sizes: dict[int, int] = field(default_factory=dict)  # with one moment (Muon, SGD)
    fp8_parameters: int = 0  # of a frozen base that is held in FP8 blocks

    @property
    def weight_bytes(self) -> int:
        return sum(self.weight_storages)

    @property
    def gradient_bytes(self) -> int:
        return sum(self.gradient_storages)

    @property
    def master_bytes(self) -> int:
        return 4 * sum(size * count for size, count in self.master_sizes.items())

    @property
    def moment_bytes(self) -> int:
        twice = sum(size * count for size, count in self.moment_sizes.items())
        once = sum(size * count for size, count in self.momentum_sizes.items())
        return 8 * twice + 4 * once


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """Sizes of the full Hugging Face model, as engines load it: elements by part of the model."""

    total: int
    by_part: dict[str, int]  # part (`_PARTS`) -> elements
    layer: int  # elements of the largest decoder layer
    buffers: int  # bytes
    largest_tensor: int  # elements; experts excluded


@dataclass(frozen=True, kw_only=True)
class AdapterCount:
    """Sizes of LoRA adapters: A of a module has rank x in elements, B has out x rank.

    `widths` is in + out over all modules with an adapter, so they have rank x widths elements: for all
    linear modules of Qwen3-4B 36 x 57,344, so rank 16 has 33,030,144.
    """

    rank: int
    widths: int
    layer: int  # the same of the largest decoder layer
    modules: int  # with an adapter, in a decoder layer
    in_mlp: bool  # whether dense MLPs have some
    served: int  # in + out over all linear modules, for which engines allocate slots


@dataclass(frozen=True, kw_only=True)
class ModelCount:
    whole: WholeModel
    ranks: list[RankModel]
    attention_repeats_keys: bool  # the installed torch's attention kernel has no GQA
    long_sample: int  # tokens from which cuDNN may compute a sample
    torch_version: str
    # other models of engines, by folder
    served: dict[str, WholeModel] = field(default_factory=dict)
    adapters: AdapterCount | None = None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ModelCount:
        ranks = [_rank_from_json(rank) for rank in raw["ranks"]]
        adapters = AdapterCount(**raw["adapters"]) if raw["adapters"] else None
        whole = WholeModel(**raw["whole"])
        return cls(**{**raw, "whole": whole, "ranks": ranks, "adapters": adapters})


_BY_SIZE = ("weight_sizes", "master_sizes", "moment_sizes", "momentum_sizes")


def _rank_from_json(raw: dict[str, Any]) -> RankModel:
    sizes = {name: {int(k): v for k, v in raw[name].items()} for name in _BY_SIZE}
    return RankModel(**{**raw, **sizes})


@dataclass(frozen=True, kw_only=True)
class CountRequest:
    """The `ranks` of `world_size` to count; the --hf-checkpoint folder needs only a config.json."""

    args: Args
    ranks: list[int]
    world_size: int


def count_models(
    requests: list[CountRequest], *, timeout_s: float = 600
) -> list[ModelCount | UserError]:
    """Return one result per request: a count, or an error if the model or layout is unsupported.

    Building the tens of thousands of modules of an MoE takes seconds, so requests run in parallel.
    """
    children = max(min(len(requests), usable_cores(), _MOST_CHILDREN), 1)
    shares = [requests[child::children] for child in range(children)]
    with ThreadPoolExecutor(children) as pool:
        answers = list(pool.map(partial(_count_in_child, timeout_s=timeout_s), shares))
    return [answers[i % children][i // children] for i in range(len(requests))]


def _count_in_child(
    requests: list[CountRequest], *, timeout_s: float
) -> list[ModelCount | UserError]:
    command = [sys.executable, "-m", "slime.backends.model_size"]
    path = [str(Path(slime.__file__).parents[1]), read_env().python_path or ""]
    env = child_env(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=":".join(path))
    given = pickle.dumps(requests)
    try:
        done = subprocess.run(command, input=given, capture_output=True, env=env, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"counting the model's parameters took more than {timeout_s:g} s: run it again on a machine "
            "with more free CPU cores"
        ) from None
    lines = done.stdout.decode().splitlines()
    answers = [line.removeprefix(_ANSWER) for line in lines if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        last = (done.stderr.decode().strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"counting the model's parameters ended with status {done.returncode}: {last}"
        )
    return [_read(answer) for answer in json.loads(answers[-1])]


def _read(answer: dict) -> ModelCount | UserError:
    if "refused" in answer:
        return ConfigError(answer["refused"])
    if "failed" in answer:
        return UserError(answer["failed"])
    return ModelCount.from_json(answer)


def main() -> None:
    import logging
    import warnings

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    requests = pickle.loads(sys.stdin.buffer.read())
    print(_ANSWER + json.dumps([_answer(request) for request in requests]), flush=True)


def _answer(request: CountRequest) -> dict:
    """Return the count as JSON, or why there is none: a run builds the same model and fails likewise.

    Only a user's model provider may build a different model on a GPU.
    """
    try:
        return asdict(_count(request))
    except UserError as error:
        return {"refused": str(error)}
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(str(error).split())
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        own = request.args.custom_model_provider_path is not None
        text = f"the model cannot be built: {type(error).__name__}: {reason} ({where})"
        return {"failed" if own else "refused": text}


def _count(request: CountRequest) -> ModelCount:
    import torch

    from slime.backends.kernels.packed_attention import LONG_SAMPLE, repeats_keys
    from slime.config.lora import LoraConfig

    model = request.args.hf_checkpoint, bool(request.args.multimodal_keys)
    whole = _count_whole(*model)  # before Megatron patches torch
    lora = LoraConfig.of(request.args) if request.ranks else None
    adapters = None if lora is None else _count_adapters(*model, lora)
    if request.args.train_backend == "fsdp":
        from slime.backends.fsdp_utils.meta_model import count_rank
    else:
        from slime.backends.megatron_utils.meta_model import count_rank
    ranks = [count_rank(request.args, rank, request.world_size) for rank in request.ranks]
    return ModelCount(
        whole=whole,
        ranks=ranks,
        attention_repeats_keys=repeats_keys(),
        long_sample=LONG_SAMPLE,
        torch_version=torch.__version__,
        adapters=adapters,
    )


@functools.cache  # requests are often several parallel layouts of one model
def _count_whole(folder: str, images: bool) -> WholeModel:
    """Count the parameters of a Hugging Face model by part, with its vision tower where it is used."""
    model = _skeleton(folder, images)
    by_part: dict[str, int] = {}
    layers: dict[str, int] = {}
    for name, param in model.named_parameters():
        part = _part(name)
        by_part[part] = by_part.get(part, 0) + param.numel()
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer:
            layers[layer[1]] = layers.get(layer[1], 0) + param.numel()
    largest = max(
        param.numel() for name, param in model.named_parameters() if "experts" not in name
    )
    return WholeModel(
        total=sum(by_part.values()),
        by_part=by_part,
        layer=max(layers.values(), default=0),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        largest_tensor=largest,
    )


def _count_adapters(folder: str, images: bool, lora: LoraConfig) -> AdapterCount:
    widths, experts = _linear_widths(folder, images)
    targets = lora.targets(widths, experts)
    layers: dict[str, list[str]] = {}
    for name in targets:
        if layer := re.search(r"layers\.(\d+)\.", name):
            layers.setdefault(layer[1], []).append(name)
    every = {**widths, **experts}
    return AdapterCount(
        rank=lora.rank,
        widths=sum(every[name] for name in targets),
        layer=max((sum(every[n] for n in names) for names in layers.values()), default=0),
        modules=max(map(len, layers.values()), default=0),
        in_mlp=any(_part(name + ".weight") == "mlp" for name in targets),
        served=sum(widths.values()),
    )


@functools.cache
def _linear_widths(folder: str, images: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return input + output width of each linear module except the LM head, and of experts, by name."""
    import torch

    model = _skeleton(folder, images)
    head = model.get_output_embeddings()
    linear = {
        name: module.in_features + module.out_features
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not in_tower(name)
    }
    fused = {n: p.shape for n, p in model.named_parameters() if p.ndim == 3 and is_experts(n)}
    return linear, {name: shape[0] * sum(shape[1:]) for name, shape in fused.items()}


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS if re.search(pattern, name)), "other")


def _skeleton(folder: str, images: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = _read_config(folder, images)
    vars(config).pop("quantization_config", None)
    tower = hasattr(config, "vision_config")
    family: Any = AutoModelForImageTextToText if tower else AutoModelForCausalLM
    with torch.device("meta"):
        return family.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)


def _read_config(folder: str, images: bool) -> Any:
    from transformers import PretrainedConfig, Qwen2Config

    from slime.data.tokenizer import load_hf_config

    raw = PretrainedConfig.get_config_dict(folder)[0]
    if raw.get("model_type") == "mimo":  # Qwen2 with an extra MTP layer, which is not trained
        fields = {k: v for k, v in raw.items() if k not in ("model_type", "architectures")}
        return Qwen2Config(**fields)
    config: Any = load_hf_config(folder)
    if takes_images(config.model_type, images):
        return config
    return getattr(config, "text_config", config)


if __name__ == "__main__":
    main()

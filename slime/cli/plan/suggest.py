"""`slime plan --suggest`: plan and rank the layouts of a model on a number of GPUs.

Candidates: every TP that divides the heads and stays inside a machine, every PP (with fewer layers
in its last stage if it does not divide them), EP for experts, CP 1; colocated, with 8192 tokens per
GPU unless given. Candidates whose lower bound does not fit are skipped. Layouts that fit are sorted by less
recomputation and offloading, then fewer GPUs per replica (more data parallelism, less
communication), then tensor before pipeline parallelism. If none fits, LoRA with FSDP is planned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table

from slime.cli.plan.lora import lora_values, typed_flags, typed_lora
from slime.cli.plan.memory import GIB
from slime.cli.plan.model_shape import Shape, read_shape
from slime.cli.plan.plan import CPU_ADAM, FULL_RECOMPUTE, Machine, Plan, make_plans, plan_from_count
from slime.cli.plan.render import wide_console
from slime.cli.plan.request import PlanOptions, machine_of, planned_args
from slime.config.arguments import Args
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError, UserError

_SHOWN = 8
_MAX_CANDIDATES = 16
_STEPS: tuple[dict[str, Any], ...] = ({}, FULL_RECOMPUTE, {**FULL_RECOMPUTE, **CPU_ADAM})
_NAMES = ("", "recompute", "recompute, CPU Adam")


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    plan: Plan
    effort: int  # index of the step of _STEPS that was needed
    lora: tuple[str, ...] = ()  # flags of LoRA, which replace those of a layout

    @property
    def flags(self) -> list[str]:
        layout = list(self.lora) or self._layout_flags()
        args = self.plan.args
        engine = f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine}"
        fraction = f"--sglang-mem-fraction-static {args.sglang_mem_fraction_static:g}"
        return [*layout, engine, fraction]

    @property
    def means(self) -> str:
        return "LoRA, FSDP" if self.lora else _NAMES[self.effort]

    def _layout_flags(self) -> list[str]:
        sizes, args = self.plan.layout.sizes, self.plan.args
        words = [f"--tensor-model-parallel-size {sizes.tp}"]
        if sizes.tp > 1:
            words.append("--sequence-parallel")
        words.append(f"--pipeline-model-parallel-size {sizes.pp}")
        if last := args.num_layers_in_last_pipeline_stage:
            words.append(f"--decoder-last-pipeline-num-layers {last}")
        if self.plan.shape.num_experts:
            words.append(f"--expert-model-parallel-size {sizes.ep}")
            words.append(f"--expert-tensor-parallel-size {sizes.etp}")
        return words + typed_flags(_STEPS[self.effort])


def suggest(argv: list[str], options: PlanOptions) -> int:
    if options.gpus is None:
        raise ConfigError("--suggest needs the number of GPUs: give --gpus")
    machine = machine_of(options)
    with planned_args([*argv, *cluster_flags(options.gpus, argv)], options) as args:
        if args.train_backend != "megatron":
            raise ConfigError(
                "--suggest proposes layouts of --train-backend megatron; FSDP has one layout: plan it"
            )
        if args.engine_models:
            raise ConfigError(
                "--suggest chooses equal engines: remove --sglang-config and --prefill-num-servers"
            )
        failures: list[UserError] = []
        found = find_suggestions(args, machine, failures) or suggest_lora(args, machine, failures)
    if failures and not found:
        raise UserError(
            f"--suggest: no layout fits, and {len(failures)} could not be planned. The first: {failures[0]}"
        )
    _show(found, failures, options)
    return 0 if found else 1


def find_suggestions(args: Args, machine: Machine, failures: list[UserError]) -> list[Suggestion]:
    """Return the layouts that fit, best first; errors of layouts that cannot be planned go to `failures`."""
    shape = read_shape(args.hf_checkpoint)
    engine = _engine_size(args, shape, machine)
    layouts = _layouts(args, shape, machine)[:_MAX_CANDIDATES]
    plans = make_plans([args.replace(**layout, **engine) for layout in layouts], machine)
    found = []
    for plan in plans:
        if isinstance(plan, UserError):
            failures.append(plan)
        elif suggestion := _least_effort(plan, machine):
            found.append(suggestion)
    return sorted(found, key=_rank)


def suggest_lora(args: Args, machine: Machine, failures: list[UserError]) -> list[Suggestion]:
    """Return LoRA on the same GPUs if it fits and the run trains all weights."""
    if args.lora_rank:
        return []
    shape = read_shape(args.hf_checkpoint)
    values = lora_values(args, shape)
    engine = _engine_size(args, shape, machine)
    plan = make_plans([args.replace(**_layout(shape, 1, 1, 1), **values, **engine)], machine)[0]
    if isinstance(plan, UserError):
        failures.append(plan)
        return []
    if plan.verdict != "fits":
        return []
    return [Suggestion(plan=plan, effort=len(_STEPS), lora=tuple(typed_lora(values)))]


def _least_effort(plan: Plan, machine: Machine) -> Suggestion | None:
    for effort, step in enumerate(_STEPS):
        other = plan_from_count(plan.args.replace(**step), plan.count, machine)
        if other.verdict == "fits":
            return Suggestion(plan=other, effort=effort)
    return None


def _rank(suggestion: Suggestion) -> tuple[float, ...]:
    sizes = suggestion.plan.layout.sizes
    spread = -sizes.ep if suggestion.plan.shape.num_experts else 0
    return (suggestion.effort, -sizes.dp, sizes.pp, spread, suggestion.plan.fullest.total)


def cluster_flags(gpus: int, argv: list[str]) -> list[str]:
    """Return the flags of a cluster with 8 GPUs per machine, or --num-gpus-per-node."""
    given = read_command_line(argv)
    per_node = min(gpus, given.get("num_gpus_per_node") or 8)
    if per_node < 1 or gpus % per_node:
        fitting = [f"--num-gpus-per-node {n}" for n in range(8, 1, -1) if gpus % n == 0]
        how = " or ".join([*(f"add {flag}" for flag in fitting[:1]), "give another number of GPUs"])
        raise ConfigError(
            f"--gpus {gpus} is not a multiple of the {per_node} GPUs of a machine: {how}"
        )
    nodes = gpus // per_node
    return [
        *("--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(per_node)),
        *("--num-gpus-per-node", str(per_node), "--colocate", "--use-dynamic-batch-size"),
        *("--max-tokens-per-gpu", str(given.get("max_tokens_per_gpu") or 8192)),
    ]


def _layouts(args: Args, shape: Shape, machine: Machine) -> list[dict[str, Any]]:
    """Return candidates sorted by TP x PP, without those whose weights and gradients cannot fit."""
    gpus = args.num_training_gpus
    sizes = [
        (tp, pp, ep)
        for tp in _divisors(args.actor_num_gpus_per_node)
        for pp in _divisors(gpus // tp)
        if _possible(shape, tp, pp)
        for ep in _expert_sizes(shape, gpus, pp)
        if _floor(shape, tp, pp, ep) < machine.gpu_bytes
    ]
    return [_layout(shape, *each) for each in sorted(sizes, key=lambda each: each[0] * each[1])]


def _possible(shape: Shape, tp: int, pp: int) -> bool:
    keys = shape.latent or shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    heads = shape.heads % tp == 0 and shape.delta_heads % tp == 0
    return keys and heads and _last_stage(shape.layers, pp) > 0


def _last_stage(layers: int, pp: int) -> int:
    """Return the layers of the last stage if all others have ceil(layers / pp)."""
    return layers - -(-layers // pp) * (pp - 1)


def _layout(shape: Shape, tp: int, pp: int, ep: int) -> dict[str, Any]:
    last = _last_stage(shape.layers, pp)
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "num_layers_in_last_pipeline_stage": last if shape.layers % pp else None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1 if ep > 1 else tp,
        "sequence_parallel": tp > 1,
    }


def _expert_sizes(shape: Shape, gpus: int, pp: int) -> list[int]:
    """Return the largest possible expert-parallel size and the next smaller one."""
    if not shape.num_experts:
        return [1]
    sizes = [n for n in _divisors(gpus // pp) if shape.num_experts % n == 0]
    return sizes[-2:]


def _floor(shape: Shape, tp: int, pp: int, ep: int) -> float:
    """Return a lower bound: the bytes of weights and gradients alone."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    dense = attention + (0 if shape.num_experts else 3 * shape.hidden * shape.ffn)
    experts = 3 * shape.hidden * shape.expert_ffn * shape.num_experts
    per_rank = shape.layers / pp * (dense / tp + experts / max(ep, 1))
    return 6 * 0.8 * per_rank


def _engine_size(args: Args, shape: Shape, machine: Machine) -> dict[str, Any]:
    """Return the smallest engine whose weights take at most half of its memory fraction."""
    gpus = args.num_training_gpus
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.hidden * max(shape.ffn, shape.expert_ffn * shape.num_experts)
    weights = 2 * (shape.layers * (attention + mlp) + 2 * shape.hidden * shape.vocab)
    fraction = args.sglang_mem_fraction_static or 0.7
    possible = [n for n in _divisors(gpus) if shape.heads % n == 0]
    sizes = [n for n in possible if weights / n < 0.5 * fraction * machine.gpu_bytes]
    chosen = args.rollout_num_gpus_per_engine
    if args.origin("rollout_num_gpus_per_engine") == "default":
        chosen = sizes[0] if sizes else possible[-1]
    return {"rollout_num_gpus_per_engine": chosen, "sglang_mem_fraction_static": fraction}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _show(found: list[Suggestion], failures: list[UserError], options: PlanOptions) -> None:
    if options.as_json:
        errors = {"failures": [str(error) for error in failures]} if failures else {}
        document = {"version": 1, "suggestions": [_json(s) for s in found], **errors}
        print(json.dumps(document, indent=1))
        return
    console = wide_console()
    if not found:
        console.print(
            f"nothing fits on {options.gpus} GPU{'s' * (options.gpus != 1)}, not even with all activations "
            "recomputed and Adam on the host, nor with LoRA: give more GPUs, or more memory with --gpu-memory",
            highlight=False,
        )
        return
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    table = Table(title=f"layouts for {options.gpus} GPUs, best first", title_justify="left")
    for column in ("", "TP", "PP", "DP", "EP", "engine", "fullest GPU", "host", "with"):
        table.add_column(column, justify="right")
    for number, suggestion in enumerate(found[:_SHOWN], 1):
        table.add_row(str(number), *_cells(suggestion))
    console.print(table)
    say("the first one:  " + " ".join(found[0].flags))
    if failures:
        say(f"{len(failures)} more could not be planned. The first: {failures[0]}")
    if found[0].lora:
        say(
            "training all weights does not fit; with these flags remove MODEL_ARGS, since FSDP reads the "
            "model from --hf-checkpoint (docs/lora.md)"
        )


def _cells(suggestion: Suggestion) -> list[str]:
    plan = suggestion.plan
    sizes = plan.layout.sizes
    return [
        str(sizes.tp),
        str(sizes.pp),
        str(sizes.dp),
        str(sizes.ep) if plan.shape.num_experts else "-",
        str(plan.args.rollout_num_gpus_per_engine),
        f"{plan.fullest.total / GIB:.1f} GiB",
        f"{plan.host.total / GIB:.0f} GiB",
        suggestion.means,
    ]


def _json(suggestion: Suggestion) -> dict[str, Any]:
    plan = suggestion.plan
    return {
        "parallel": plan.layout.sizes.as_dict(),
        "flags": suggestion.flags,
        "verdict": plan.verdict,
        "fullest_bytes": plan.fullest.total,
        "fullest_phase": plan.fullest.name,
        "host_bytes": plan.host.total,
    }

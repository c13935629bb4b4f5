"""Configurations that cannot work: the flags, and flags with which it does.

`python -m tests.wrong_configurations` writes docs/refusals.md anew from what slime really says.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from slime.config.arguments import Args, resolve
from slime.config.flags.draft import Draft
from slime.config.flags.parser import read_command_line
from slime.core.errors import ConfigError

DOCUMENT = Path(__file__).parent.parent / "docs" / "refusals.md"

_DENSE = {  # Qwen3-4B
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
_EXPERTS = {  # GLM-4.5-355B-A32B
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151552,
    "n_routed_experts": 160,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
MODELS = {"Qwen3-4B": _DENSE, "GLM-4.5": _EXPERTS}


@dataclass(kw_only=True, frozen=True)
class Machine:
    """Where train.py is started: GPUs of that machine, and whether it belongs to a Ray cluster."""

    words: str
    gpus: int
    cluster: bool = False


ONE_NODE = Machine(words="one machine, 8 GPUs", gpus=8)
CLUSTER = Machine(words="a cluster, 8 GPUs per node", gpus=8, cluster=True)
LAPTOP = Machine(words="a machine without a GPU", gpus=0)


@dataclass(kw_only=True, frozen=True)
class Wrong:
    """`flags` are refused, `right` in their place are accepted; both on top of a run that is valid."""

    what: str
    flags: str
    right: str
    machine: Machine = ONE_NODE
    model: str = "Qwen3-4B"


_GLM = "--actor-num-nodes 8 --colocate"
_TP8 = "--tensor-model-parallel-size 8 --sequence-parallel"
_SGLANG = "--rollout-engine sglang"

GPUS = [
    Wrong(
        what="the single-node example of the distributed guide: 8 + 8 GPUs of a machine with 8",
        flags="--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8",
        right="--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate",
    ),
    Wrong(
        what="more training GPUs than the machine has",
        flags="--actor-num-gpus-per-node 16",
        right="--actor-num-gpus-per-node 8",
    ),
    Wrong(
        what="a multi-node job started without a Ray cluster",
        flags="--actor-num-nodes 8",
        right="--actor-num-nodes 1",
    ),
    Wrong(
        what="more training GPUs than a node has",
        flags="--actor-num-nodes 2 --actor-num-gpus-per-node 16",
        right="--actor-num-nodes 2 --actor-num-gpus-per-node 16 --num-gpus-per-node 16",
        machine=CLUSTER,
    ),
    Wrong(
        what="no engine",
        flags="--actor-num-gpus-per-node 4 --rollout-num-gpus 0",
        right="--actor-num-gpus-per-node 4 --rollout-num-gpus 4",
    ),
    Wrong(
        what="NCCL without a GPU",
        flags="--distributed-backend nccl",
        right="--distributed-backend gloo",
        machine=LAPTOP,
    ),
    Wrong(what="gloo with GPUs", flags="--distributed-backend gloo", right=""),
    Wrong(
        what="a deadline of nothing",
        flags="--distributed-timeout-minutes 0",
        right="--distributed-timeout-minutes 20",
    ),
    Wrong(
        what="a variable that Ray sets for every rank",
        flags="""--train-env-vars '{"CUDA_VISIBLE_DEVICES": "0,1"}'""",
        right="""--train-env-vars '{"NCCL_DEBUG": "INFO"}'""",
    ),
    Wrong(
        what="environment variables that are not text",
        flags="""--train-env-vars '{"NCCL_IB_TC": 160}'""",
        right="""--train-env-vars '{"NCCL_IB_TC": "160"}'""",
    ),
]

ENGINES = [
    Wrong(
        what="an engine larger than all rollout GPUs",
        flags=f"{_SGLANG} --colocate --rollout-num-gpus-per-engine 16",
        right=f"{_SGLANG} --colocate --rollout-num-gpus-per-engine 8",
    ),
    Wrong(
        what="rollout GPUs that do not make whole engines",
        flags=f"{_SGLANG} --actor-num-gpus-per-node 2 --rollout-num-gpus 6 "
        "--rollout-num-gpus-per-engine 4",
        right=f"{_SGLANG} --actor-num-gpus-per-node 2 --rollout-num-gpus 6 "
        "--rollout-num-gpus-per-engine 2",
    ),
    Wrong(
        what="an engine across the border of two nodes",
        flags=f"{_SGLANG} --actor-num-gpus-per-node 6 --rollout-num-gpus 8 "
        "--rollout-num-gpus-per-engine 4 --num-gpus-per-node 8",
        right=f"{_SGLANG} --actor-num-gpus-per-node 4 --rollout-num-gpus 8 "
        "--rollout-num-gpus-per-engine 4 --num-gpus-per-node 8",
        machine=CLUSTER,
    ),
    Wrong(
        what="an engine of one and a half nodes",
        flags=f"{_SGLANG} --actor-num-nodes 3 --colocate --rollout-num-gpus-per-engine 12",
        right=f"{_SGLANG} --actor-num-nodes 3 --colocate --rollout-num-gpus-per-engine 8",
        machine=CLUSTER,
    ),
    Wrong(
        what="one value under two names",
        flags=f"{_SGLANG} --rollout-num-gpus-per-engine 4 --sglang-tp-size 8",
        right=f"{_SGLANG} --rollout-num-gpus-per-engine 4 --sglang-tp-size 4",
    ),
    Wrong(
        what="copies of the model inside an engine",
        flags=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 4",
        right=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 4 "
        "--sglang-enable-dp-attention",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="attention copies that do not divide the engine",
        flags=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 5 "
        "--sglang-enable-dp-attention",
        right=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 4 "
        "--sglang-enable-dp-attention",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="96 heads over 64 tensor ranks of an engine",
        flags=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 64",
        right=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 64 --sglang-enable-dp-attention "
        "--sglang-dp-size 8",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="experts that an engine cannot spread evenly",
        flags=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 64 --sglang-enable-dp-attention "
        "--sglang-dp-size 64 --sglang-ep-size 64",
        right=f"{_SGLANG} {_GLM} --rollout-num-gpus-per-engine 32 --sglang-enable-dp-attention "
        "--sglang-dp-size 32 --sglang-ep-size 32",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="a percentage where a fraction is meant",
        flags=f"{_SGLANG} --sglang-mem-fraction-static 70",
        right=f"{_SGLANG} --sglang-mem-fraction-static 0.7",
    ),
    Wrong(
        what="tensor parallelism of the embedded engine",
        flags="--rollout-engine slime --rollout-num-gpus-per-engine 2",
        right="--rollout-engine slime --rollout-num-gpus-per-engine 1",
    ),
    Wrong(
        what="engines of somebody else on the trainer's GPUs",
        flags="--rollout-external --rollout-external-engine-addrs http://10.0.0.1:30000 --colocate",
        right="--rollout-external --rollout-external-engine-addrs http://10.0.0.1:30000",
    ),
    Wrong(
        what="a broadcast between two processes on one GPU",
        flags="--colocate --update-weight-transport distributed",
        right="--colocate --update-weight-transport tensor",
    ),
    Wrong(
        what="shared memory between different GPUs",
        flags="--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --update-weight-transport tensor",
        right="--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --update-weight-transport distributed",
    ),
]

PARALLEL = [
    Wrong(
        what="more ranks than GPUs: TP x PP x CP is 128 of 64",
        flags=f"{_GLM} {_TP8} --pipeline-model-parallel-size 4 --context-parallel-size 4",
        right=f"{_GLM} {_TP8} --pipeline-model-parallel-size 4 --context-parallel-size 2",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="experts over more ranks than there are: EP x ETP x PP is 128 of 64",
        flags=f"{_GLM} {_TP8} --pipeline-model-parallel-size 4 --expert-model-parallel-size 32 "
        "--expert-tensor-parallel-size 1",
        right=f"{_GLM} {_TP8} --pipeline-model-parallel-size 4 --expert-model-parallel-size 16 "
        "--expert-tensor-parallel-size 1",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="heads that tensor ranks cannot share evenly",
        flags=f"{_GLM} --tensor-model-parallel-size 64 --sequence-parallel",
        right=f"{_GLM} --tensor-model-parallel-size 32 --sequence-parallel",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="experts that ranks cannot share evenly",
        flags=f"{_GLM} --expert-model-parallel-size 64",
        right=f"{_GLM} --expert-model-parallel-size 32",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="layers that stages cannot share evenly",
        flags=f"{_GLM} {_TP8} --pipeline-model-parallel-size 8",
        right=f"{_GLM} {_TP8} --pipeline-model-parallel-size 8 "
        "--decoder-first-pipeline-num-layers 10 --decoder-last-pipeline-num-layers 10",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="a virtual pipeline without a pipeline",
        flags="--num-layers-per-virtual-pipeline-stage 2",
        right="--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2",
    ),
    Wrong(
        what="sequence parallelism without tensor parallelism",
        flags="--sequence-parallel",
        right="--sequence-parallel --tensor-model-parallel-size 2",
    ),
    Wrong(
        what="experts under tensor parallelism without sequence parallelism",
        flags=f"{_GLM} --tensor-model-parallel-size 8",
        right=f"{_GLM} --tensor-model-parallel-size 8 --sequence-parallel",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="whole experts on every rank, the rest cut",
        flags=f"{_GLM} {_TP8} --expert-tensor-parallel-size 1",
        right=f"{_GLM} {_TP8} --expert-tensor-parallel-size 1 --expert-model-parallel-size 16",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="expert parallelism of a model without experts",
        flags="--expert-model-parallel-size 8",
        right="--expert-model-parallel-size 1",
    ),
    Wrong(
        what="the flags of another model",
        flags="--num-layers 36 --hidden-size 4096",
        right="--num-layers 36 --hidden-size 2560",
    ),
    Wrong(
        what="a tied model untied",
        flags="--untie-embeddings-and-output-weights",
        right="",
    ),
    Wrong(
        what="a flag of Megatron's with FSDP",
        flags="--train-backend fsdp --tensor-model-parallel-size 2",
        right="--train-backend megatron --tensor-model-parallel-size 2",
    ),
    Wrong(
        what="recomputation of Megatron's with FSDP",
        flags="--train-backend fsdp --recompute-granularity full",
        right="--train-backend fsdp --gradient-checkpointing",
    ),
    Wrong(
        what="layers counted for selective recomputation",
        flags="--recompute-granularity selective --recompute-num-layers 1",
        right="--recompute-granularity full --recompute-num-layers 1",
    ),
    Wrong(
        what="DeepEP with a dispatcher that does not use it",
        flags=f"{_GLM} --expert-model-parallel-size 16 --moe-enable-deepep "
        "--moe-token-dispatcher-type alltoall",
        right=f"{_GLM} --expert-model-parallel-size 16 --moe-token-dispatcher-type alltoall",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="optimizer states by rank without the distributed optimizer",
        flags="--use-precision-aware-optimizer --optimizer-cpu-offload "
        "--no-use-distributed-optimizer",
        right="--use-precision-aware-optimizer --optimizer-cpu-offload",
    ),
    Wrong(
        what="a loss of one's own over samples that context parallelism cuts",
        flags="--loss-type custom_loss --custom-loss-function-path my.loss --context-parallel-size 2",
        right="--loss-type custom_loss --custom-loss-function-path my.loss",
    ),
]

BATCHES = [
    Wrong(
        what="batches that do not add up",
        flags="--global-batch-size 200",
        right="--global-batch-size 128 --num-steps-per-rollout 2",
    ),
    Wrong(
        what="dynamic batches without a token budget",
        flags="--use-dynamic-batch-size",
        right="--use-dynamic-batch-size --max-tokens-per-gpu 9216",
    ),
    Wrong(
        what="fewer prompts asked for than trained on",
        flags="--over-sampling-batch-size 16",
        right="--over-sampling-batch-size 64",
    ),
    Wrong(
        what="a context without room for a response",
        flags="--rollout-max-context-len 2048 --rollout-max-prompt-len 2048",
        right="--rollout-max-context-len 4096 --rollout-max-prompt-len 2048",
    ),
    Wrong(
        what="greedy sampling for training",
        flags="--rollout-temperature 0",
        right="--rollout-temperature 1 --eval-temperature 0",
    ),
    Wrong(
        what="a reward that does not exist",
        flags="--rm-type maths",
        right="--rm-type math",
    ),
    Wrong(
        what="a reward that rows may choose and that does not exist",
        flags="--allow-row-rm-types f2",
        right="--allow-row-rm-types f1",
    ),
    Wrong(
        what="KL in the reward and in the loss",
        flags="--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1",
        right="--kl-coef 0 --use-kl-loss --kl-loss-coef 0.1",
    ),
    Wrong(
        what="checkpoints without a folder",
        flags="--save-interval 20",
        right="--save-interval 20 --save /shared/checkpoints",
    ),
    Wrong(
        what="a model that is not downloaded",
        flags="--hf-checkpoint zai-org/GLM-4.5",
        right="",
    ),
    Wrong(
        what="a flag that does not exist",
        flags="--tensor-parallel-size 2",
        right="--tensor-model-parallel-size 2",
    ),
]

NOT_HONOURED = [
    Wrong(
        what="FP8 layers without the package that has them",
        flags="--fp8-format e4m3",
        right="--bf16",
    ),
    Wrong(
        what="an FP8 recipe without FP8",
        flags="--fp8-recipe blockwise",
        right="--bf16",
    ),
    Wrong(
        what="weights that are stored in FP8",
        flags="--fp8-param-gather",
        right="--bf16",
    ),
    Wrong(
        what="moments in bf16 without the optimizer that has them",
        flags="--exp-avg-dtype bf16",
        right="--exp-avg-dtype fp32",
    ),
    Wrong(
        what="FP4 layers",
        flags="--fp4-format e2m1",
        right="--bf16",
    ),
    Wrong(
        what="TransformerEngine's layers where it is not installed",
        flags="--transformer-impl transformer_engine",
        right="--transformer-impl local",
    ),
    Wrong(
        what="attention of TransformerEngine's where it is not installed",
        flags="--attention-backend fused",
        right="--attention-backend flash",
    ),
    Wrong(
        what="Megatron's own FSDP",
        flags="--use-megatron-fsdp",
        right="--train-backend fsdp",
    ),
    Wrong(
        what="kernels that nobody switches on",
        flags="--batch-invariant-mode",
        right="--rollout-engine sglang --sglang-enable-deterministic-inference",
    ),
    Wrong(
        what="attention of models that the backend does not have",
        flags="--experimental-attention-variant dsa",
        right="",
    ),
    Wrong(
        what="layers that would be neither built nor trained",
        flags="--mtp-num-layers 1",
        right="--mtp-num-layers 0",
    ),
    Wrong(
        what="dropout in an attention that has none",
        flags="--attention-dropout 0.1",
        right="--attention-dropout 0.0",
    ),
    Wrong(
        what="a router of a model without experts",
        flags="--moe-router-topk 8",
        right="",
    ),
    Wrong(
        what="Muon with state cut by bytes and not by matrices",
        flags="--optimizer muon --use-distributed-optimizer",
        right="--optimizer dist_muon",
    ),
    Wrong(
        what="Muon of Megatron's with FSDP",
        flags="--train-backend fsdp --optimizer dist_muon",
        right="--train-backend fsdp --optimizer muon",
    ),
    Wrong(
        what="a learning rate of its own for embeddings",
        flags="--decoupled-lr 1e-5",
        right="--lr 1e-5",
    ),
]

TABLES = {
    "Nodes and GPUs": GPUS,
    "Engines": ENGINES,
    "Parallel layout": PARALLEL,
    "Batches, lengths, files": BATCHES,
    "Flags that would not be honoured": NOT_HONOURED,
}


def configure(flags: str, wrong: Wrong, *, offline: bool = False) -> Args:
    """A small valid run with these flags on top, as the row's machine resolves it.

    With `offline`, packages missing on the machine of the test do not matter.
    """
    given = read_command_line([*_valid(wrong.model), *shlex.split(flags)])
    origins = dict.fromkeys(given, "command line")
    gpus, cluster = wrong.machine.gpus, wrong.machine.cluster
    return resolve(Draft(given, origins, gpus=gpus, cluster=cluster, offline=offline))


def refusal(wrong: Wrong) -> str:
    try:
        configure(wrong.flags, wrong)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{wrong.flags} was accepted")


def document() -> str:
    """docs/refusals.md"""
    parts = [_HEAD]
    for title, rows in TABLES.items():
        parts.append(f"\n## {title}\n\n| what | typed | where | slime says |\n|---|---|---|---|\n")
        for row in rows:
            cells = (row.what, f"`{row.flags}`", row.machine.words, refusal(row))
            parts.append("| " + " | ".join(cells) + " |\n")
    return "".join(parts)


_HEAD = """# What slime refuses, and what it says

Every row was typed on top of a valid run (GRPO on Qwen3-4B or GLM-4.5, 32 prompts x 8 samples) and is
refused with exit status 2 before a process, Ray or a model is started; `slime: ` stands in front of the
sentence. `tests/unit/test_wrong_configurations.py` types all of them, and beside each one its nearest
configuration that works. This page is written by `python -m tests.wrong_configurations`.
"""


def _valid(model: str) -> list[str]:
    folder = _folder()
    flags = f"--hf-checkpoint {folder / model} --prompt-data {folder / 'prompts.jsonl'} --bf16"
    flags += f" --run-dir {folder / 'run'} --num-rollout 3 --rollout-batch-size 32"
    flags += " --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rm-type math"
    return flags.split()


@cache
def _folder() -> Path:
    folder = Path(mkdtemp(prefix="slime-wrong-"))
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return folder


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(DOCUMENT, file=sys.stderr)

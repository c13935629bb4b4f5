"""Wrong configurations of Megatron's parallel layout."""

from tests.refusals.row import CLUSTER, GLM, TP8, Wrong

STORED = "--actor-num-nodes 8 --load-debug-rollout-data rows_{rollout_id}.pt"  # no engine
PARALLEL = [
    Wrong(
        what="more ranks than GPUs: TP x PP x CP is 128 of 64",
        flags=f"{GLM} {TP8} --pipeline-model-parallel-size 4 --context-parallel-size 4",
        right=f"{GLM} {TP8} --pipeline-model-parallel-size 4 --context-parallel-size 2",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="experts over more ranks than there are: EP x ETP x PP is 128 of 64",
        flags=f"{GLM} {TP8} --pipeline-model-parallel-size 4 --expert-model-parallel-size 32 "
        "--expert-tensor-parallel-size 1",
        right=f"{GLM} {TP8} --pipeline-model-parallel-size 4 --expert-model-parallel-size 16 "
        "--expert-tensor-parallel-size 1",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="heads that tensor ranks cannot share evenly",
        flags=f"{GLM} --tensor-model-parallel-size 64 --sequence-parallel",
        right=f"{GLM} --tensor-model-parallel-size 32 --sequence-parallel",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="heads of gated delta nets that tensor and context ranks cannot share evenly",
        flags=f"{STORED} {TP8} --context-parallel-size 4",
        right=f"{STORED} {TP8} --context-parallel-size 2",
        machine=CLUSTER,
        model="Qwen3.5-9B",
    ),
    Wrong(
        what="experts that ranks cannot share evenly",
        flags=f"{GLM} --expert-model-parallel-size 64",
        right=f"{GLM} --expert-model-parallel-size 32",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="experts that FSDP's ranks cannot store evenly",
        flags=f"{GLM} --train-backend fsdp --expert-model-parallel-size 8",
        right=f"{GLM} --train-backend fsdp",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="layers that stages cannot share evenly",
        flags=f"{GLM} {TP8} --pipeline-model-parallel-size 8",
        right=f"{GLM} {TP8} --pipeline-model-parallel-size 8 "
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
        what="experts under tensor parallelism without sequence parallelism",
        flags=f"{GLM} --tensor-model-parallel-size 8",
        right=f"{GLM} --tensor-model-parallel-size 8 --sequence-parallel",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="whole experts on every rank, the rest cut",
        flags=f"{GLM} {TP8} --expert-tensor-parallel-size 1",
        right=f"{GLM} {TP8} --expert-tensor-parallel-size 1 --expert-model-parallel-size 16",
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
        flags=f"{GLM} --expert-model-parallel-size 16 --moe-enable-deepep "
        "--moe-token-dispatcher-type alltoall",
        right=f"{GLM} --expert-model-parallel-size 16 --moe-token-dispatcher-type alltoall",
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

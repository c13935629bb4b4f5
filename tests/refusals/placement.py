"""Wrong configurations of nodes, GPUs and engines."""

from tests.refusals.row import CLUSTER, GLM, LAPTOP, SGLANG, Wrong

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
        flags=f"{SGLANG} --colocate --rollout-num-gpus-per-engine 16",
        right=f"{SGLANG} --colocate --rollout-num-gpus-per-engine 8",
    ),
    Wrong(
        what="rollout GPUs that do not make whole engines",
        flags=f"{SGLANG} --actor-num-gpus-per-node 2 --rollout-num-gpus 6 "
        "--rollout-num-gpus-per-engine 4",
        right=f"{SGLANG} --actor-num-gpus-per-node 2 --rollout-num-gpus 6 "
        "--rollout-num-gpus-per-engine 2",
    ),
    Wrong(
        what="an engine across the border of two nodes",
        flags=f"{SGLANG} --actor-num-gpus-per-node 6 --rollout-num-gpus 8 "
        "--rollout-num-gpus-per-engine 4 --num-gpus-per-node 8",
        right=f"{SGLANG} --actor-num-gpus-per-node 4 --rollout-num-gpus 8 "
        "--rollout-num-gpus-per-engine 4 --num-gpus-per-node 8",
        machine=CLUSTER,
    ),
    Wrong(
        what="an engine of one and a half nodes",
        flags=f"{SGLANG} --actor-num-nodes 3 --colocate --rollout-num-gpus-per-engine 12",
        right=f"{SGLANG} --actor-num-nodes 3 --colocate --rollout-num-gpus-per-engine 8",
        machine=CLUSTER,
    ),
    Wrong(
        what="one value under two names",
        flags=f"{SGLANG} --rollout-num-gpus-per-engine 4 --sglang-tp-size 8",
        right=f"{SGLANG} --rollout-num-gpus-per-engine 4 --sglang-tp-size 4",
    ),
    Wrong(
        what="copies of the model inside an engine",
        flags=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 4",
        right=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 4 "
        "--sglang-enable-dp-attention",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="attention copies that do not divide the engine",
        flags=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 5 "
        "--sglang-enable-dp-attention",
        right=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 32 --sglang-dp-size 4 "
        "--sglang-enable-dp-attention",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="attention copies that do not divide a pipeline stage of the engine",
        flags=f"{SGLANG} --colocate --rollout-num-gpus-per-engine 4 --sglang-pp-size 4 --sglang-dp-size 4 "
        "--sglang-enable-dp-attention",
        right=f"{SGLANG} --colocate --rollout-num-gpus-per-engine 4 --sglang-pp-size 2 --sglang-dp-size 2 "
        "--sglang-enable-dp-attention",
    ),
    Wrong(
        what="96 heads over 64 tensor ranks of an engine",
        flags=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 64",
        right=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 64 --sglang-enable-dp-attention "
        "--sglang-dp-size 8",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="experts that an engine cannot spread evenly",
        flags=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 64 --sglang-enable-dp-attention "
        "--sglang-dp-size 64 --sglang-ep-size 64",
        right=f"{SGLANG} {GLM} --rollout-num-gpus-per-engine 32 --sglang-enable-dp-attention "
        "--sglang-dp-size 32 --sglang-ep-size 32",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="a percentage where a fraction is meant",
        flags=f"{SGLANG} --sglang-mem-fraction-static 70",
        right=f"{SGLANG} --sglang-mem-fraction-static 0.7",
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

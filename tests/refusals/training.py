"""Wrong batches, lengths and files, and flags that would not be honoured."""

from tests.refusals.row import CLUSTER, GLM, TP8, Wrong

BATCHES = [
    Wrong(
        what="batches that do not add up",
        flags="--global-batch-size 200",
        right="--global-batch-size 128 --num-steps-per-rollout 2",
    ),
    Wrong(
        what="fewer prompts asked for than trained on",
        flags="--over-sampling-batch-size 16",
        right="--over-sampling-batch-size 64",
    ),
    Wrong(
        what="an evaluation of weights that the engines do not have yet",
        flags="--num-rollout 20 --no-offload-rollout --update-weights-interval 2 --eval-interval 5 --eval-prompt-data held reasoning-gym:leg_counting",
        right="--num-rollout 20 --no-offload-rollout --update-weights-interval 2 --eval-interval 6 --eval-prompt-data held reasoning-gym:leg_counting",
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
        what="MTP layers of a model that has none",
        flags="--mtp-num-layers 1",
        right="--mtp-num-layers 0",
    ),
    Wrong(
        what="more MTP layers than the checkpoint has",
        flags=f"{GLM} {TP8} --mtp-num-layers 2 --enable-mtp-training",
        right=f"{GLM} {TP8} --mtp-num-layers 1 --enable-mtp-training",
        machine=CLUSTER,
        model="GLM-4.5",
    ),
    Wrong(
        what="training of MTP layers without their number",
        flags="--enable-mtp-training",
        right="",
    ),
    Wrong(
        what="a weight of a loss that is not computed",
        flags="--mtp-loss-scaling-factor 0.2",
        right="",
    ),
    Wrong(
        what="MTP layers trained by FSDP",
        flags="--train-backend fsdp --enable-mtp-training",
        right="--train-backend fsdp",
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

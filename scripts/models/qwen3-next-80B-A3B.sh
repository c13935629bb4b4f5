# Qwen3-Next-80B-A3B: gated delta nets in three of four layers, gated attention in the fourth
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 5120
    --num-attention-heads 16
    --group-query-attention --num-query-groups 2
    --kv-channels 256
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --apply-layernorm-1p
    --position-embedding-type rope --rotary-base 10000000 --rotary-percent 0.25
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --attention-output-gate
    --experimental-attention-variant gated_delta_net --linear-attention-freq 4
    --linear-conv-kernel-dim 4
    --linear-num-key-heads 16 --linear-key-head-dim 128
    --linear-num-value-heads 32 --linear-value-head-dim 128
    --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-shared-expert-intermediate-size 512 --moe-shared-expert-gate
)

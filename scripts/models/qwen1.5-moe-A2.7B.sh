# Qwen1.5-MoE-A2.7B (14B, 2.7B active): a shared expert with a gate
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 16
    --group-query-attention --num-query-groups 16
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --num-experts 60 --moe-router-topk 4 --moe-ffn-hidden-size 1408
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-shared-expert-intermediate-size 5632 --moe-shared-expert-gate
    --moe-layer-freq "[1]*24"
)

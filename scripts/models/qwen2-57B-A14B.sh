# Qwen2-57B-A14B: a shared expert with a gate
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --num-experts 64 --moe-router-topk 8 --moe-ffn-hidden-size 2560
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-shared-expert-intermediate-size 20480 --moe-shared-expert-gate
    --moe-layer-freq "[1]*28"
)

# Qwen3-235B-A22B
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1536
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
)

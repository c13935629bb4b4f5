# Qwen3-30B-A3B
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention --num-query-groups 4
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
)

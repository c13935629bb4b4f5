# Qwen3-14B
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 5120
    --ffn-hidden-size 17408
    --num-attention-heads 40
    --group-query-attention --num-query-groups 8
    --kv-channels 128
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --qk-layernorm
)

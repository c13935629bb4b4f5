# Qwen3-8B
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 32
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

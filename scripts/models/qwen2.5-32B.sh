# Qwen2.5-32B; add --norm-epsilon 1e-6 for Qwen2.5-32B-Instruct
MODEL_ARGS=(
    --num-layers 64
    --hidden-size 5120
    --ffn-hidden-size 27648
    --num-attention-heads 40
    --group-query-attention --num-query-groups 8
    --kv-channels 128
    --vocab-size 152064
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
)

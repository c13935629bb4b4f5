# Qwen2.5-7B
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention --num-query-groups 4
    --kv-channels 128
    --vocab-size 152064
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
)

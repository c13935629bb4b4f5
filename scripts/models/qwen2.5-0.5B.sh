# Qwen2.5-0.5B
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 896
    --ffn-hidden-size 4864
    --num-attention-heads 14
    --group-query-attention --num-query-groups 2
    --kv-channels 64
    --vocab-size 151936
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000
    --add-qkv-bias
)

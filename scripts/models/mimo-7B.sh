# MiMo-7B; its layer that predicts a second token is carried along untrained
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --kv-channels 128
    --vocab-size 151680
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --rotary-base 640000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
)

# Llama-3.1-8B
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --kv-channels 128
    --vocab-size 128256
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --use-rope-scaling --rope-scaling-factor 8
)

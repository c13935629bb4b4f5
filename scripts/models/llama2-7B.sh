# Llama-2-7B
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --kv-channels 128
    --vocab-size 32000
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --rotary-base 10000
    --untie-embeddings-and-output-weights
)

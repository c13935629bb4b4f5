# GLM-4-32B-0414
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 6144
    --ffn-hidden-size 23040
    --num-attention-heads 48
    --group-query-attention --num-query-groups 2
    --kv-channels 128
    --vocab-size 151552
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --rotary-base 10000
    --untie-embeddings-and-output-weights
    --rotary-percent 0.5 --rotary-interleaved
    --post-self-attn-layernorm --post-mlp-layernorm
)

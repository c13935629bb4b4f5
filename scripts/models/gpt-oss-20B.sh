# GPT-OSS-20B; the activation, a gated quick GELU, follows from its config.json
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2880
    --ffn-hidden-size 2880
    --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --kv-channels 64
    --vocab-size 201088
    --gated-linear-unit --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
    --add-bias-linear --add-qkv-bias
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type yarn --rotary-base 150000
    --untie-embeddings-and-output-weights
    --softmax-type learnable
    --window-size 127 0
    --window-attn-skip-freq 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0 1 0
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
)

# GLM-4.5 (355B, 32B active); its layer that predicts a second token is carried along untrained
MODEL_ARGS=(
    --num-layers 92
    --hidden-size 5120
    --ffn-hidden-size 12288
    --num-attention-heads 96
    --group-query-attention --num-query-groups 8
    --kv-channels 128
    --vocab-size 151552
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --position-embedding-type rope --rotary-base 1000000
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --qk-layernorm
    --rotary-percent 0.5
    --num-experts 160 --moe-router-topk 8 --moe-ffn-hidden-size 1536
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.5
    --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq "[0]*3+[1]*89"
)

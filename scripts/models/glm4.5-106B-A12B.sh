# GLM-4.5-Air (106B, 12B active); its layer that predicts a second token is carried along untrained
MODEL_ARGS=(
    --num-layers 46
    --hidden-size 4096
    --ffn-hidden-size 10944
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
    --rotary-percent 0.5
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 1408
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 1.0
    --moe-shared-expert-intermediate-size 1408
    --moe-layer-freq "[0]*1+[1]*45"
)

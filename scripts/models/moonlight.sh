# Moonlight-16B-A3B: DeepSeek-V3's layers without compressed queries, expert groups and YaRN
MODEL_ARGS=(
    --num-layers 27
    --hidden-size 2048
    --ffn-hidden-size 11264
    --num-attention-heads 16
    --vocab-size 163840
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128
    --qk-layernorm
    --position-embedding-type rope --rope-type rope --rotary-base 50000
    --rotary-scaling-factor 1 --mscale-all-dim 0
    --num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.446
    --moe-shared-expert-intermediate-size 2816
    --moe-layer-freq "[0]*1+[1]*26"
)

# Kimi-K2 (1T, 32B active): DeepSeek-V3's layers without expert groups. Instruct-0905 adds --rotary-scaling-factor 64
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 64
    --vocab-size 163840
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --kv-channels 128
    --qk-layernorm
    --position-embedding-type rope --rope-type yarn --rotary-base 50000
    --rotary-scaling-factor 32 --beta-fast 1 --mscale 1.0 --mscale-all-dim 1.0
    --num-experts 384 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 2.827
    --moe-shared-expert-intermediate-size 2048
    --moe-layer-freq "[0]*1+[1]*60"
)

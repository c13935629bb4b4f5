# GLM-4.7-Flash (30B, 3B active): latent attention; its layer that predicts a second token is carried along
MODEL_ARGS=(
    --num-layers 47
    --hidden-size 2048
    --ffn-hidden-size 10240
    --num-attention-heads 20
    --vocab-size 154880
    --swiglu
    --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --q-lora-rank 768 --kv-lora-rank 512
    --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256 --kv-channels 256
    --qk-layernorm
    --position-embedding-type rope --rope-type rope --rotary-base 1000000
    --rotary-scaling-factor 1 --mscale-all-dim 0
    --num-experts 64 --moe-router-topk 4 --moe-ffn-hidden-size 1536
    --moe-router-score-function sigmoid
    --moe-router-dtype fp32
    --moe-router-load-balancing-type none
    --moe-router-pre-softmax
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 0
    --moe-router-topk-scaling-factor 1.8
    --moe-shared-expert-intermediate-size 1536
    --moe-layer-freq "[0]*1+[1]*46"
)

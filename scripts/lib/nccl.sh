# NCCL's settings, the same on every node, so they travel with the job; an exported value wins.
nccl_defaults() {
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0}
    export NCCL_IB_TC=${NCCL_IB_TC:-160}
    export NCCL_PXN_DISABLE=${NCCL_PXN_DISABLE:-0}
    export NCCL_IB_GID_INDEX=${NCCL_IB_GID_INDEX:-3}
    export NCCL_NET_GDR_LEVEL=${NCCL_NET_GDR_LEVEL:-4}
    export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7}
    export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-32}
    export NCCL_IB_QPS_PER_CONNECTION=${NCCL_IB_QPS_PER_CONNECTION:-8}
    export NCCL_P2P_LEVEL=${NCCL_P2P_LEVEL:-NVL}
    export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
    export NCCL_MIN_CTAS=${NCCL_MIN_CTAS:-4}
    export TORCH_NCCL_AVOID_RECORD_STREAMS=${TORCH_NCCL_AVOID_RECORD_STREAMS:-1}
}

# What differs from node to node is set where Ray is started there (network.sh), not by the job.
OF_ONE_NODE=(NCCL_SOCKET_IFNAME)

job_variables() {  # names of what the job's runtime environment holds
    echo PYTHONPATH MASTER_ADDR CUDA_DEVICE_MAX_CONNECTIONS ${RUNTIME_ENV_VARS:-}
    local name
    for name in $(compgen -e | grep -E '^(NCCL|TORCH_NCCL|SGLANG|NVTE)_'); do
        [[ " ${OF_ONE_NODE[*]} " == *" $name "* || ${name,,} =~ $SECRET_NAME ]] || echo "$name"
    done
}

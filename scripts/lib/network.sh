# The address this node has for the others, and the network interface that carries the way to the head.
# SLIME_HOST_IP, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME that are
# set already are kept.

detect_network() {  # address of the head, or its name
    local head interface address
    head=$(numeric_address "$1") || refuse "the name $1 of the head is unknown on $(uname -n): give MASTER_ADDR as an address"
    if [[ -n ${SLIME_HOST_IP:-} && -n ${NCCL_SOCKET_IFNAME:-} ]]; then
        interface=$NCCL_SOCKET_IFNAME address=$SLIME_HOST_IP
    elif [[ $head == 127.* || $head == ::1 ]]; then
        interface=lo address=$head
    else
        command -v ip >/dev/null || refuse "the command ip is missing on $(uname -n): install iproute2, or export SLIME_HOST_IP and NCCL_SOCKET_IFNAME"
        interface=$(interface_of "$head") address=$head
        if [[ -z $interface ]]; then
            read -r interface address < <(route_to "$head") || true
        fi
        [[ -n $interface && -n $address ]] || refuse "$(uname -n) has no route to the head at $head: check MASTER_ADDR and the network"
    fi
    export SLIME_HOST_IP=${SLIME_HOST_IP:-$address}
    export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}
    export NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=${NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME:-$NCCL_SOCKET_IFNAME}
}

numeric_address() { getent ahosts "$1" | awk 'NR == 1 {print $1} END {exit NR == 0}'; }

interface_of() { ip -o addr show to "$1" | awk 'NR == 1 {print $2}'; }

route_to() {
    ip -o route get "$1" 2>/dev/null | awk '{
        for (i = 1; i < NF; i++) { if ($i == "dev") dev = $(i + 1); if ($i == "src") src = $(i + 1) }
        if (dev != "") print dev, src
    }'
}

#!/usr/bin/env bash
# Ray on one node of a SLURM job, in the foreground; slime.sbatch sets the variables and ends it.
set -euo pipefail
for part in say network ray_start; do source "$SLIME_DIR/scripts/lib/$part.sh"; done
SAID_BY=$(uname -n)

command -v ray >/dev/null || refuse "the command ray is missing: it must be in IMAGE, or on PATH without one"
detect_network "$MASTER_ADDR"
if [[ $1 == worker ]]; then
    deadline=$((SECONDS + 300))
    until (exec 3<>"/dev/tcp/$MASTER_ADDR/$RAY_PORT") 2>/dev/null; do
        ((SECONDS < deadline)) || refuse "the head at $MASTER_ADDR:$RAY_PORT does not answer after 300 s: check MASTER_ADDR"
        sleep 1
    done
fi
ray_start_words "$1" "$SLIME_HOST_IP"
exec "${WORDS[@]}"

# Ray's authentication token: made once, readable by its owner only, never on a command line.

ensure_token() {
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
    [[ -z ${RAY_AUTH_TOKEN:-} ]] || return 0
    local path=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
    if [[ ! -s $path ]]; then
        (umask 077 && mkdir -p "$(dirname "$path")" && new_token >"$path") ||
            refuse "Ray's token cannot be written to $path: name another file in RAY_AUTH_TOKEN_PATH"
    fi
    [[ ! -O $path ]] || chmod 600 "$path"
}

read_token() { [[ -n ${RAY_AUTH_TOKEN:-} ]] && echo "$RAY_AUTH_TOKEN" || cat "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}"; }

new_token() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# Ray writes the runtime environment of a job to logs that every user of a node can read.
SECRET_NAME='secret|password|credential|(^|_)key|(^|_)token(_|$)'

refuse_secrets() {
    local name
    for name in ${RUNTIME_ENV_VARS:-}; do
        [[ ! ${name,,} =~ $SECRET_NAME ]] || refuse "RUNTIME_ENV_VARS: Ray would write $name to logs that others can read: remove it, and export it where Ray is started on the head (this script inherits it)"
    done
}

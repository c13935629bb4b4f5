# Words to the user; one sentence, then the end.
say() { echo "${SAID_BY:-${0##*/}}: $*" >&2; }

refuse() {
    say "$*"
    exit 2
}

#!/bin/bash
# Stands in for Apptainer where that cannot be had: the few commands the program uses, with their arguments checked as
# strictly, on bubblewrap. An "image" is a file of shell text that exports the image's variables; all of them have this
# machine's /usr. It keeps its state two folders up: images/ (what can be built), instances/, log, and switches by name.
set -u
top=${0%/*}/..
printf '%s\n' "$*" >>"$top/log"
for name in $(compgen -e); do printf '%s\n' "$name" >>"$top/environment"; done

fatal() {
    echo "FATAL:   $*" >&2
    exit 255
}
unknown() {
    echo "Error for command \"$1\": unknown flag: $2" >&2
    exit 1
}

build() { # file, source
    [ $# = 2 ] || unknown build "$*"
    echo "INFO:    Starting build..." >&2
    echo "$2" >>"$top/builds"
    if [ -e "$top/slow" ]; then sleep "$(cat "$top/slow")"; fi
    local image="$top/images/${2//\//%}"
    [ -e "$image" ] || fatal "While performing build: conveyor failed to get: reading manifest latest in $2:" \
        "requested access to the resource is denied"
    cp "$image" "$1" && echo "INFO:    Build complete: $1" >&2
}

start() {
    local contained= homeless= overlay= writable= workdir= network= words=() scratch=() binds=()
    while [ $# -gt 2 ]; do
        case $1 in
            --containall) contained=yes ;;
            --no-home) homeless=yes ;;
            --writable-tmpfs) writable=yes ;;
            --no-privs) [ "$EUID" = 0 ] || unknown start "$1" ;;
            --net) network=wanted ;;
            --hostname | --add-caps) shift ;;
            --network) [ "$network,$2" = wanted,none ] && network=none && shift || fatal "no permission for network $2" ;;
            --pids-limit | --memory | --cpus)
                [ ! -e "$top/no-cgroups" ] || fatal "while applying cgroups config: cgroups are not available"
                [[ $2 =~ ^[0-9.]+M?$ ]] || fatal "could not parse resource flags: $1=$2"
                shift
                ;;
            --workdir) workdir=$2 && shift ;;
            --scratch) scratch+=("$2") && shift ;;
            --bind) binds+=("$2") && shift ;;
            --overlay)
                [ ! -e "$top/no-overlay" ] || fatal "failed to set up overlay: operation not permitted"
                overlay=$2 && shift
                ;;
            *) unknown start "$1" ;;
        esac
        shift
    done
    local image=$1 name=$2 path
    [ "$contained$homeless" = yesyes ] || fatal "only --containall --no-home is stood in for"
    [[ $name =~ ^[A-Za-z0-9._-]+$ ]] || fatal "invalid instance name $name"
    [ -f "$image" ] || fatal "could not open image $image: failed to retrieve path for $image"
    [ ! -e "$top/slow-start" ] || sleep "$(cat "$top/slow-start")"
    mkdir "$top/instances/$name" 2>/dev/null || fatal "instance $name already exists"
    local folder="$top/instances/$name"
    cp "$image" "$folder/image"
    mkdir "$folder/doors"
    [ "$writable" ] || { mkdir "$overlay/upper" && words+=(--bind "$overlay/upper" /); }
    mkdir -p -m 1777 "$workdir/tmp" "$workdir/var_tmp"
    words+=(--ro-bind /usr /usr --proc /proc --dev /dev --dir /etc --dir /run --dir /home)
    for path in bin lib lib64 sbin; do words+=(--symlink "usr/$path" "/$path"); done
    words+=(--bind "$workdir/tmp" /tmp --bind "$workdir/var_tmp" /var/tmp)
    for path in ${scratch[@]+"${scratch[@]}"}; do
        mkdir -p "$workdir/scratch$path"
        words+=(--bind "$workdir/scratch$path" "$path")
    done
    for path in ${binds[@]+"${binds[@]}"}; do
        IFS=: read -r from to mode <<<"$path"
        [ "$mode" = ro ] && words+=(--ro-bind "$from" "$to") || words+=(--bind "$from" "$to")
    done
    [ "$network" = none ] && words+=(--unshare-net)
    mkfifo "$folder/ready"
    setsid bwrap --unshare-pid --unshare-ipc --unshare-uts --hostname sandbox --as-pid-1 --info-fd 5 "${words[@]}" \
        --chdir / -- /bin/bash -c 'echo up >&6; exec 6>&-; trap : TERM HUP INT; while :; do sleep infinity; done' \
        5>"$folder/info" 6>"$folder/ready" </dev/null >/dev/null 2>"$folder/complaint" &
    local up=
    read -r up <"$folder/ready"
    if [ "$up" != up ]; then
        up=$(cat "$folder/complaint")
        rm -rf "$folder"
        fatal "container creation failed: $up"
    fi
    [[ $(<"$folder/info") =~ \"child-pid\":\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}" >"$folder/pid"
    echo "INFO:    instance started successfully" >&2
}

stop() {
    [ $# = 2 ] && [ "$1" = --force ] || unknown stop "$*"
    local folder="$top/instances/$2" path
    [ -e "$folder/pid" ] || fatal "no instance found with name $2"
    local pid
    read -r pid <"$folder/pid"
    kill -9 "$pid" 2>/dev/null
    while kill -0 "$pid" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null; do
        for path in "$folder"/doors/*; do # nsenter stops when its child does, and would not bury it
            grep -sqx nsenter "/proc/${path##*/}/comm" && kill -CONT "${path##*/}" 2>/dev/null
        done
        sleep 0.01
    done
    rm -rf "$folder"
}

list() {
    [ "$*" = --json ] || unknown list "$*"
    local folder comma=
    printf '{"instances": ['
    for folder in "$top"/instances/*/; do
        [ -e "$folder/pid" ] || continue
        folder=${folder%/}
        printf '%s{"instance": "%s", "pid": %s, "img": "", "ip": ""}' "$comma" "${folder##*/}" "$(<"$folder/pid")"
        comma=,
    done
    printf ']}\n'
}

enter() {
    [ "$1" = --cleanenv ] || unknown exec "$1"
    [[ $2 =~ ^instance://([A-Za-z0-9._-]+)$ ]] || fatal "not an instance: $2"
    local folder="$top/instances/${BASH_REMATCH[1]}" pid
    shift 2
    [ -e "$folder/pid" ] && read -r pid <"$folder/pid" && [ -e "/proc/$pid" ] || fatal "no instance found with name" \
        "${folder##*/}"
    echo "WARNING: passwd file doesn't exist in container, not updating" >&2
    : >"$folder/doors/$$"
    for name in $(compgen -e); do unset "$name"; done
    . "$folder/image"
    export PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin} HOME=${HOME:-/root}
    export APPTAINER_NAME=sandbox SINGULARITY_NAME=sandbox LD_LIBRARY_PATH=/.singularity.d/libs PS1='Apptainer> '
    local few=-all,+chown,+dac_override,+fowner,+kill,+setgid,+setuid
    exec /usr/bin/nsenter -t "$pid" -m -p -i -u -n -- \
        /usr/bin/setpriv --no-new-privs --inh-caps=-all --bounding-set=$few -- "$@"
}

case "$1 ${2-}" in
    "--version "*) echo "apptainer version 1.4.0" ;;
    "build "*) shift && build "$@" ;;
    "instance start") shift 2 && start "$@" ;;
    "instance stop") shift 2 && stop "$@" ;;
    "instance list") shift 2 && list "$@" ;;
    "exec "*) shift && enter "$@" ;;
    *) unknown "$1" "${2-}" ;;
esac

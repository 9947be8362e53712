#!/usr/bin/env bash
# Emulated hosts on one machine, for root: network namespaces on a bridge, with links of a given rate.
#   emulated_hosts.sh up HOSTS RATE      hosts 10.87.0.1 .. HOSTS; RATE as tc writes it: 500mbit
#   emulated_hosts.sh down
#   emulated_hosts.sh cut|kill HOST      take its link away without a word; kill all that runs there
#   emulated_hosts.sh slow HOST RATE     another rate for its link, both ways
#   emulated_hosts.sh [-x] ADDRESS CMD   what mpirun calls instead of ssh; every host has its own name
set -euo pipefail
net=10.87.0 name=refimpl

limit() {  # HOST RATE: its link, out of the host and into it
    local tbf="root tbf rate $2 burst 128kb latency 100ms"
    tc -n $name-"$1" qdisc replace dev $name-e"$1" $tbf
    tc qdisc replace dev $name-v"$1" $tbf
}

case "${1:-}" in
up)
    hosts=$2 rate=$3
    ip link add $name-br type bridge
    ip addr add $net.254/24 dev $name-br
    ip link set $name-br up
    for i in $(seq 1 "$hosts"); do
        ip netns add $name-$i
        ip link add $name-v$i type veth peer name $name-e$i netns $name-$i
        ip link set $name-v$i master $name-br up
        ip -n $name-$i addr add $net.$i/24 dev $name-e$i
        ip -n $name-$i link set $name-e$i up
        ip -n $name-$i link set lo up
        limit "$i" "$rate"
    done ;;
cut) ip link set $name-v"$2" down ;;
kill) ip netns pids $name-"$2" | xargs -r kill -9 ;;
slow) limit "$2" "$3" ;;
down)
    for host in $(ip netns list | awk -v n=$name- 'index($1, n) == 1 {print $1}'); do
        ip netns pids "$host" | xargs -r kill -9  # what still runs there would keep its links
        ip netns del "$host"
        ip link del "$name-v${host##*-}" 2>/dev/null || true  # at once, not when its last process is gone
    done
    ip link del $name-br 2>/dev/null || true ;;
*)
    while [[ ${1:-} == -* ]]; do shift; done
    host=${1##*.}
    shift
    exec ip netns exec $name-"$host" unshare --uts sh -c "hostname host$host; exec $*" ;;
esac

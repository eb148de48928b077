#!/bin/sh
# Start a Docker daemon by hand, without systemd and without touching the network, all of it in one folder:
#   tests/dockerd.sh /var/tmp/docker-by-hand & DOCKER_HOST=unix:///var/tmp/docker-by-hand/sock make docker
# Stop it with `kill $(cat /var/tmp/docker-by-hand/pid)`. It needs root, and Debian's docker.io or another dockerd.
set -eu
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
folder=$(realpath -m "$1")
mkdir -p "$folder"
PATH=$PATH:/usr/sbin:/sbin
exec dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/pid" \
  -H "unix://$folder/sock" --bridge=none --iptables=false --ip6tables=false >"$folder/log" 2>&1

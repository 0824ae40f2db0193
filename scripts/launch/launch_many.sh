#!/usr/bin/env bash
# Train in several processes, one for each device, with MindSpore's msrun and the launcher of this package:
#
#   bash scripts/launch/launch_many.sh 2 --config configs/tiny_llama_cpu_fp16_parallel.yaml
#
# On several machines, run it on each: with the number of them, its own number from 0 and the address of machine 0.
#
#   MACHINES=2 MACHINE=0 MASTER_ADDRESS=10.0.0.1 bash scripts/launch/launch_many.sh 8 \
#     --config configs/ascend/cluster_llama2_7b_fp16.yaml --train_dataset_dir data/pretrain
#
# The first argument is the number of processes on this machine; the others go to the launcher. MASTER_PORT (8118) is
# the port on machine 0, LOG_DIR (output/msrun) has a log of each process. If a process fails, all end. With DRY_RUN=1
# the command is printed and not run.
set -euo pipefail
if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
    echo "The first argument must be the number of processes on this machine, but got '${1:-}'." >&2
    echo "Example: bash scripts/launch/launch_many.sh 2 --config configs/tiny_llama_cpu_fp16_parallel.yaml" >&2
    exit 2
fi
processes=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
if ! command -v msrun > /dev/null; then
    # What demo.sh and test.sh make. msrun starts whatever python comes first on the PATH.
    PATH="$(cd "$here/../.." && pwd)/.venv/bin:$PATH"
fi
where=(--worker_num=$((processes * ${MACHINES:-1})) --local_worker_num="$processes")
if [ "${MACHINES:-1}" -gt 1 ]; then
    where+=(--node_rank="${MACHINE:?must be the number of this machine, from 0}")
    where+=(--master_addr="${MASTER_ADDRESS:?must be the address of machine 0}")
fi
command=(msrun "${where[@]}" --master_port="${MASTER_PORT:-8118}" --join=True --log_dir="${LOG_DIR:-output/msrun}")
command+=("$here/run_mindformer.py" "$@")
if [ -n "${DRY_RUN:-}" ]; then
    echo "${command[@]}"
    exit
fi
if ! command -v msrun > /dev/null; then
    echo "msrun, which comes with MindSpore, is not on the PATH: activate the environment that has MindSpore." >&2
    exit 1
fi
exec "${command[@]}"

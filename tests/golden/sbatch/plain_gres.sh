#!/bin/bash -l
#SBATCH --job-name=demo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=12:30:00
#SBATCH --gres=gpu:h100:4
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --export=NONE
#SBATCH --comment="pawl 0123456789abcdef"
#SBATCH --chdir=/home/me/work
#SBATCH --output=/home/me/work/slurm-%j.log
#
# Run demo as a classical job, made by pawl: nobody watches it and nothing restarts it.
# It resumes from the newest checkpoint that verifies; submit the file again to go on.

export PYTHONSAFEPATH=1
export OMP_NUM_THREADS=16

fail() {
  echo "pawl: $*" >&2
  exit 78
}
[ "$SLURM_JOB_NUM_NODES" = 2 ] ||
  fail "the job has $SLURM_JOB_NUM_NODES nodes, the config asks for 2 × 4 ranks = 8"

# The rendezvous is on the first node of the allocation, under the name that the other nodes know it by.
master_addr="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
[ -n "$master_addr" ] || fail "scontrol named no node for $SLURM_JOB_NODELIST"
case "$master_addr" in
  localhost | localhost.* | 127.* | ::1) fail "node $master_addr is a loopback name, which other nodes cannot reach" ;;
esac
# This script runs on that node: find a port there that nobody listens on and that no outgoing connection can take.
master_port="$(/opt/pawl/bin/python -I -c '
import random, socket
low, high = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
ports = [port for port in range(10000, 65536) if not low <= port <= high] or list(range(10000, 65536))
for port in random.sample(ports, min(len(ports), 200)):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            continue
        print(port)
        break
')"
[ -n "$master_port" ] || fail "no free port on $master_addr"

# srun does not inherit --cpus-per-task since Slurm 22.05, and refuses to start when two variables disagree about it.
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK SLURM_TRES_PER_TASK
# The node rank differs per task, so the task's own shell expands it; all other words pass through unchanged.
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 \
  --cpus-per-task=64 \
  --export=ALL --kill-on-bad-exit=1 --wait=60 \
  /bin/bash -c 'exec "$0" --node-rank="$SLURM_NODEID" "$@"' \
  /opt/pawl/bin/torchrun --master-addr="$master_addr" --master-port="$master_port" \
  --nnodes=2 --nproc-per-node=4 --max-restarts=0 -m trainer train --config-file /scratch/runs/demo/run.yaml \
    --run-dir /scratch/runs/demo

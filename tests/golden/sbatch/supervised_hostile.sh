#!/bin/bash -l
#SBATCH --job-name="it's \"me\" $(id)"
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR2@120
#SBATCH --open-mode=append
#SBATCH --export=NONE
#SBATCH --comment="pawl 0123456789abcdef"
#SBATCH --chdir=/home/me/work
#SBATCH --output=/scratch/runs/demo/attempts/0003/slurm-%j.log
#
# Attempt 3 of run demo, made by pawl. It names no job id:
# `sbatch` takes this file by hand, too, and only one job at a time can claim the attempt.

# A warning signal that comes before the supervisor listens must not end this shell.
trap '' USR2

export PYTHONSAFEPATH=1
export PAWL_NONCE=0123456789abcdef
export http_proxy='$(id) '"'"'x'"'"''

exec /opt/pawl/bin/python -m orchestrator supervise --run-dir /scratch/runs/demo --attempt 3 --launcher slurm -- \
  /opt/pawl/bin/torchrun '--nnodes={nnodes}' '--node-rank={node_rank}' '--nproc-per-node={ranks_per_node}' \
    '--master-addr={master_addr}' '--master-port={master_port}' --max-restarts=0 -m orchestrator.agent.label -m \
    trainer train --config-file /scratch/runs/demo/run.yaml --run-dir /scratch/runs/demo --cycle '{cycle_file}' \
    --shm '{shm}'

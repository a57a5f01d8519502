#!/bin/bash -l
#SBATCH --job-name="my name"
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu,debug
#SBATCH --account=proj-7
#SBATCH --qos=normal
#SBATCH --time=2-00:00:00
#SBATCH --constraint="h100&ib"
#SBATCH --reservation=march
#SBATCH --gres=gpu:h100:4
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --nodelist=gpu[01-03]
#SBATCH --exclude=gpu09
#SBATCH --no-requeue
#SBATCH --no-kill
#SBATCH --signal=B:USR2@300
#SBATCH --open-mode=append
#SBATCH --export=NONE
#SBATCH --comment="pawl 0123456789abcdef"
#SBATCH --chdir=/home/me/work
#SBATCH --output=/scratch/runs/demo/attempts/0003/slurm-%j.log
#SBATCH --switches=1@00:10:00
#SBATCH --spread-job
#
# Attempt 3 of run demo, made by pawl. It names no job id:
# `sbatch` takes this file by hand, too, and only one job at a time can claim the attempt.

# A warning signal that comes before the supervisor listens must not end this shell.
trap '' USR2

# slurm.prologue, as it stands in the config
module purge
module load cuda/12.6
	ulimit -l unlimited

export PYTHONSAFEPATH=1
export PAWL_NONCE=0123456789abcdef
export OMP_NUM_THREADS=16
export NCCL_DEBUG=INFO
export http_proxy=http://proxy:3128
# secret variables stand in a file that only their owner reads
set -a
. /scratch/runs/demo/secrets/env || exit 78
set +a

exec /opt/pawl/bin/python -m orchestrator supervise --run-dir /scratch/runs/demo --attempt 3 --launcher slurm -- \
  /opt/pawl/bin/torchrun '--nnodes={nnodes}' '--node-rank={node_rank}' '--nproc-per-node={ranks_per_node}' \
    '--master-addr={master_addr}' '--master-port={master_port}' --max-restarts=0 -m orchestrator.agent.label -m \
    trainer train --config-file /scratch/runs/demo/run.yaml --run-dir /scratch/runs/demo --cycle '{cycle_file}' \
    --shm '{shm}'

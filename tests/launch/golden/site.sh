#!/bin/bash
# Run demo of hpc_rollart VERSION: one heterogeneous job.
# Directory: /home/me/demo
# Written by hpc-rollart submit; to submit again, use hpc-rollart resubmit.

# The whole job.
#SBATCH --job-name=demo
#SBATCH --output=/home/me/demo/slurm/%j_0_log.out
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me

# Component 0: trainer, 1 node x 1 rank, 16 cores a rank, 1 h100 GPU a node
#SBATCH --partition=gpu-h100
#SBATCH --account=proj7
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gres=gpu:h100:1
#SBATCH --hint=nomultithread

#SBATCH hetjob
# Component 1: generate-compute (generator), 1 node x 2 ranks, 8 cores a rank, 2 h100 GPUs a node
#SBATCH --partition=gpu-h100
#SBATCH --account=proj7
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:h100:2
#SBATCH --hint=nomultithread

#SBATCH hetjob
# Component 2: generate-bandwidth (generator), 2 nodes x 8 ranks, 12 cores a rank, 8 h20 GPUs a node
#SBATCH --partition=gpu-h20
#SBATCH --account=proj7
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --gres=gpu:h20:8
#SBATCH --hint=nomultithread

#SBATCH hetjob
# Component 3: env, 2 nodes x 4 ranks, 8 cores a rank
#SBATCH --partition=standard
#SBATCH --account=proj7
#SBATCH --time=02:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --hint=nomultithread

# What the shell that submitted had inherited does not concern this job.
unset ${!SBATCH_@} ${!SRUN_@} ${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@} ${!PMIX_@} ${!PMI_@} ${!PRTE_@} ${!OMPI_@}

# Modules.
if ! command -v module >/dev/null; then
  for file in "${LMOD_PKG:-}/init/bash" "${MODULESHOME:-}/init/bash" /etc/profile.d/{lmod,modules}.sh; do
    if [ -r "$file" ]; then . "$file"; break; fi
  done
fi
if command -v module >/dev/null; then
  module purge || true # modules that a site holds on to are no error
  module load gcc/13 cuda/12.4 || exit 1
else
  echo 'warning: there is no module command here; not loaded: gcc/13 cuda/12.4' >&2
fi

# The profile's setup, word for word.
ulimit -c 0
export SCRATCH=$WORK/tmp

# Environment.
export SUBMITIT_PREEMPT_SIGNAL=USR2
export NCCL_SOCKET_IFNAME=hsn
export GREETING='it'"'"'s $HOME'
export SUBMITIT_EXECUTOR=slurm

# The supervisor, which starts the ranks on the nodes itself. With exec and not under srun:
# so it is the batch step's own process, which Slurm warns before the job's end.
exec /sw/rollart/bin/python -u -m submitit.core._submit /home/me/demo/slurm

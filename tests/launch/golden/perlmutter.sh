#!/bin/bash
# Run demo of hpc_rollart VERSION: one heterogeneous job.
# Directory: /home/me/demo
# Written by hpc-rollart submit; to submit again, use hpc-rollart resubmit.

# The whole job.
#SBATCH --job-name=demo
#SBATCH --output=/home/me/demo/slurm/%j_0_log.out
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me

# Component 0: trainer, 1 node x 1 rank, 4 cores a rank, 4 a100 GPUs a node
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:4
#SBATCH --exclusive

#SBATCH hetjob
# Component 1: generate-compute (generator), 1 node x 2 ranks, 2 cores a rank, 4 a100 GPUs a node
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:4
#SBATCH --exclusive

#SBATCH hetjob
# Component 2: generate-bandwidth (generator), 2 nodes x 2 ranks, 2 cores a rank, 4 a100 GPUs a node
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --constraint=gpu
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --gres=gpu:4
#SBATCH --exclusive

#SBATCH hetjob
# Component 3: env, 2 nodes x 2 ranks, 2 cores a rank
#SBATCH --account=m1234
#SBATCH --qos=regular
#SBATCH --constraint=cpu
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR2@180
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --exclusive

# What the shell that submitted had inherited does not concern this job.
unset ${!SBATCH_@} ${!SRUN_@} ${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@} ${!PMIX_@} ${!PMI_@} ${!PRTE_@} ${!OMPI_@}

# Environment.
export SUBMITIT_PREEMPT_SIGNAL=USR2
export SUBMITIT_EXECUTOR=slurm

# The supervisor, which starts the ranks on the nodes itself. With exec and not under srun:
# so it is the batch step's own process, which Slurm warns before the job's end.
exec /sw/rollart/bin/python -u -m submitit.core._submit /home/me/demo/slurm

"""Runs on Slurm, or on this machine, by one command: ``python -m launch CONFIG --cluster NAME``.

nemo-run writes and submits one batch script for a job; it starts one agent on every node, and the agents start the
roles: trainer, rollout replicas and single tasks. Nothing here imports torch, and nemo-run only where a
job is made.
"""

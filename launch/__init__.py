"""Starts runs on Slurm or on this machine: ``python -m launch CONFIG --cluster NAME``.

A job is one batch script, which starts one agent per node. The agents start the roles: trainer, rollout replicas and
single tasks. Only ``launch.nemo`` imports nemo-run and torch.
"""

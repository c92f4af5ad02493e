"""Cluster files by name. Each sets ``CLUSTER``. Copy an example, or pass a path to ``--cluster``."""

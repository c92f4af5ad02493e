"""Clusters by name: one file each, which sets ``CLUSTER``. Copy one of the examples, or give ``--cluster`` a path."""

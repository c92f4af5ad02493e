"""Rewards of rows: built in, of a user, by programs that run and by models that judge."""

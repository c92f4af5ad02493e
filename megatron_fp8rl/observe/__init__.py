"""Observability of a run: metrics, spans, recorded rollouts and a live display."""

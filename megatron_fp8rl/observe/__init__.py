"""What a run shows and writes: metrics, spans, rollouts on disk, a live display and a report."""

"""Problems, tokens and packed batches. Pure: no process group, no engine."""

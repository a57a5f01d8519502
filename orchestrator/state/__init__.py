"""What a run directory holds: records, paths, ledger, which checkpoints count, the history it tells."""

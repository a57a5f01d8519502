"""From a checked config to a run directory and a batch script."""

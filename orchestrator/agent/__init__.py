"""One agent per node: starts and watches its ranks, takes evidence, cleans up."""

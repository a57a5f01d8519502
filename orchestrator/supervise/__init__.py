"""The supervisor, inside the allocation: cycles, nodes and spares, the channel to the agents."""

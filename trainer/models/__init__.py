"""Model families as DAGs of pipeline blocks; parallelism comes from the injected layers."""

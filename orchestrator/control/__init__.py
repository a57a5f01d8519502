"""The controller, outside the allocation: observe a run, decide, act; and the ways to start an attempt."""

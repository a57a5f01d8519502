"""One table of metrics, and who serves it."""

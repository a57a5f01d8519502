"""One RunView of a run, and what people look at: status, watch, logs, explain, report, goodput."""

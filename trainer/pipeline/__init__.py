"""Pipeline parallelism: blocks, tracing, schedules as data, lowering, validation and the interpreter."""

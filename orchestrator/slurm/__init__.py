"""Slurm's edge: `text` parses what it prints (pure), `environment` cleans what it is given, `client` runs it."""

"""Slurm's edge: `text` parses what its commands print (pure), `environment` cleans what they are given, `client` runs them."""

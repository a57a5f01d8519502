"""The orchestrator's sections of a config, the site file, and `check`: the trainer's verdict plus the launch rules."""

"""Configuration: one YAML file, read once, judged whole, then an immutable typed value.

load(path) ─▶ Loaded(config, merged, foreign, problems)      load_config(path) ─▶ Config, or ConfigError
"""

from .load import Loaded, load, load_config
from .model import Config, Data, DataStage, Model, ModelConfig, Section
from .problems import Problem, Severity, format_problem

__all__ = [
    "Config",
    "Data",
    "DataStage",
    "Loaded",
    "Model",
    "ModelConfig",
    "Problem",
    "Section",
    "Severity",
    "format_problem",
    "load",
    "load_config",
]

"""Configuration: one YAML file, read once, judged whole, then an immutable typed value.

load(path) ─▶ Loaded(config, merged, foreign, problems)      load_config(path) ─▶ Config, or ConfigError
"""

from .architecture import ModelConfig
from .load import Loaded, load, load_config
from .model import Config, Data, DataStage, Model
from .problems import Problem, Severity, format_problem
from .section import Section

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

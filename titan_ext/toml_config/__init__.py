"""Configs in TOML: a file says which Titan config it extends and what it changes.

Titan 0.1 and 0.2 had TOML; 0.3 is configured in Python. Here a file starts from one of Titan's
config functions (or from another file), so it holds only what is different, under Titan's own key
names, and every key and value is checked. docs/toml.md shows how to write one.

``load(path)`` returns the config; ``resolve(path)`` also says where each value came from;
``python -m titan_ext.toml_config PATH [Titan flags]`` prints that.
"""

from titan_ext.toml_config.errors import TomlConfigError
from titan_ext.toml_config.resolve import Resolved, load, resolve

__all__ = ["Resolved", "TomlConfigError", "load", "resolve"]

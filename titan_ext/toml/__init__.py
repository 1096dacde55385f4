# SPDX-License-Identifier: BSD-3-Clause
"""Configs in TOML: a file says which Titan config it extends and what it changes.

Titan 0.1 and 0.2 had TOML; 0.3 is configured in Python. Here a file starts from one of Titan's
config functions (or from another file) and holds only what is different, under Titan's own key
names. titan_ext checks every key and value. docs/configs.md shows how to write one.

``files`` finds and reads, ``convert`` gives values to a config and dumps them again.
``config_registry.resolve`` puts them together.
"""

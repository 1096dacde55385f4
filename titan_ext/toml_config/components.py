"""Dotted paths in a file: functions, and the components that stand for a section's config class."""

import importlib
from dataclasses import is_dataclass
from typing import Any

from titan_ext.toml_config.errors import Place, nearest

__all__ = ["component_config", "import_dotted", "import_problem"]

_PACKAGES = {
    "PIL": "pillow",
    "deep_ep": "deep_ep (see github.com/deepseek-ai/DeepEP)",
    "fla": "flash-linear-attention",
    "torchft": "torchft-nightly",
}
"""Module to the package that has it, where the names differ."""


def import_problem(module: str, error: Exception) -> str:
    """Why ``module`` cannot be imported, and what to install; for a message.

    Titan takes an ImportError in a config registry for a missing registry, so none may leave here.
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.split(".")[0]
        package = _PACKAGES.get(missing, missing)
        return f"{module} needs the module {error.name}: pip install {package}."
    return f"{module} cannot be imported: {type(error).__name__}: {error}."


def import_dotted(path: str, place: Place) -> Any:
    """The object that ``package.module.Name`` names.

    Raises:
        TomlConfigError: if there is none, or if importing it fails, naming what is missing.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise place.error(f'expected a dotted path, as in "package.module.Name", got "{path}".')
    module, names = _longest_module(parts, place)
    found: Any = module
    for name in names:
        if not hasattr(found, name):
            valid = [known for known in dir(found) if not known.startswith("_")]
            hint = nearest(name, valid)
            holder = getattr(found, "__name__", type(found).__name__)
            raise place.error(f"{holder} has no {name}{hint if 'did you' in hint else '.'}")
        found = getattr(found, name)
    return found


def component_config(path: str, declared: type, place: Place) -> type:
    """The config class of a component, by the path of the component's class or of its Config.

    Raises:
        TomlConfigError: if it is not a kind of ``declared``, the type of the section.
    """
    found = import_dotted(path, place)
    config = getattr(found, "Config", found)
    wanted = declared.__qualname__.removesuffix(".Config")
    if not (isinstance(config, type) and is_dataclass(config)):
        raise place.error(f"expected a kind of {wanted}, but {path} is no component.")
    if not issubclass(config, declared):
        raise place.error(f"expected a kind of {wanted}, but {path} is none.")
    return config


def _longest_module(parts: list[str], place: Place) -> tuple[Any, list[str]]:
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            if not (error.name and f"{name}.".startswith(f"{error.name}.")):
                raise place.error(import_problem(name, error)) from error
        except Exception as error:
            raise place.error(import_problem(name, error)) from error
    raise place.error(f"no module named {parts[0]}; is it on PYTHONPATH?")

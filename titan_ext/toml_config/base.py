"""The Python config function at the end of a chain, and which model choices it made."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from torchtitan.experiments import _supported_experiments
from torchtitan.models import _supported_models
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer as TitanTrainer

from titan_ext.specs import REFUSED_MODELS
from titan_ext.toml_config.components import import_problem
from titan_ext.toml_config.errors import Place, nearest
from titan_ext.toml_config.origins import leaves
from titan_ext.trainer import Trainer, extend_config

__all__ = ["Base", "load_base"]

REGISTRY = "model_registry"
"""The function of every Titan model package that makes its specs."""


@dataclass(frozen=True)
class Base:
    """What a file starts from."""

    name: str
    config: Trainer.Config
    leaves: dict[str, Any]
    """The values of the function's config, before titan_ext fitted them to this machine."""
    registry: Callable[..., ModelSpec] | None
    arguments: dict[str, Any]
    """What the function passed to the registry, with the registry's own defaults."""


@dataclass(frozen=True)
class _RegistryCall:
    registry: Callable[..., ModelSpec]
    arguments: dict[str, Any]
    spec: ModelSpec


def load_base(name: str, place: Place) -> Base:
    """Call the config function ``name`` and make its config ours.

    Args:
        name: ``module.function``; the module is a name that Titan's ``--module`` takes.
        place: ``extends`` of the file that names it.

    Raises:
        TomlConfigError: if there is no such function, if it needs a package that is missing, or if
            titan_ext cannot serve its config.
    """
    if (model := name.partition(".")[0]) in REFUSED_MODELS:
        raise place.error(f"titan_ext does not serve {model}: {REFUSED_MODELS[model]}.")
    function = _find_function(name, place)
    with _watched_registry() as calls:
        config = _call(function, name, place)
    if not isinstance(config, TitanTrainer.Config):
        raise place.error(f"{name} is no config function: it returned {type(config).__name__}.")
    before = leaves(config)
    if not isinstance(config, Trainer.Config):
        try:
            config = extend_config(config)
        except ValueError as error:
            raise place.error(f"{name}: {error}") from error
    spec = config.model_spec
    # Ours shares the model with Titan's; the last call is the one whose result was kept.
    made = [call for call in calls if spec is not None and call.spec.model is spec.model]
    call = made[-1] if made else None
    return Base(
        name=name,
        config=config,
        leaves=before,
        registry=call.registry if call else None,
        arguments=call.arguments if call else {},
    )


def _call(function: Callable[[], Any], name: str, place: Place) -> Any:
    try:
        return function()
    except ImportError as error:
        raise place.error(import_problem(name, error)) from error
    except Exception as error:
        raise place.error(f"{name} failed: {type(error).__name__}: {error}") from error


@contextmanager
def _watched_registry() -> Iterator[list[_RegistryCall]]:
    """Note the calls of ``model_registry`` in the block, with arguments and result.

    A ModelSpec does not say with which attention backend, EP backend or converters it was made,
    and they have to be passed again when a file changes one of them. Python's profile hook sees
    the calls and changes nothing.
    """
    calls: list[_RegistryCall] = []
    arguments: dict[FrameType, dict[str, Any]] = {}

    def see(frame: FrameType, event: str, result: Any) -> None:
        if frame.f_code.co_name != REGISTRY:
            return
        if event == "call":
            arguments[frame] = _arguments(frame)
        elif event == "return" and isinstance(result, ModelSpec):
            registry = frame.f_globals.get(REGISTRY)
            if callable(registry) and _code(registry) is frame.f_code:
                calls.append(_RegistryCall(registry, arguments[frame], result))

    previous = sys.getprofile()
    sys.setprofile(see)
    try:
        yield calls
    finally:
        sys.setprofile(previous)
        arguments.clear()


def _arguments(frame: FrameType) -> dict[str, Any]:
    values = inspect.getargvalues(frame)
    further = values.locals[values.keywords] if values.keywords else {}
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
    return {name: values.locals[name] for name in names} | further


def _code(function: Callable[..., Any]) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)


def _find_function(name: str, place: Place) -> Callable[[], Any]:
    module_name, _, function_name = name.rpartition(".")
    if not module_name:
        raise place.error(f'expected "MODULE.FUNCTION" or "FILE.toml", got "{name}"{_guess(name)}')
    module = _find_module(module_name, place)
    try:
        function = getattr(module, function_name, None)
    except ValueError as error:  # a registry that makes configs on demand refuses one
        raise place.error(str(error)) from error
    if not callable(function):
        hint = nearest(function_name, _config_functions(module), prefix=f"{module_name}.")
        raise place.error(f"{module.__name__} has no config function {function_name}{hint}")
    return function


def _find_module(name: str, place: Place) -> ModuleType:
    """The module that Titan's ``--module name`` would read config functions from."""
    if name in _supported_models:
        candidates = [f"torchtitan.models.{name}.config_registry"]
    elif name in _supported_experiments:
        candidates = [
            f"torchtitan.experiments.{name}.config_registry",
            f"torchtitan.experiments.rl.examples.{name}.config_registry",
        ]
    else:
        candidates = [f"{name}.config_registry", name]
    for candidate in candidates:
        try:
            return importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if not (error.name and f"{candidate}.".startswith(f"{error.name}.")):
                raise place.error(import_problem(name, error)) from error
        except Exception as error:
            raise place.error(import_problem(name, error)) from error
    known = _supported_models | _supported_experiments | {"titan_ext"}
    raise place.error(f"no module {name}{nearest(name, known)}")


def _config_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    ]


def _guess(name: str) -> str:
    """``deepseek_v3_16b`` is most likely meant to be ``deepseek_v3.deepseek_v3_16b``."""
    models = [model for model in _supported_models if name.startswith(model)]
    return f"; did you mean {max(models, key=len)}.{name}?" if models else "."

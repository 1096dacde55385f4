# SPDX-License-Identifier: BSD-3-Clause
"""The config function at the end of a chain of files, and the ``[model]`` section.

``[model]`` holds what Titan's config functions pass to ``model_registry``. A config holds the
finished spec. To change a choice, titan_ext makes a new spec from the same registry, with the
function's other choices. A function that changes its model afterwards has to make all changes.
"""

import contextlib
import functools
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer as TitanTrainer

from titan_ext.base import no_accelerator
from titan_ext.components.lora import wrong_targets
from titan_ext.parallelize.model_spec import extend_model_spec
from titan_ext.run.trainer import Trainer, extended_class, extended_sections
from titan_ext.toml.convert import Given, convert, values_of
from titan_ext.toml.files import (
    MODEL,
    TITAN_MODULES,
    KeyLocation,
    TomlConfigError,
    import_first,
    named_in,
    nearest,
    to_toml,
)

_REGISTRY = "model_registry"
_COMPILED = "model_compile_enabled"
_VOCABULARY = "global_vocab_size"
# For a suggestion only, once Titan has refused a name.
_KNOWN = {
    "attn_backend": ("flex", "flex_flash", "varlen"),
    "moe_comm_backend": ("standard", "deepep", "hybridep", "minimal_async_ep"),
}


class RegistryCall(NamedTuple):
    """A call of a ``model_registry``."""

    registry: Callable[..., ModelSpec]
    arguments: dict[str, Any]
    """All arguments, with the registry's defaults."""
    spec: ModelSpec


class Base(NamedTuple):
    """The config of a config function, from which a file starts; not yet built as ours."""

    name: str
    cls: type
    values: dict[str, Any]
    call: RegistryCall | None
    """The function's call of a registry; None if it made none that we saw."""
    is_fresh: bool
    """True for a config of Titan's own, False for one of ours, which is checked already."""


def load_base(name: str, at: KeyLocation) -> Base:
    """Call the config function ``name`` and extend its config.

    ``name`` is ``MODULE.FUNCTION``; MODULE is a name that Titan's ``--module`` takes. ``at`` is
    ``extends`` of the file that names it.

    Raises TomlConfigError if there is none, a package is missing, or titan_ext cannot serve it.
    """
    function = _find_function(name, at)
    calls: list[RegistryCall] = []
    try:
        with _noting(calls):
            config = function()
    except Exception as error:
        who = f"{name} " if at.key else ""  # else the name stands in front
        raise at.error(f"{who}failed: {type(error).__name__}: {error}") from error
    if not isinstance(config, TitanTrainer.Config):
        raise at.error(f"{name} is not a config function: it returned {type(config).__name__}.")
    try:
        values = values_of(config) | extended_sections(config)
    except ValueError as error:
        raise at.error(f"{name}: {error}") from error
    spec = values["model_spec"]
    # Ours shares the model with Titan's; the last call is the one whose result was kept.
    kept = [call for call in calls if spec is not None and call.spec.model is spec.model]
    is_fresh = not isinstance(config, Trainer.Config)
    cls = extended_class(type(config))
    return Base(name, cls, values, kept[-1] if kept else None, is_fresh)


def _find_function(name: str, at: KeyLocation) -> Callable[[], Any]:
    module_name, _, function_name = name.rpartition(".")
    candidates = [f"{module_name}.config_registry", module_name]
    if module_name in TITAN_MODULES:  # as torchtitan/config/manager.py looks for them
        folders = ("models", "experiments", "experiments.rl.examples")
        candidates = [f"torchtitan.{folder}.{module_name}.config_registry" for folder in folders]
    module = import_first(module_name, candidates, at)
    if module is None:
        raise at.error(f"no module {module_name}.")
    try:
        return named_in(module, function_name, at)
    except TomlConfigError:
        raise
    except ValueError as error:  # titan_ext.config_registry has looked for a file of that name
        raise at.error(str(error)) from error


@contextlib.contextmanager
def _noting(calls: list[RegistryCall]) -> Iterator[None]:
    """Record the calls of a ``model_registry`` in ``calls``: a ModelSpec does not tell its choices.

    Python's hook for profilers sees them however they are spelled. A registry in place of Titan's
    would have to go into every module that imported its own name for it.
    """
    arguments: dict[FrameType, dict[str, Any]] = {}

    def note(frame: FrameType, event: str, result: Any) -> None:
        if frame.f_code.co_name != _REGISTRY:
            return
        if event == "call":
            given = inspect.getargvalues(frame)
            named = {name: given.locals[name] for name in given.args}
            arguments[frame] = named | given.locals.get(given.keywords or "", {})
        elif event == "return" and isinstance(result, ModelSpec):
            registry: Any = frame.f_globals.get(_REGISTRY)
            if getattr(inspect.unwrap(registry), "__code__", None) is frame.f_code:
                calls.append(RegistryCall(registry, arguments[frame], result))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before if callable(before) else None)  # cProfile's is not, in Python 3.11


def choose_model(
    base: Base, given: list[Given], values: dict[str, Any], at: KeyLocation
) -> dict[str, Any]:
    """Make the model again if files change it, and fit the loss to its vocabulary.

    ``given`` is ``[model]`` of each file that has one. Of ``values``, those of the whole config,
    ``model_spec`` and ``loss`` are replaced. ``at`` is the last file. Returns the arguments of the
    model registry; empty if it was not seen.
    """
    arguments = _arguments(base, given)
    spec = values["model_spec"]
    compiled = values["compile"].enable and "model" in values["compile"].components
    if converters := arguments.get("converters"):
        # Titan's config functions tell converters by hand; a file may turn compile on or off.
        arguments["converters"] = [
            converter
            if f"{MODEL}.converters.{index}.{_COMPILED}" in at.origins
            or not hasattr(converter, _COMPILED)
            else replace(converter, **{_COMPILED: compiled})
            for index, converter in enumerate(converters)
        ]
    if base.call and arguments != base.call.arguments:
        at_model = given[-1].at if given else at.below(MODEL)
        values["model_spec"] = _remade(base, arguments, at_model)
    # A config function of Titan's names targets that its model lacks; Titan warns of them.
    for index, converter in enumerate((given and arguments.get("converters")) or ()):
        for problem in wrong_targets(values["model_spec"].model, converter):
            raise at.below(f"{MODEL}.converters.{index}.target_modules").error(problem)
    if isinstance(spec.model, Decoder.Config):
        sizes = spec.model.vocab_size, values["model_spec"].model.vocab_size
        values["loss"] = _fit_vocabulary(values["loss"], *sizes, at.below("loss"))
    return arguments


def _arguments(base: Base, given: list[Given]) -> dict[str, Any]:
    """The arguments for the registry: the base's, changed by the files in turn."""
    if base.call is None:
        for at, _ in given:
            raise at.error(
                f"{base.name} does not call a function named {_REGISTRY}, so [model] has "
                "no choices; change the model in Python."
            )
        return {}
    registry, arguments = base.call.registry, dict(base.call.arguments)
    parameters = inspect.signature(registry).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = typing.get_type_hints(registry, include_extras=True)
    for at, table in given:
        if not isinstance(table, dict):
            raise at.error(f"expected a table [{MODEL}], got {to_toml(table)}.")
        for name, value in table.items():
            below = at.below(name)
            with at.noting():
                if not (name in parameters or takes_any):
                    hint = nearest(name, parameters)
                    raise below.error(f"{_name(registry)} does not take it{hint}")
                current = arguments.get(name, MISSING)
                arguments[name] = convert(hints.get(name, Any), [Given(below, value)], current)
    return arguments


def _remade(base: Base, arguments: dict[str, Any], at: KeyLocation) -> ModelSpec:
    """The function's spec with other ``arguments`` for its registry."""
    assert base.call is not None
    mine = base.values["model_spec"]
    before, after = (_make_spec(base.call, args, at) for args in (base.call.arguments, arguments))
    if not base.is_fresh:  # checked in Python already, which adapts attention to this machine
        for spec in (before, after):
            no_accelerator.adapt_spec(spec)
    hooks = (spec.post_optimizer_build_fn for spec in (before, mine))
    if not (_equal(before.model, mine.model) and _equal(*hooks)):
        raise at.error(
            f"{base.name} changes what {_name(base.call.registry)} returns, and a file would "
            "change it back. Set this in the function, too."
        )
    hook = after.post_optimizer_build_fn
    return replace(mine, model=after.model, flavor=after.flavor, post_optimizer_build_fn=hook)


def _equal(one: Any, other: Any) -> bool:
    """True for equal configs and values; functions are equal by source and bound values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if is_dataclass(one):
        return all(_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, functools.partial):
        parts = ((p.func, p.args, p.keywords) for p in (one, other))
        return _equal(*parts)
    if isinstance(one, FunctionType):
        bound = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
        is_one_source = one.__code__ is other.__code__ and one.__defaults__ == other.__defaults__
        return is_one_source and _equal(*bound)
    return bool(one == other)


def _make_spec(call: RegistryCall, arguments: dict[str, Any], at: KeyLocation) -> ModelSpec:
    try:
        return extend_model_spec(call.registry(**arguments))
    except Exception as error:  # a registry checks with ValueError, KeyError, assert, ...
        function = inspect.unwrap(call.registry)
        tables = [function.__globals__.get(name) for name in function.__code__.co_names]
        flavor = call.arguments.get("flavor")
        flavors = [table for table in tables if isinstance(table, dict) and flavor in table]
        for name, known in [*_KNOWN.items(), *(("flavor", table) for table in flavors)]:
            wrong = arguments.get(name)
            if wrong is not None and wrong not in known:
                raise at.below(name).error(
                    f'"{wrong}" is unknown{nearest(wrong, known)}'
                ) from error
        raise at.error(f"{_name(call.registry)} refuses it: {error}") from error


def _name(function: Callable) -> str:
    return f"{function.__module__}.{function.__name__}"


def _fit_vocabulary(loss: Any, old: int, new: int, at: KeyLocation) -> Any:
    """Give a loss that has the vocabulary size that of the new model, unless a file set another.

    Config functions compute it from their spec, so we replace the old size. A loss that a file
    chose has none yet.
    """
    changes: dict[str, Any] = {}
    for f in fields(loss):
        below, value = at.below(f.name), getattr(loss, f.name)
        if f.name == _VOCABULARY:
            has_none_yet = value is None and below.origin() != ""  # a file chose the loss
            if below.key not in at.origins and (has_none_yet or value == old != new):
                changes[f.name] = new
                below.record()
        elif is_dataclass(value):
            changes[f.name] = _fit_vocabulary(value, old, new, below)
    return replace(loss, **changes)

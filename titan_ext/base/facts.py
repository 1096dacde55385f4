# SPDX-License-Identifier: BSD-3-Clause
"""Facts of a key, told where it is defined: ``Annotated[str, KeyFacts(off="none")]``.

Limits, verify, tune and tests derive their tables from them (``parallelize.keys.FACTS``).
"""

import inspect
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args


class Effect(StrEnum):
    """Effect of a key on results; none changes the optimizer's mathematics."""

    NONE = "no result changes"
    ROUNDING = "changes rounding"
    LOSSY = "lossy: docs/exchanges.md and docs/fsdp.md have losses"


ROUNDING, LOSSY = Effect.ROUNDING, Effect.LOSSY


@dataclass(frozen=True, eq=False)
class KeyFacts:
    """Facts of a key."""

    effect: Effect = Effect.NONE
    """Effect on results. It says by which comparison verify proves the key, too."""
    off: Any = ...
    """The value without the key's feature; none for a key that is a part of a policy."""
    same: tuple[Any, ...] = ()
    """Other values with which no result changes; the first takes the feature's effect away."""
    narrow: bool = False
    """Whether it has fewer bits by itself, and not by the codec. So it is off where verify compares
    exactly."""
    eager_only: str = ""
    """Why it does not go with torch.compile; "" if it does."""

    def is_on(self, value: Any) -> bool:
        """True if ``value`` is one of the feature; None is a key that a section does not have."""
        return self.off is not ... and value not in (None, self.off)

    def is_same(self, value: Any) -> bool:
        """True if no result changes with ``value``."""
        return self.effect is Effect.NONE or value in (None, self.off, *self.same)


def facts_of(section: str, config: type) -> dict[str, KeyFacts]:
    """Facts of the keys that ``config`` adds to the section that it extends, by dotted key."""
    found = {}
    for name, hint in inspect.get_annotations(config).items():
        facts = [fact for fact in get_args(hint) if isinstance(fact, KeyFacts)]
        assert facts, f"{config.__qualname__}.{name}: expected Annotated[..., KeyFacts(...)]"
        (found[f"{section}.{name}"],) = facts
    return found

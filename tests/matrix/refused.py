"""Layouts that do not run, as data: who refuses them, in which words, and what stock Titan does.

A layout that leaves ``ROWS`` comes here with its reproduction, so that a release that lifts the
limit turns a test red and the layout can move back.
"""

from dataclasses import dataclass
from typing import Literal

from tests.training import Run

__all__ = ["REFUSALS", "Refusal"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A run of ours that ends with an error before or in its first step."""

    run: Run
    by: Literal["titan_ext", "torchtitan", "torch"]
    """Whose limit it is."""
    message: str
    """A regular expression, found in the error of our run."""
    stock_message: str | None
    """The same for the stock run of this layout; None if stock trains it."""
    reason: str
    """One plain sentence."""
    address: str = ""
    """The upstream issue, pull request or file that says so; "" if there is none."""

    def __str__(self) -> str:
        return str(self.run)


REFUSALS: list[Refusal] = []

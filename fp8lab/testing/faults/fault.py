"""One fault as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A wrong computation that has a name.

    Attributes:
        name: Words joined by hyphens, the same in every contract that can have the fault.
        sign: What the wrong results look like; a clause.
        remedy: What to do about it; an imperative clause.
    """

    name: str
    sign: str
    remedy: str

    @property
    def sentence(self) -> str:
        """Sign and remedy as two sentences."""
        return f"{_capital(self.sign)}. {_capital(self.remedy)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

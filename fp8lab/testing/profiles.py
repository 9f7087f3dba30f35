"""How much is tried: the profiles of the kit."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Profile:
    """How much a check tries, and how long one call of a kernel may take.

    Attributes:
        name: What it is called on command lines.
        examples: Cases that Hypothesis draws, after the fixed ones.
        largest: Elements of the largest drawn input, about.
        derandomize: Whether every run draws the same cases.
        wide: Whether the fixed cases include the costly ones: every 16-bit pattern, large sizes.
        exhaustive: Whether a cast is tried on every input that there is.
        time_limit: Seconds that one call of the kernel may take.
        minimise_calls: Calls of the kernel that the search for the smallest input may make.
        fixed: Of the fixed cases at most so many, spread over all of them; None for all.
    """

    name: str
    examples: int
    largest: int
    derandomize: bool = True
    wide: bool = False
    exhaustive: bool = False
    time_limit: float = 30.0
    minimise_calls: int = 300
    fixed: int | None = None


QUICK = Profile("quick", examples=30, largest=300)
CI = Profile("ci", examples=100, largest=2000, wide=True)
THOROUGH = Profile(
    "thorough", examples=400, largest=1 << 15, derandomize=False, wide=True, time_limit=120.0
)
EXHAUSTIVE = replace(THOROUGH, name="exhaustive", exhaustive=True)

PROFILES: dict[str, Profile] = {p.name: p for p in (QUICK, CI, THOROUGH, EXHAUSTIVE)}


def profile_named(profile: str | Profile) -> Profile:
    """The profile of that name; a `Profile` is returned as it is.

    Where the environment says CI, "thorough" and "exhaustive" too draw the same cases every time.

    Raises:
        ValueError: The name is unknown.

    >>> profile_named("quick").examples
    30
    """
    if isinstance(profile, Profile):
        return profile
    try:
        found = PROFILES[profile]
    except (KeyError, TypeError):
        accepted = ", ".join(PROFILES)
        raise ValueError(f"unknown profile {profile!r}; accepted: {accepted}") from None
    return replace(found, derandomize=True) if os.environ.get("CI") else found

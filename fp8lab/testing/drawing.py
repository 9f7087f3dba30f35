"""The inputs of a contract as a Hypothesis strategy, for tests of your own."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy.typing as npt

from fp8lab.testing.contracts.base import contract_from
from fp8lab.testing.profiles import PROFILES


def inputs_of(contract: str, **settings: Any) -> st.SearchStrategy[dict[str, npt.NDArray[Any]]]:
    """What `check_...` draws for a contract, after its fixed cases.

    Every name in `fp8lab.testing.contracts`: casts on ties, edges and special values ("cast"),
    matrices of constant, zero, outlying and subnormal blocks around the block's edges
    ("block_quantize", "mx_quantize"), amax histories after many steps ("scale_update"), operands
    that a tensor core truncates, or whose sums are exact ("matmul", exact_sums=True), states of an
    optimizer ("adamw"), lists of gradients ("norm", "clip", "unscale").

    Args:
        contract: The contract's name.
        settings: Its choices, as the check's function takes them.

    Returns:
        A strategy of the inputs by name, as NumPy and ml_dtypes arrays; Python numbers are 0-d.

    Raises:
        ValueError: An unknown contract or setting.

    >>> sorted(inputs_of("matmul", promote_every=128).example())  # doctest: +SKIP
    ['a', 'b', 'inverse_scale_a', 'inverse_scale_b']
    """
    return contract_from(contract, settings).drawn(PROFILES["quick"], frozenset())

"""The numbers of the sigmoid in `swiglu`: plain data that oracle and kernels share.

All are float32. exp(y) on [-ln 2 / 2, ln 2 / 2] is a polynomial of degree 6 whose relative error is
2**-28; its first two coefficients are 1. The others minimise the largest relative error (fitted in
float64, then rounded).
"""

from __future__ import annotations

# Gates are clamped to these. Above, 1 + exp(-gate) is 1; below, exp(-gate) would leave float32.
LOWEST, HIGHEST = -87.0, 30.0
# Added to a number of less than 2**22, it leaves the nearest integer in the low bits.
SHIFTER = 1.5 * 2.0**23
LOG2_E = float.fromhex("0x1.715476p+0")
# ln 2 in two parts, so that n * ln 2 is exact enough for every n.
LN2_HIGH = float.fromhex("0x1.62e430p-1")
LN2_LOW = float.fromhex("-0x1.05c610p-29")
# Of y**6 down to y**2.
EXP = tuple(
    float.fromhex(number)
    for number in (
        "0x1.6a23d0p-10",
        "0x1.123a20p-7",
        "0x1.5558f2p-5",
        "0x1.555492p-3",
        "0x1.fffffcp-2",
    )
)

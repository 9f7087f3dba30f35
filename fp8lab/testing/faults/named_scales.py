"""Names of the faults of scales: from an amax, of blocks, of delayed scaling."""

from __future__ import annotations

from fp8lab.testing.faults.fault import Fault

SCALES = (
    Fault(
        "amax-in-16-bits",
        "the amax is rounded to bfloat16 or float16 before the scale is made",
        "keep the amax in float32: an amax that rounds up makes the scale too small, or halves it",
    ),
    Fault(
        "amax-raised",
        "the amax is raised to an epsilon, or has one added",
        "leave small amaxes as they are, and bound the scale instead",
    ),
    Fault(
        "amax-unguarded",
        "amaxes of 0, Inf and NaN are divided by like any other",
        "keep the scale of before (1 without one) where the amax is 0 or not finite",
    ),
    Fault(
        "zero-amax-scale",
        "an amax of 0 gives another scale than it should",
        "keep the scale of before (1 without one) where the amax is 0",
    ),
    Fault(
        "infinite-amax",
        "an amax of Inf gives another scale than it should",
        "say what Inf gives before dividing by it",
    ),
    Fault(
        "scale-unbounded",
        "a scale beyond float32 becomes Inf, or one is so small that its inverse does",
        "clamp the scale to [2**-127, the largest float32]",
    ),
    Fault(
        "exponent-from-logarithm",
        "just below powers of two the exponent is one too large: it comes from a logarithm",
        "read the exponent from the float's bits",
    ),
    Fault(
        "power-of-two-up",
        "the scale is rounded up to a power of two, so that the largest element saturates",
        "round the scale down: clear the mantissa",
    ),
    Fault(
        "power-of-two-nearest",
        "the scale is rounded to the nearest power of two, so that some largest elements saturate",
        "round the scale down: clear the mantissa",
    ),
    Fault(
        "power-of-two-forgotten",
        "the scale is no power of two",
        "clear the mantissa of the scale",
    ),
    Fault(
        "power-of-two-unasked",
        "the scale is a power of two where it should keep its mantissa",
        "leave the scale as the division gave it",
    ),
    Fault(
        "reciprocal-multiplied",
        "the scale is a product with a reciprocal instead of a quotient",
        "divide once: max_finite / amax, rounded to nearest (tl.div_rn in Triton)",
    ),
    Fault(
        "margin-after-division",
        "the margin is applied after the division, which overflows or underflows earlier",
        "multiply max_finite by 2**-margin first, then divide",
    ),
    Fault("margin-ignored", "the margin is not applied", "multiply max_finite by 2**-margin"),
    Fault(
        "margin-sign",
        "the margin makes the scale larger",
        "headroom makes the scale smaller: multiply by 2**-margin",
    ),
    Fault(
        "margin-linear",
        "the margin divides as a number instead of as a power of two",
        "multiply max_finite by 2**-margin",
    ),
    Fault(
        "scale-is-inverse",
        "the inverse scale is given in place of the scale",
        "give max_finite / amax, which multiplies when quantising",
    ),
    Fault(
        "inverse-from-amax",
        "the inverse scale is amax / max_finite, not the inverse of the scale that was used",
        "give 1 / scale, rounded once, of the scale that multiplied the elements",
    ),
    Fault(
        "scale-kept-for-inverse",
        "the scale is stored in place of its inverse",
        "store what multiplies when decoding",
    ),
    Fault(
        "scales-transposed",
        "the scales are right but stored in the other order of rows and columns",
        "write scale (i, j) at i * columns + j of the scales' own shape",
    ),
    Fault(
        "wrong-extent",
        "a scale belongs to more, fewer or other elements than its block",
        "reduce over the block's own rows and columns, no others",
    ),
    Fault(
        "edge-block-wrong",
        "the smaller blocks at the edge have a scale that is not theirs",
        "mask elements past the edge with 0 and reduce the rest as any block",
    ),
    Fault(
        "zero-block-scale",
        "a block of zeros has another scale than it should",
        "give E8M0 code 0 where the amax is 0",
    ),
    Fault(
        "smallest-scale",
        "blocks of tiny values have a scale above the smallest one",
        "let E8M0 reach code 0, which is 2**-127",
    ),
    Fault(
        "scale-rounded-otherwise",
        "the shared exponent is rounded as under another rule (floor, up, nearest)",
        "name the rule and follow it: floor is the OCP standard's",
    ),
    Fault(
        "scale-exponent-off",
        "every shared exponent is off by the same number",
        "subtract emax, the exponent of the largest element: 8 in E4M3, 15 in E5M2",
    ),
    Fault(
        "state-not-updated",
        "scale and history stay as they were",
        "write both back",
    ),
    Fault(
        "history-not-rolled",
        "the history of amaxes does not move on",
        "move slot i + 1 to slot i, and slot 0 to the end, at each step",
    ),
    Fault(
        "history-rolled-backward",
        "the history of amaxes moves in the wrong direction",
        "move slot i + 1 to slot i, so that the newest amax lies at the end",
    ),
    Fault(
        "slot-not-cleared",
        "slot 0 of the history is not cleared for the next step",
        "set slot 0 to 0 after the history has moved on",
    ),
    Fault(
        "newest-amax-dropped",
        "the amax of this step is not kept in the history",
        "move slot 0 to the end before it is cleared",
    ),
    Fault(
        "newest-amax-left-out",
        "the amax of this step does not count in the new scale",
        "take the maximum over all slots, slot 0 included",
    ),
    Fault(
        "oldest-amax-left-out",
        "the oldest amax does not count in the new scale",
        "take the maximum before the history moves on",
    ),
    Fault(
        "wrong-amax-algorithm",
        "the amax is chosen from the history by another rule",
        'take the largest of all slots for "max", slot 0 for "most_recent"',
    ),
    Fault(
        "wrong-slot",
        "the most recent amax is taken from the wrong slot",
        "read slot 0, which holds the present step's amax",
    ),
    Fault(
        "idle-step-changes-state",
        "a step whose amax is 0 changes the scale or the history",
        "keep scale and history where slot 0 is 0: the layer did not run",
    ),
    Fault(
        "nonfinite-amax-skipped",
        "Inf and NaN in the history are passed over",
        "let them be chosen: the scale then stays for as long as they are in the history",
    ),
)

"""Names of the faults of casts: to FP8, back, and of the largest magnitude."""

from __future__ import annotations

from fp8lab.testing.faults.fault import Fault

CASTS = (
    Fault(
        "ties-away",
        "a value halfway between two codes goes to the one farther from zero",
        "send ties to the even code: add half minus one unit plus the last kept bit, then cut",
    ),
    Fault(
        "ties-toward-zero",
        "a value halfway between two codes goes to the one nearer to zero",
        "send ties to the even code: add half minus one unit plus the last kept bit, then cut",
    ),
    Fault(
        "ties-to-odd",
        "a value halfway between two codes goes to the odd one",
        "look at the last bit that is kept, not at the first one that is dropped",
    ),
    Fault(
        "ties-up",
        "a value halfway between two codes goes to the larger one, whatever its sign",
        "round the magnitude and put the sign back afterwards; floor(x + 0.5) is not symmetric",
    ),
    Fault(
        "truncation",
        "bits that do not fit are dropped: every value goes toward zero",
        "round to nearest even before the mantissa is shifted out",
    ),
    Fault(
        "subnormals-truncated",
        "values below the smallest normal one go toward zero, the others are right",
        "round subnormals as well, by the bits that the larger shift drops",
    ),
    Fault(
        "rounds-to-nearest",
        "values are rounded to nearest where they should go toward zero",
        "drop the bits that do not fit",
    ),
    Fault(
        "rounds-away",
        "every value that is between two codes goes to the one farther from zero",
        "compare what is dropped with half a unit before adding one",
    ),
    Fault(
        "rounds-up",
        "every value that is between two codes goes up, toward plus infinity",
        "round the magnitude to nearest even, and put the sign back afterwards",
    ),
    Fault(
        "rounds-down",
        "every value that is between two codes goes down, toward minus infinity",
        "round the magnitude to nearest even, and put the sign back afterwards",
    ),
    Fault(
        "lost-carry",
        "where the mantissa rounds up past its last bit, the exponent stays as it was",
        "add the rounding to exponent and mantissa as one integer, so that the carry moves on",
    ),
    Fault(
        "double-rounding-float16",
        "values pass through float16 on their way and are rounded twice",
        "round float32 to FP8 in one step; near a tie the first rounding decides the second",
    ),
    Fault(
        "double-rounding-float32",
        "float64 values pass through float32 on their way and are rounded twice",
        "round float64 to FP8 in one step",
    ),
    Fault(
        "triton-interpreter",
        "the codes are those of the cast of Triton's interpreter, which is not the card's",
        "under TRITON_INTERPRET cast by integer operations on the bits, or run on a GPU",
    ),
    Fault(
        "double-rounding-bfloat16",
        "values pass through bfloat16 on their way and are rounded twice",
        "keep the scaled value in float32 until it is cast",
    ),
    Fault(
        "subnormals-flushed",
        "values below the smallest normal code become zero",
        "keep FP8's subnormals: shift the significand further instead of returning zero",
    ),
    Fault(
        "subnormal-inputs-flushed",
        "float32 subnormals in the input count as zero",
        "compile without flush-to-zero, or scale before anything is compared or multiplied",
    ),
    Fault(
        "saturation-missing",
        "finite values beyond the largest one become NaN or Inf",
        "clamp to the largest finite value, and keep NaN by hand",
    ),
    Fault(
        "saturation-unasked",
        "finite values beyond the largest one saturate where they should become NaN or Inf",
        "leave the clamp out, or name the overflow policy that saturates",
    ),
    Fault(
        "infinity-kept",
        "Inf stays Inf (or becomes NaN) where it should become the largest finite value",
        "clamp Inf like every other value beyond the range",
    ),
    Fault(
        "infinity-saturated",
        "Inf becomes the largest finite value where it should stay",
        "clamp finite values alone",
    ),
    Fault(
        "infinity-lost",
        "infinities are dropped, or become finite or NaN",
        "let Inf take part like every magnitude: it is the answer where it is present",
    ),
    Fault(
        "wrong-overflow-edge",
        "overflow begins at the wrong value near the largest finite one",
        "round first; only what rounds past the largest code overflows (464 in E4M3 is still 448)",
    ),
    Fault(
        "wrong-largest-value",
        "values are clamped to, or scaled for, the largest value of another format",
        "derive the limit from the format: 448 in E4M3, 57344 in E5M2, 240 and 57344 in FNUZ",
    ),
    Fault(
        "largest-value-lost",
        "the largest finite code is never given; the one below takes its place",
        "allow the code with exponent all ones that is no NaN (0x7E in E4M3)",
    ),
    Fault(
        "nan-becomes-number",
        "NaN becomes a number",
        "test for NaN before clamping: minimum and maximum may drop it",
    ),
    Fault(
        "nan-lost",
        "NaN is dropped where it should be the answer",
        "compare magnitudes as integers, or use a maximum that propagates NaN",
    ),
    Fault(
        "wrong-nan-code",
        "NaN has another code than the format's own",
        "store the canonical NaN (0x7F in E4M3 and E5M2, 0x80 in FNUZ)",
    ),
    Fault(
        "wrong-nan-sign",
        "the sign of NaN is kept where it should go, or dropped where it should stay",
        "set the sign of NaN as the overflow policy says; the hardware drops it",
    ),
    Fault(
        "minus-zero-lost",
        "zeros lose their sign: -0 and negative underflows become +0",
        "take the sign from the input's bits, not from a comparison with zero",
    ),
    Fault(
        "sign-lost",
        "negative values come out positive",
        "put the sign bit back after the magnitude is cast",
    ),
    Fault(
        "wrong-bias",
        "every code is off by one exponent, as with the bias of the FNUZ form (or of another one)",
        "use the format's own bias: 7 in E4M3, 15 in E5M2, one more in FNUZ",
    ),
    Fault(
        "wrong-format",
        "the codes are those of another FP8 format",
        "check that exponent and mantissa widths belong to the format that is asked for",
    ),
    Fault(
        "special-codes-decoded",
        "codes of NaN or Inf are decoded as if they were numbers",
        "test for the special codes before the exponent is rebuilt",
    ),
    Fault(
        "exponent-shifted-alone",
        "E8M0 codes are shifted into the exponent field: 0 gives 0, or 255 gives Inf",
        "give 2**-127 as the subnormal it is, and NaN for 0xFF",
    ),
    Fault(
        "scale-divides",
        "the scale divides where it should multiply (or the other way round)",
        "quantise with x * scale and dequantise with code * inverse_scale",
    ),
    Fault(
        "scale-ignored",
        "the result is that of a scale of 1",
        "multiply by the scale that the kernel is given",
    ),
    Fault("scale-twice", "the scale is applied twice", "multiply by each scale once"),
    Fault(
        "scale-inverted-twice",
        "values are divided by a rounded reciprocal of the scale",
        "multiply by the scale itself: 1 / (1 / s) is not s",
    ),
    Fault(
        "scale-in-16-bits",
        "the scale is rounded to bfloat16 or float16 before it is used",
        "keep scales in float32, and load them as such",
    ),
    Fault(
        "input-in-16-bits",
        "the input is rounded to bfloat16 or float16 before it is scaled",
        "widen to float32 and stay there until the cast",
    ),
    Fault(
        "result-in-16-bits",
        "the result is rounded to bfloat16 or float16",
        "store float32",
    ),
    Fault(
        "result-flushed",
        "results that are float32 subnormals become zero",
        "compile without flush-to-zero",
    ),
    Fault(
        "scales-combined",
        "the inverse scale and the scale are multiplied with each other in float32 first",
        "form code * inverse_scale * scale without rounding (float64 holds it), and round once",
    ),
    Fault(
        "product-not-rounded",
        "the product with the scale is not rounded to float32 before it goes on",
        "round x * scale to float32: no float64, and no fused multiply-add into what follows",
    ),
    Fault(
        "random-comparison-off-by-one",
        "stochastic rounding goes up one draw too often, exact values included",
        "go up where r < floor(fraction * 2**n), with < and not <=",
    ),
    Fault(
        "random-bits-cut",
        "only some of the random bits count",
        "compare all 32 bits of the word with the fraction",
    ),
    Fault(
        "random-bits-complemented",
        "large words round up where small ones should: the bits were added and carried",
        "compare r < fraction instead of adding r to the mantissa, or add the complement",
    ),
    Fault(
        "random-bits-shared",
        "one random word decides for all elements",
        "give each element the word at its own place",
    ),
    Fault(
        "random-bits-ignored",
        "stochastic rounding is not random: it goes to nearest, or toward zero",
        "use the random words that the kernel is given",
    ),
    Fault(
        "magnitude-forgotten",
        "negative values do not count in the largest magnitude",
        "take the absolute value of each element before the maximum",
    ),
    Fault(
        "nothing-computed",
        "every result is zero",
        "look at the launch grid, the masks and the stores: nothing may have been written",
    ),
    Fault(
        "tail-left-out",
        "the last elements, behind the last whole block or vector, are left out",
        "mask the last block instead of skipping it",
    ),
)

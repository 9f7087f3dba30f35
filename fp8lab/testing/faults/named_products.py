"""Names of the faults of matrix products."""

from __future__ import annotations

from fp8lab.testing.faults.fault import Fault

PRODUCTS = (
    Fault(
        "promotion-missing",
        "the sum is one chain of the tensor core: no partial sum is promoted to float32",
        "start a new accumulator every promote_every of k and add it to a float32 total",
    ),
    Fault(
        "promotion-interval",
        "partial sums are promoted at another interval of k",
        "count k, not steps or blocks: promote after promote_every elements of K",
    ),
    Fault(
        "promotion-unasked",
        "partial sums are promoted to float32 where one chain is wanted",
        "pass the accumulator into the dot: acc = dot(a, b, acc)",
    ),
    Fault(
        "promotion-cut",
        "the promoted total is cut to the tensor core's 14 bits",
        "add partial sums with a float32 addition outside the tensor core",
    ),
    Fault(
        "promotion-tail-lost",
        "the partial sum of the last, shorter stretch of k is lost",
        "promote once more after the loop",
    ),
    Fault(
        "accumulator-late",
        "the accumulator is added after the products of a step instead of among them",
        "align the accumulator with the products before the step's sum is cut",
    ),
    Fault(
        "accumulator-not-aligned",
        "the accumulator is not aligned and cut like the products",
        "let its exponent count for emax, and cut it to the same multiple",
    ),
    Fault(
        "k-order",
        "the elements of K are taken in another order",
        "walk k from 0 upward, a step after the other",
    ),
    Fault(
        "k-tail-left-out",
        "the last elements of K, behind the last whole tile, do not count",
        "round the number of tiles up and mask the last one",
    ),
    Fault(
        "k-tail-unmasked",
        "behind the end of K the kernel reads on into the next rows",
        "mask both operands with 0 where k >= K",
    ),
    Fault(
        "last-k-left-out", "the last element of K does not count", "compare k < K, not k < K - 1"
    ),
    Fault(
        "edge-tile-left-out",
        "rows or columns behind the last whole tile are not computed",
        "round the number of tiles up, and mask the stores",
    ),
    Fault(
        "wide-accumulation",
        "the sum is that of float32 or wider arithmetic, not of the tensor core",
        "choose core=IEEE_FLOAT32 if that is meant; FP8 tensor cores keep 14 bits",
    ),
    Fault(
        "products-not-cut",
        "products keep the bits that the alignment should cut off",
        "cut each product to a multiple of 2**(emax - 13) before they are summed",
    ),
    Fault(
        "alignment-bits",
        "terms are aligned to another number of bits below the largest exponent",
        "keep the core's fraction_bits: 13 for FP8 on Hopper",
    ),
    Fault(
        "alignment-rounds",
        "terms are rounded, or cut toward minus infinity, when they are aligned",
        "cut the magnitude toward zero, and put the sign back",
    ),
    Fault(
        "step-result-not-cut",
        "a step's result keeps more than 14 significant bits",
        "clear the low 10 bits of the float32 after each step",
    ),
    Fault(
        "step-rounded-otherwise",
        "a step's result is rounded in another direction",
        "cut a step's result toward zero",
    ),
    Fault(
        "step-length",
        "a step adds another number of products",
        "add 32 products of FP8 in one step on Hopper",
    ),
    Fault(
        "product-normalised",
        "products are normalised before the largest exponent is taken",
        "take the sum of the operands' exponents as it is, also where the significand is 2 or more",
    ),
    Fault(
        "other-core",
        "the arithmetic is that of another tensor core",
        "check which instruction the kernel compiles to; small tiles go through f16 on Hopper",
    ),
    Fault(
        "scales-one-by-one",
        "the result is multiplied by one scale and then by the other",
        "multiply the two scales first: result * (scale_a * scale_b)",
    ),
    Fault(
        "scale-before-promotion",
        "each partial sum is scaled before it is added to the total",
        "scale the total once, at the end",
    ),
    Fault(
        "scale-after-narrowing",
        "the sum is rounded to 16 bits before it is scaled",
        "scale in float32, and round last",
    ),
    Fault(
        "operand-transposed",
        "an operand's memory is read in the other order of rows and columns",
        "use the strides: a is row-major, b is column-major",
    ),
    Fault(
        "zero-sign",
        "a sum that is zero is -0",
        "start from +0: the tensor core gives +0 whatever the signs of the terms",
    ),
)

"""Names of the faults of AdamW, and of gradients: norm, clip, unscale."""

from __future__ import annotations

from fp8lab.testing.faults.fault import Fault

OPTIMIZER = (
    Fault(
        "fused-multiply-add",
        "a multiplication and an addition are one operation with one rounding",
        "switch contraction off (enable_fp_fusion=False in Triton, -fmad=false in CUDA)",
    ),
    Fault(
        "decay-after-update",
        "weight decay is applied to the parameter after the update",
        "decay first: p = p - (lr*wd)*p, then the update",
    ),
    Fault(
        "decay-of-old-parameter",
        "weight decay is computed from the old parameter and subtracted after the update",
        "decay first, and round; then the update",
    ),
    Fault(
        "decay-multiplied",
        "weight decay multiplies by 1 - lr*wd",
        "subtract the product: p - (lr*wd)*p, or name the order that multiplies",
    ),
    Fault(
        "decay-inside-update",
        "weight decay is part of the update that the step size multiplies",
        "decay the parameter by itself, before the update",
    ),
    Fault("decay-missing", "there is no weight decay", "subtract (lr*wd)*p before the update"),
    Fault("decay-sign", "weight decay makes parameters grow", "subtract the decay"),
    Fault(
        "decay-without-lr",
        "weight decay is not multiplied by the learning rate",
        "multiply by lr*wd, made in float64 and rounded once",
    ),
    Fault(
        "decay-in-float32",
        "lr*wd is a product of float32 numbers",
        "multiply lr and weight_decay in float64 and round once",
    ),
    Fault(
        "weight-decay-in-gradient",
        "weight decay is added to the gradient (Adam with L2), so it enters the moments",
        "decay the parameter itself (AdamW)",
    ),
    Fault(
        "zero-decay-skipped",
        "the decay is left out where weight_decay is 0 (or done where it should be left out)",
        "do as the order says: 0*p makes NaN of Inf, and +0 of -0",
    ),
    Fault(
        "eps-inside-root",
        "eps is added under the root",
        "add eps to the root: sqrt(v/c2) + eps",
    ),
    Fault(
        "eps-before-correction",
        "eps is added before the bias correction of the denominator",
        "correct v first: sqrt(v/c2) + eps",
    ),
    Fault("eps-missing", "eps is not added", "add eps to the denominator"),
    Fault(
        "eps-as-maximum",
        "the denominator is raised to eps instead of having it added",
        "add eps to the denominator",
    ),
    Fault("wrong-eps", "eps has another value", "use the eps that is given"),
    Fault("root-missing", "there is no square root", "take the root of the second moment"),
    Fault(
        "root-approximate",
        "the square root is made from a reciprocal root, or is approximate",
        "use a root that rounds to nearest (tl.sqrt_rn, __fsqrt_rn)",
    ),
    Fault(
        "root-corrected-apart",
        "the root of v is divided by the root of the bias correction",
        "divide v by c2, then take the root; or name the order that does otherwise",
    ),
    Fault(
        "division-by-reciprocal",
        "a division is a multiplication by a reciprocal",
        "divide, rounded to nearest (tl.div_rn, __fdiv_rn)",
    ),
    Fault(
        "step-off-by-one",
        "the bias correction is that of the step before or after",
        "count steps from 1, and raise the betas to the number of this step",
    ),
    Fault(
        "step-in-16-bits",
        "the number of the step is kept in 16 bits: a counter in bfloat16 sticks at 256",
        "count steps in an integer or in float32",
    ),
    Fault(
        "bias-correction-missing",
        "a moment is used without its bias correction",
        "divide m by 1 - beta1**step and v by 1 - beta2**step",
    ),
    Fault(
        "betas-from-float32",
        "the weight 1 - beta is formed from a beta that was rounded to float32",
        "form 1 - beta in float64 and round once",
    ),
    Fault(
        "corrections-in-float32",
        "the bias correction is formed in float32",
        "raise the betas to the step in float64, and round 1 - beta**step once",
    ),
    Fault("betas-swapped", "beta1 and beta2 are swapped", "beta1 is the first moment's"),
    Fault(
        "first-moment-interpolated",
        "the first moment is m + (1-beta1)*(g - m)",
        "compute beta1*m + (1-beta1)*g, or name the order that interpolates",
    ),
    Fault(
        "square-associated-otherwise",
        "the second moment multiplies (1-beta2)*g by g",
        "square g first: (1-beta2)*(g*g)",
    ),
    Fault(
        "gradient-not-squared",
        "the second moment takes the gradient's magnitude",
        "square the gradient",
    ),
    Fault(
        "step-size-first",
        "the update multiplies by lr/c1 before it divides",
        "compute lr*((m/c1)/d), or name the order that has a step size",
    ),
    Fault(
        "lr-multiplied-early",
        "the learning rate is multiplied in before the division by the denominator",
        "multiply by lr last: lr*((m/c1)/d)",
    ),
    Fault(
        "old-moments-used",
        "the update uses a moment from before this step",
        "update the moments first, and use the new ones",
    ),
    Fault(
        "gradient-for-moment",
        "the update uses the gradient in place of the first moment",
        "use the new first moment",
    ),
    Fault("update-sign", "the update is added", "subtract the update"),
    Fault(
        "state-in-16-bits",
        "a moment or the parameter is rounded to bfloat16 or float16",
        "keep the state in float32",
    ),
    Fault(
        "output-not-written",
        "one of the three tensors is not written",
        "store param, exp_avg and exp_avg_sq",
    ),
    Fault(
        "other-order",
        "every bit is that of another stack's order of operations",
        "name that order in the check, or follow the one that is named",
    ),
)

GRADIENTS = (
    Fault(
        "sum-in-plain-order",
        "the squares are added in another order than the fixed tree's",
        "add lanes, rows and leaves as the contract says: other orders round differently",
    ),
    Fault(
        "sum-in-float32",
        "squares or their sum are float32, which loses bits and overflows above 1.8e19",
        "square and add in float64",
    ),
    Fault(
        "norm-of-rounded-norms",
        "the norms of single tensors are rounded before they are combined",
        "combine sums of squares in float64, and take one root",
    ),
    Fault(
        "root-in-float32",
        "the sum of squares is rounded to float32 before its root is taken",
        "take the root in float64, and round last",
    ),
    Fault("largest-for-norm", "the largest magnitude is given", "add squares and take the root"),
    Fault("sum-of-magnitudes", "the sum of magnitudes is given", "add squares and take the root"),
    Fault(
        "mean-for-sum", "the mean of squares is taken", "do not divide by the number of elements"
    ),
    Fault(
        "last-tensor-left-out",
        "the first or last tensor of the list is left out",
        "walk the whole list, empty tensors included",
    ),
    Fault(
        "empty-tensor-ends-list",
        "the list of tensors ends at the first empty one",
        "skip an empty tensor and go on",
    ),
    Fault(
        "last-tensor-alone",
        "only the first or last tensor of the list counts for the flag",
        "merge the flags of all tensors with or",
    ),
    Fault(
        "clip-not-clamped",
        "gradients with a small norm are scaled up",
        "clamp the coefficient to at most 1",
    ),
    Fault("clip-missing", "gradients are not clipped", "multiply by the coefficient"),
    Fault(
        "clip-each-tensor",
        "each tensor is clipped by its own norm",
        "use one norm of all tensors together",
    ),
    Fault(
        "clip-by-value",
        "elements are clamped to the limit one by one",
        "multiply all elements by one coefficient",
    ),
    Fault(
        "clip-divides",
        "gradients are divided by norm / max_norm",
        "form the coefficient first, and multiply by it",
    ),
    Fault(
        "clip-of-nan",
        "a NaN norm leaves the gradients as they are, or makes them zero",
        "let NaN through: the step is then skipped, or stopped, by who called",
    ),
    Fault(
        "coefficient-divided",
        "the coefficient is max_norm / (norm + eps), one division",
        "take the reciprocal of norm + eps, then multiply by max_norm, as torch does",
    ),
    Fault(
        "coefficient-in-float64",
        "the coefficient is formed in float64",
        "form it in float32, each operation rounded",
    ),
    Fault(
        "check-before-unscaling",
        "the flag says whether the scaled gradients were finite, not the unscaled ones",
        "test what the unscaling gave",
    ),
    Fault(
        "check-by-sum",
        "the flag comes from a sum, which overflows where no element does",
        "test each element",
    ),
    Fault("check-missing", "the flag is never set", "set it where an element is NaN or Inf"),
    Fault("check-inverted", "the flag is set where it should not be", "invert the flag"),
    Fault(
        "nonfinite-zeroed",
        "elements that are NaN or Inf become zero",
        "leave them, and set the flag",
    ),
)

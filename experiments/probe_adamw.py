"""Which order of operations torch's CUDA optimizers follow: every candidate against the card.

    python -m fp8lab.experiments.probe_adamw [--golden FILE]

One step is taken from a random state. The moments are compared with each candidate's, then the
parameter with each candidate's from the moments that the card gave, so that one wrong guess hides
no other. The four best are printed: how many of the elements differ. 0 names the order. Fused Adam
with L2 is taken again at a size that is no multiple of 4: torch's kernel deals those elements out
to its threads in another way. With --golden, the card's float32 powers and 20 steps of the fused
and the foreach kernels, AdamW and Adam with L2, are written to an npz file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from fp8lab.bridge import to_numpy
from fp8lab.emulation.adamw_orders import new_moments, new_param, step_constants
from fp8lab.errors import UserError
from fp8lab.experiments.commands import Parser, check_writable, exit_code
from fp8lab.optimizer_formats import (
    APEX,
    L2,
    TORCH_CUDA,
    TORCH_FOREACH_CUDA,
    AdamOrder,
    Constants,
    Decay,
    Denominator,
    FirstMoment,
    SecondMoment,
    Update,
)

SIZE = 1 << 20
STEP = 10
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
GOLDEN_BETAS = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
GOLDEN_STEPS = 64
# Both patterns of torch's fused kernel. The second is more than a block's 2048 elements.
GOLDEN_SIZES = (3000, 3003)
# apex's formula in the loop that apex, DeepSpeed and TransformerEngine have around it, four
# elements a thread, compiled with nvcc's defaults: which product it fuses hangs on what is around.
# The numbers come from memory: torch hands a Python float to a kernel as a double in one release
# and as a float in another, and a float parameter would then be a double's lower half.
FORMULA = r"""
extern "C" __global__ void apex_step(float* p, const float* g, float* m, float* v,
    const float* numbers, int n) {
  float b1 = numbers[0], b2 = numbers[1], c1 = numbers[2], c2 = numbers[3], eps = numbers[4];
  float lr = numbers[5], wd = numbers[6];
  for (int start = 0; start < n; start += blockDim.x * 4) {
    float grad[4], mean[4], square[4], weight[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int i = start + threadIdx.x + k * blockDim.x;
      bool inside = i < n;
      grad[k] = inside ? g[i] : 0.0f;
      weight[k] = inside ? p[i] : 0.0f;
      mean[k] = inside ? m[i] : 0.0f;
      square[k] = inside ? v[i] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      mean[k] = b1 * mean[k] + (1 - b1) * grad[k];
      square[k] = b2 * square[k] + (1 - b2) * grad[k] * grad[k];
      float denominator = sqrtf(square[k] / c2) + eps;
      float update = mean[k] / c1 / denominator + wd * weight[k];
      weight[k] = weight[k] - lr * update;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int i = start + threadIdx.x + k * blockDim.x;
      if (i < n) {
        p[i] = weight[k];
        m[i] = mean[k];
        v[i] = square[k];
      }
    }
  }
}
"""
State = tuple[Any, Any, Any, Any]


def main(arguments: list[str] | None = None) -> None:
    """Print the counts; write the golden file when asked."""
    parser = Parser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--golden", type=Path)
    options = parser.parse_args(arguments)
    if options.golden is not None:
        check_writable(options.golden, "--golden")
    if not torch.cuda.is_available():
        raise UserError("the probe needs a CUDA device; torch finds none")
    print(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")
    powers = card_powers(OPTIONS["betas"], STEP)
    for kind in ("fused", "foreach"):
        for decoupled in (True, False):
            state = random_state()
            found = torch_step(state, kind, decoupled)
            title = f"torch {kind} {'AdamW' if decoupled else 'Adam with L2'}"
            base = TORCH_CUDA if kind == "fused" else TORCH_FOREACH_CUDA
            compare(title, state, found, base, decoupled, powers)
    ragged: State = tuple(array[:-1] for array in random_state())
    title = f"torch fused Adam with L2, {SIZE - 1} elements"
    compare(title, ragged, torch_step(ragged, "fused", False), TORCH_CUDA, False, powers)
    state = random_state()
    try:
        compare(
            "the formula of apex, as nvcc compiles it", state, apex_step(state), APEX, True, None
        )
    except (AttributeError, RuntimeError) as error:
        print(f"the formula of apex cannot be compiled here: {error}")
    if options.golden is not None:
        write_golden(options.golden)


def random_state() -> State:
    """param, grad, exp_avg, exp_avg_sq of a training run, float32."""
    rng = np.random.default_rng(0)
    param, grad, exp_avg, root = (rng.normal(size=SIZE).astype(np.float32) for _ in range(4))
    return (
        param,
        grad * np.float32(0.02),
        exp_avg * np.float32(0.01),
        (root * np.float32(0.01)) ** 2,
    )


def torch_step(state: State, kind: str, decoupled: bool) -> tuple[Any, Any, Any]:
    """What torch makes of the state in step STEP."""
    param, grad, exp_avg, exp_avg_sq = (torch.from_numpy(array.copy()).cuda() for array in state)
    chosen = torch.optim.AdamW if decoupled else torch.optim.Adam
    holder = torch.nn.Parameter(param)
    optimizer = chosen([holder], **OPTIONS, fused=kind == "fused", foreach=kind == "foreach")
    holder.grad = torch.zeros_like(holder)
    optimizer.step()  # makes the state
    with torch.no_grad():
        holder.copy_(torch.from_numpy(state[0]).cuda())
    kept = optimizer.state[holder]
    kept["exp_avg"].copy_(exp_avg)
    kept["exp_avg_sq"].copy_(exp_avg_sq)
    kept["step"].fill_(STEP - 1.0)
    holder.grad = grad
    optimizer.step()
    return to_numpy(holder), to_numpy(kept["exp_avg"]), to_numpy(kept["exp_avg_sq"])


def apex_step(state: State) -> tuple[Any, Any, Any]:
    """What the compiled formula makes of the state."""
    kernel = torch.cuda._compile_kernel(FORMULA, "apex_step")
    param, grad, exp_avg, exp_avg_sq = (torch.from_numpy(array.copy()).cuda() for array in state)
    k = step_constants(APEX, step=STEP, **OPTIONS)
    values = (k.beta1, k.beta2, k.correction1, k.correction2, k.eps, k.lr, k.decay)
    numbers = torch.from_numpy(np.array(values, np.float32)).cuda()
    kernel((1, 1, 1), (512, 1, 1), (param, grad, exp_avg, exp_avg_sq, numbers, param.numel()))
    torch.cuda.synchronize()
    return to_numpy(param), to_numpy(exp_avg), to_numpy(exp_avg_sq)


def compare(
    title: str,
    state: State,
    found: tuple[Any, Any, Any],
    base: AdamOrder,
    decoupled: bool,
    powers: tuple[float, float] | None,
) -> None:
    """Print how many elements differ from each candidate, the best first."""
    print(title)
    param, grad, exp_avg, exp_avg_sq = state
    moments: dict[str, list[tuple[int, str]]] = {"exp_avg": [], "exp_avg_sq": []}
    rules: tuple[L2, ...] = (base.l2,) if decoupled else get_args(L2)
    for constants, l2 in itertools.product(get_args(Constants), rules):
        chosen = replace(base, constants=constants, l2=l2)
        for first, second in itertools.zip_longest(get_args(FirstMoment), get_args(SecondMoment)):
            order = replace(
                chosen, first_moment=first or "weighted", second_moment=second or "square"
            )
            k = step_constants(order, step=STEP, decoupled=decoupled, **OPTIONS)
            m, v = new_moments(param, grad, exp_avg, exp_avg_sq, k, order, decoupled)
            how = f"constants {constants}" + ("" if decoupled else f", L2 {l2}")
            if first:
                moments["exp_avg"].append((differing(m, found[1]), f"{first}, {how}"))
            if second:
                moments["exp_avg_sq"].append((differing(v, found[2]), f"{second}, {how}"))
    if decoupled:
        for name, candidate, place in in_float64(state):
            moments[name].append((differing(candidate, found[place]), "in float64, rounded once"))
    params = [
        (differing(new_param(param, found[1], found[2], k, order, decoupled), found[0]), text)
        for order, k, text in param_candidates(base, decoupled, powers)
    ]
    for name, counts in {**moments, "param": params}.items():
        shown = {text: count for count, text in sorted(counts)[:4]}
        print(f"  {name}: " + "; ".join(f"{count} {text}" for text, count in shown.items()))


def param_candidates(
    base: AdamOrder, decoupled: bool, powers: tuple[float, float] | None
) -> Iterator[tuple[AdamOrder, Any, str]]:
    """Every way from moments to a parameter."""
    for decay, denominator, update, constants in itertools.product(
        get_args(Decay), get_args(Denominator), get_args(Update), get_args(Constants)
    ):
        if (decay == "inside") != (update == "inside_fused"):
            continue
        order = replace(
            base, decay=decay, denominator=denominator, update=update, constants=constants
        )
        for known in (None, powers) if constants == "float32" and powers else (None,):
            k = step_constants(order, step=STEP, decoupled=decoupled, powers=known, **OPTIONS)
            whose = ", the card's powers" if known else ""
            yield order, k, f"{decay}, {denominator}, {update}, {constants}{whose}"


def in_float64(state: State) -> Iterator[tuple[str, Any, int]]:
    """The moments as a kernel gets them whose betas are doubles."""
    _, grad, exp_avg, exp_avg_sq = (array.astype(np.float64) for array in state)
    beta1, beta2 = OPTIONS["betas"]
    yield "exp_avg", (beta1 * exp_avg + (1 - beta1) * grad).astype(np.float32), 1
    square = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    yield "exp_avg_sq", square.astype(np.float32), 2


def differing(one: Any, other: Any) -> int:
    """How many float32 differ in their bits."""
    return int((one.view(np.uint32) != other.view(np.uint32)).sum())


def card_powers(betas: tuple[float, float], step: int) -> tuple[float, float]:
    """beta**step in float32, as the card's powf computes it."""
    base = torch.tensor(betas, dtype=torch.float32, device="cuda")
    exponent = torch.full_like(base, float(step))
    first, second = torch.pow(base, exponent).tolist()
    return first, second


def write_golden(path: Path) -> None:
    """The card's powers for common betas, and 20 steps of torch's kernels, for the tests."""
    steps = torch.arange(1, GOLDEN_STEPS + 1, dtype=torch.float32, device="cuda")
    base = torch.tensor(GOLDEN_BETAS, dtype=torch.float32, device="cuda")
    powers = to_numpy(torch.pow(base[:, None], steps))
    rng = np.random.default_rng(7)
    start = rng.normal(size=max(GOLDEN_SIZES)).astype(np.float32)
    grads = (rng.normal(size=(20, max(GOLDEN_SIZES))) * 0.01).astype(np.float32)
    outputs: dict[str, Any] = {}
    for kind, decoupled, size in itertools.product(
        ("fused", "foreach"), (True, False), GOLDEN_SIZES
    ):
        holder = torch.nn.Parameter(torch.from_numpy(start[:size].copy()).cuda())
        chosen = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = chosen([holder], **OPTIONS, fused=kind == "fused", foreach=kind == "foreach")
        for grad in grads:
            holder.grad = torch.from_numpy(grad[:size].copy()).cuda()
            optimizer.step()
        name = f"{kind}_{'adamw' if decoupled else 'adam'}_{size}"
        kept = optimizer.state[holder]
        for part, tensor in (("param", holder), *kept.items()):
            if part != "step":
                outputs[f"{name}_{part}"] = to_numpy(tensor)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        betas=np.array(GOLDEN_BETAS),
        powers=powers,
        start=start,
        grads=grads,
        **outputs,
        torch=np.array(torch.__version__),
    )
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(exit_code(main))

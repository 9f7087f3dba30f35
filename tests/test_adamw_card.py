"""The orders of torch's CUDA optimizers and of apex against what a card gave, and gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from fp8lab.emulation.adamw import adamw
from fp8lab.emulation.adamw_orders import new_moments, step_constants
from fp8lab.experiments.probe_adamw import OPTIONS, STEP, apex_step, differing, random_state
from fp8lab.optimizer_formats import L2, ORDERS
from fp8lab.testing import assert_bits_equal

GOLDEN = Path(__file__).parent / "golden" / "cuda_adamw.npz"


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_what_a_card_recorded(kind: str, decoupled: bool) -> None:
    """20 steps of torch.optim.AdamW or Adam, `probe_adamw --golden`."""
    rule = f"{kind}_{'adamw' if decoupled else 'adam'}_"
    with np.load(GOLDEN) as file:
        golden = dict(file)
    sizes = {int(name.split("_")[2]) for name in golden if name.startswith(rule)}
    if not sizes:
        pytest.skip(f"{GOLDEN.name} holds no {rule[:-1]}: record it on a card")
    known = [golden["powers"][list(golden["betas"]).index(beta)] for beta in OPTIONS["betas"]]
    for size in sizes:
        state = [golden["start"][:size], *np.zeros((2, size), np.float32)]
        for step, grad in enumerate(golden["grads"][:, :size], start=1):
            first, second = (float(powers[step - 1]) for powers in known)
            state = list(
                adamw(
                    state[0],
                    grad,
                    *state[1:],
                    step=step,
                    order="torch_cuda" if kind == "fused" else "torch_foreach_cuda",
                    decoupled=decoupled,
                    powers=(first, second) if kind == "fused" else None,
                    **OPTIONS,
                )
            )
        for part, found in zip(("param", "exp_avg", "exp_avg_sq"), state, strict=True):
            assert_bits_equal(found, golden[f"{rule}{size}_{part}"])


def test_l2_on_the_card_is_rounded_in_the_first_of_four() -> None:
    """The H200's moments differed from the fused and the rounded sum's in so many elements."""
    state = random_state()
    found = {}
    for rule in get_args(L2):
        order = replace(ORDERS["torch_cuda"], l2=rule)
        k = step_constants(order, step=STEP, decoupled=False, **OPTIONS)
        found[rule] = new_moments(*state, k, order, False)
    m, v = found["first_rounded"]
    assert differing(m, found["fused"][0]) == 43_680
    assert differing(v, found["fused"][1]) == 24_461
    assert differing(v, found["rounded"][1]) == 73_908


@pytest.mark.parametrize(
    ("size", "place", "card"),
    [
        (
            65536,  # a multiple of 4: the parameter
            0,
            {
                3352: 0xBB9CE944,
                11604: 0x3AA8AA91,
                17448: 0x3BCA2917,
                18512: 0x3A6D623A,
                41436: 0xBCACAC56,
                41496: 0xBCABA886,
                43932: 0x39F530D0,
            },
        ),
        (
            1003,  # none: the first moment
            1,
            {
                0: 0xBC276E2A,
                4: 0xBA06669E,
                6: 0x3C73794D,
                9: 0x3B469DFE,
                20: 0xBC8C122B,
                23: 0x3BFED12F,
                39: 0xBAFA1084,
                42: 0x3C19127C,
            },
        ),
    ],
)
def test_l2_elements_as_the_card_returned_them(size: int, place: int, card: dict[int, int]) -> None:
    """Step 1 of the test on the card below. Had all sums been fused, 7 and 107 would differ."""
    rng = np.random.default_rng(size)
    start = rng.normal(size=size).astype(np.float32)
    grad = (rng.normal(size=size) * 10.0 ** rng.integers(-6, 1)).astype(np.float32)
    with np.load(GOLDEN) as file:
        rows = [list(file["betas"]).index(beta) for beta in OPTIONS["betas"]]
        first, second = (float(file["powers"][row, 0]) for row in rows)
    found = {}
    rules: tuple[L2, ...] = ("first_rounded", "fused")
    for rule in rules:
        found[rule] = adamw(
            start,
            grad,
            *np.zeros((2, size), np.float32),
            step=1,
            order=replace(ORDERS["torch_cuda"], l2=rule),
            decoupled=False,
            powers=(first, second),
            **OPTIONS,
        )[place]
    words = found["first_rounded"].view(np.uint32)
    assert {index: int(words[index]) for index in card} == card
    assert differing(found["first_rounded"], found["fused"]) == (7 if size % 4 == 0 else 107)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1 << 16, 1003, 70_001])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize(("order", "fused"), [("torch_cuda", True), ("torch_foreach_cuda", False)])
def test_equals_torch_on_the_card_over_20_steps(
    order: str, fused: bool, size: int, decoupled: bool, weight_decay: float
) -> None:
    rng = np.random.default_rng(size)
    betas = (0.9, 0.999)
    state = [rng.normal(size=size).astype(np.float32), *np.zeros((2, size), np.float32)]
    param = torch.nn.Parameter(torch.from_numpy(state[0].copy()).cuda())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind(
        [param], lr=1e-3, betas=betas, weight_decay=weight_decay, fused=fused, foreach=not fused
    )
    base = torch.tensor(betas, device="cuda")
    for step in range(1, 21):
        grad = (rng.normal(size=size) * 10.0 ** rng.integers(-6, 1)).astype(np.float32)
        param.grad = torch.from_numpy(grad).cuda()
        theirs.step()
        first, second = torch.pow(base, torch.full_like(base, float(step))).tolist()
        state = list(
            adamw(
                state[0],
                grad,
                state[1],
                state[2],
                step=step,
                lr=1e-3,
                betas=betas,
                eps=1e-8,
                weight_decay=weight_decay,
                order=order,
                decoupled=decoupled,
                powers=(first, second) if order == "torch_cuda" else None,
            )
        )
        kept = theirs.state[param]
        for found, want in zip((param, kept["exp_avg"], kept["exp_avg_sq"]), state, strict=True):
            assert_bits_equal(found, want)


@pytest.mark.gpu
def test_equals_apexs_loop_as_the_card_compiles_it() -> None:
    """Which products are fused is the compiler's choice: measured with CUDA 13.0."""
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this torch cannot compile CUDA C++ at run time")
    state = tuple(array[: (1 << 16) + 77].copy() for array in random_state())
    want = adamw(*state, step=STEP, order="apex", **OPTIONS)
    for found, expected in zip(apex_step(state), want, strict=True):
        assert_bits_equal(found, expected)

"""What an FP8 linear layer refuses: products, types and devices."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fp8lab.errors import UserError
from fp8lab.linear_products import MODES
from fp8lab.recipes import PRODUCT_OPERANDS, PRODUCTS, Recipe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_products(recipe: Recipe, products: str) -> None:
    """Refuse products that there are not, and codes that the tensor core cannot multiply.

    Raises:
        UserError: With what is accepted.
    """
    if products not in MODES:
        raise UserError(f"products is {products!r}; accepted: {', '.join(MODES)}")
    if products == "decoded":
        return
    for name in PRODUCTS:
        if not recipe.in_fp8(name):
            continue
        lengths = recipe.block_lengths(name)
        if lengths - {32, 128} or len(lengths) > 1:
            shown = ", ".join(str(length) for length in sorted(lengths))
            raise UserError(
                f"recipe {recipe.name!r}: the {name} product has blocks of {shown}; the FP8 product"
                ' takes one length, 128 or 32 (products="decoded" takes any)'
            )
        for role, _ in PRODUCT_OPERANDS[name]:
            fmt = recipe.operand(role).format
            if fmt not in ("E4M3", "E5M2"):
                raise UserError(
                    f"recipe {recipe.name!r}: {role} is {fmt}; the FP8 product takes E4M3 and E5M2"
                    ' (products="decoded" takes any)'
                )


def check_dtype(x: Tensor) -> None:
    """Refuse an input of a type that no layer takes.

    Raises:
        TypeError: With what is accepted.
    """
    if x.dtype not in DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"x has dtype {x.dtype}; accepted: {accepted}")


def check_kernels(device: torch.device) -> None:
    """Refuse a device on which the kernels do not run.

    Raises:
        UserError: A CPU, outside a process with TRITON_INTERPRET=1.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and device.type == "cpu"
    if device.type != "cuda" and not interpreted:
        raise UserError(
            f'products is "kernels", but the layer is on {device}; move the model to a CUDA device,'
            ' or take products="codes" (the oracle computes on the CPU, with the same bits)'
        )

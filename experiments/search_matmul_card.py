"""The contestants of a search over launch settings of products, on a card."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton

from fp8lab.errors import UserError
from fp8lab.experiments.bench_matmul import Operands
from fp8lab.experiments.card_timing import Launch, captured, timed
from fp8lab.experiments.search_matmul_rows import Mode
from fp8lab.kernels.matmul import checked_product, matmul
from fp8lab.kernels.matmul_launch import candidates_for
from fp8lab.kernels.matmul_product import multiprocessors
from fp8lab.kernels.matmul_settings import GluonSettings
from fp8lab.records import Row, environment

COMPILERS = 16  # threads
SLOW = 3  # times the default's time: a candidate that takes longer is not worth its visits
_MX_CODES = (120, 132)  # of E8M0: 2**-7 to 2**4


def scales_of(mode: Mode, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inverse scales of a and b, laid out as the cast kernels write them."""
    if mode.scales == "one":
        return operands.one, operands.one
    if mode.scales == "squares":
        return operands.rows, operands.squares
    m, n, k = operands.sizes
    if mode.scales == "columns":
        return operands.rows, torch.rand(k // 128, n, device="cuda") + 0.1
    left, right = (
        torch.randint(*_MX_CODES, (k // 32, size), dtype=torch.uint8, device="cuda")
        for size in (m, n)
    )
    return left.t().view(torch.float8_e8m0fnu), right.view(torch.float8_e8m0fnu)


class Contest:
    """One product by every candidate, beside its reference.

    Attributes:
        sets: Operand sets that launches cycle through.
        reference_name: Of what candidates are compared with: "cublaslt", or "default" where that
            lacks the contract.
    """

    def __init__(self, mode: Mode, operands: Operands) -> None:
        self._mode, self._operands = mode, operands
        self._scales = scales_of(mode, operands)
        self.sets = operands.count
        default = self.launch(None)
        self._expected = default(0).clone()
        self._alone = _alone(default)
        has = mode.scales != "mx" and self._is_theirs()
        self.reference_name = "cublaslt" if has else "default"

    @property
    def reference(self) -> Launch:
        """What candidates are compared with."""
        return self._theirs if self.reference_name == "cublaslt" else self.launch(None)

    def launch(self, settings: GluonSettings | None) -> Callable[[int], torch.Tensor]:
        """A product with these settings, or with the default ones, on operand set i."""
        operands, (a, b) = self._operands, self._scales

        def launch(index: int) -> torch.Tensor:
            return matmul(
                operands.a[index % operands.count],
                operands.b[index % operands.count],
                inverse_scale_a=a,
                inverse_scale_b=b,
                promote_every=self._mode.promote,
                out=operands.out,
                out_dtype=torch.bfloat16,
                settings=settings,
            )

        return launch

    def _theirs(self, index: int) -> torch.Tensor:
        operands, (a, b) = self._operands, self._scales
        result: torch.Tensor = torch._scaled_mm(
            operands.a[index % operands.count],
            operands.b[index % operands.count],
            scale_a=a,
            scale_b=b,
            out_dtype=torch.bfloat16,
            use_fast_accum=self._mode.promote is None,
        )
        return result

    def _is_theirs(self) -> bool:
        """Whether torch takes the product."""
        try:
            self._theirs(0)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            return False
        return True

    def prepare(self, candidates: list[GluonSettings]) -> None:
        """Compile them, many at a time; what fails is told where each is looked at."""

        def compile_one(settings: GluonSettings) -> None:
            with suppress(Exception):
                self.launch(settings)(0)

        with one_launcher_at_a_time(), ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(compile_one, candidates))
        self.check_device()

    def problem(self, settings: GluonSettings) -> str | None:
        """Why a candidate is not timed; None where it has the default's bits and is no slow one."""
        launch = self.launch(settings)
        self._operands.out.fill_(float("nan"))  # a kernel that writes nothing must not pass
        try:
            bits = launch(0).view(torch.int16)
            different = int((bits != self._expected.view(torch.int16)).sum())
        except Exception as error:  # whatever it is, the other candidates go on
            said = " ".join(str(error).split())
            return f"{type(error).__name__}: {said[:200]}"
        if different:
            return f"{different} elements differ from the default's"
        times = _alone(launch) / self._alone
        return f"takes {times:.1f} times as long as the default" if times > SLOW else None

    def check_device(self) -> None:
        """See that the card still works.

        Raises:
            UserError: A kernel broke what CUDA keeps for this process.
        """
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            said = str(error).splitlines()[0]
            raise UserError(
                f"a candidate of {self._mode.name} broke the device ({said}); finished rows are"
                " kept: give the same command again, or with another --out and --tiles without it"
            ) from None


class Card:
    """The card that is searched on."""

    def __init__(self, said: Row) -> None:
        """Take the card; `said` is what rows say of the run beside the environment."""
        self._said = said
        self._operands: Operands | None = None

    def environment(self) -> Row:
        """What the head says: of it only device and packages must be the same in all sittings."""
        return environment("cuda") | self._said

    def multiprocessors(self) -> int:
        """How many it has."""
        return multiprocessors(torch.device("cuda", torch.cuda.current_device()))

    def available(self, mode: Mode) -> list[GluonSettings]:
        """The tiles that a mode may take.

        Raises:
            UserError: The fast kernel does not run here.
        """
        operands = Operands(256, 256, 512)
        a, b = scales_of(mode, operands)
        product = checked_product(
            operands.a[0],
            operands.b[0],
            inverse_scale_a=a,
            inverse_scale_b=b,
            promote_every=mode.promote,
            out_dtype=torch.bfloat16,
        )
        found = [one for one in candidates_for(product) if isinstance(one, GluonSettings)]
        if not found:
            raise UserError("search_matmul needs a card of sm_90: only there is the fast product")
        return found

    def contest(self, mode: Mode, sizes: tuple[int, int, int]) -> Contest:
        """The contestants of a product; modes of one shape share their operands."""
        if self._operands is None or self._operands.sizes != sizes:
            self._operands = None  # before there are others: both may not fit
            torch.cuda.empty_cache()
            self._operands = Operands(*sizes)
        return Contest(mode, self._operands)


def _alone(launch: Launch) -> float:
    """Milliseconds of a launch: the least of three."""
    graph = captured(launch, 1)
    return max(1e-3, min(timed(graph) for _ in range(3)))


@contextmanager
def one_launcher_at_a_time() -> Iterator[None]:
    """Inside, threads may launch what is new: Triton's launchers must not be loaded side by side.

    They are extension modules of one name. Where Python loads one again, it gives the module object
    that the last one of that name has, and puts its functions there: a thread between loading and
    reading `launch` would get another kernel's.
    """
    driver: Any = triton.runtime.driver.active
    make, lock = driver.launcher_cls, threading.Lock()

    def made(*given: Any) -> Any:
        with lock:
            return make(*given)

    driver.launcher_cls = made
    try:
        yield
    finally:
        driver.launcher_cls = make

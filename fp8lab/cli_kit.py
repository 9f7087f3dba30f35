"""The command line of the testing kit: `fp8lab verify` and `fp8lab new-kernel`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp8lab.errors import UserError

SAMPLE = 1 << 24


def add_verify(commands: Any) -> None:
    """Add `fp8lab verify`."""
    verify = commands.add_parser(
        "verify",
        help="hold your kernels to their contracts; compare the casts' fast forms",
        description="With files: hold the functions in them that are marked with"
        ' @fp8lab.testing.contract("cast", fmt=E4M3) (or matmul, adamw, ...) to the oracle, and'
        " show the smallest input on which one is wrong. Without: cast float32 bit patterns to E4M3"
        " and E5M2 in every fast form of the oracle, with ml_dtypes and with torch, and compare the"
        " codes. Exit code 1 when anything differs, 2 for a mistake in the command.",
    )
    verify.add_argument(
        "kernels", nargs="*", metavar="FILE", help="my_kernels.py, or my_kernels.py:function"
    )
    verify.add_argument(
        "--profile",
        metavar="NAME",
        help="how much is tried: quick (default), ci, thorough, exhaustive (every input of a cast)",
    )
    verify.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where kernels run; cpu interprets Triton kernels (default: the GPU if there is one)",
    )
    verify.add_argument(
        "--in-process",
        action="store_true",
        help="run kernels in this process, for a debugger (default: in one that may crash or hang)",
    )
    verify.add_argument(
        "--case", type=Path, metavar="CASE", help="replay a saved case, with FILE or without"
    )
    verify.add_argument(
        "--mutants", action="store_true", help="score the kit itself on its planted faults"
    )
    share = verify.add_mutually_exclusive_group()
    share.add_argument("--exhaustive", action="store_true", help="all 2**32 patterns (minutes)")
    share.add_argument(
        "--sample", type=int, metavar="N", help=f"this many patterns (default {SAMPLE})"
    )
    verify.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="processes for --mutants and for the patterns (default 1)",
    )
    verify.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON, too")
    verify.set_defaults(run=_verify, after_interrupt="Nothing was written.")


def add_new_kernel(commands: Any) -> None:
    """Add `fp8lab new-kernel`."""
    new = commands.add_parser(
        "new-kernel",
        help="write a kernel with its oracle, test and benchmark to start from",
        description="Write NAME.py (a Triton kernel), NAME_oracle.py, test_NAME.py and"
        " bench_NAME.py into a folder; they run and pass as they are.",
    )
    new.add_argument("name", metavar="NAME", help="the kernel's name, as a Python identifier")
    new.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="(default: this folder)"
    )
    new.set_defaults(run=_new_kernel, after_interrupt="Some files may have been written.")


def _verify(given: argparse.Namespace) -> int:
    forms = {"--exhaustive": given.exhaustive, "--sample": given.sample is not None}
    kit = {"FILE": bool(given.kernels), "--case": given.case is not None}
    kit["--mutants"] = given.mutants
    chosen = [name for name, was in {**forms, **kit}.items() if was]
    if any(forms.values()) and any(kit.values()):
        raise UserError(
            f"{' and '.join(chosen)} do not go together; accepted: FILE with --profile, --device"
            " and --case; --mutants; or --exhaustive or --sample without a FILE"
        )
    if given.out is not None and any(kit.values()):
        raise UserError("--out is for the patterns; kernels save their cases in .fp8lab/cases")
    if given.mutants:
        if given.kernels or given.case:
            raise UserError("--mutants takes no FILE and no --case; give it alone")
        return _mutants(given)
    if given.case is not None:
        return _replay(given)
    if given.kernels:
        from fp8lab.verify_kernels import target_of, verify_kernels

        targets = [target_of(text) for text in given.kernels]
        profile = given.profile or "quick"
        return verify_kernels(
            targets, device=given.device, profile=profile, in_process=given.in_process
        )
    if given.profile or given.device:
        raise UserError("--profile and --device are for kernels; name a FILE that holds some")
    return _verify_forms(given)


def _replay(given: argparse.Namespace) -> int:
    from fp8lab.verify_kernels import replay, target_of

    if len(given.kernels) > 1:
        raise UserError(f"--case takes one FILE at most; given: {', '.join(given.kernels)}")
    target = target_of(given.kernels[0]) if given.kernels else None
    return replay(given.case, target, device=given.device, in_process=given.in_process)


def _mutants(given: argparse.Namespace) -> int:
    from fp8lab.testing import mutants
    from fp8lab.testing.profiles import profile_named

    if given.jobs < 1:
        raise UserError(f"--jobs is {given.jobs}; accepted: 1 or more")
    try:
        profile = profile_named(given.profile or "quick")
    except ValueError as error:
        raise UserError(str(error)) from None
    results = mutants.run(profile=profile, jobs=given.jobs)
    width = max(len(result.name) for result in results)
    for result in results:
        state = "caught" if result.caught else "SURVIVED"
        if result.equivalent:
            state = "equivalent"
        guess = "no guess" if result.guess is None else result.guess
        right = "" if result.guess_right or not result.caught else "  (wrong guess)"
        print(f"{result.name:<{width}}  {result.contract:<16} {state:<10} {guess}{right}")
    judged = [result for result in results if not result.equivalent]
    caught = [result for result in judged if result.caught]
    guessed = sum(bool(result.guess_right) for result in caught)
    print(f"{len(caught)} of {len(judged)} caught, {guessed} with the right guess")
    for result in results:
        if result.equivalent:
            print(f"equivalent: {result.name}: {result.equivalent}")
        elif not result.caught:
            print(f"survived: {result.name}: {result.description}")
    return 0 if len(caught) == len(judged) else 1


def _verify_forms(given: argparse.Namespace) -> int:
    from fp8lab.records import to_json, write_atomically
    from fp8lab.verify import verify

    out: Path | None = given.out
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out is {out}, but {out.parent} is not a folder")
    sample = None if given.exhaustive else SAMPLE if given.sample is None else given.sample
    share = "--exhaustive" if sample is None else f"--sample {sample}"
    command = f"fp8lab verify {share} --jobs {given.jobs}"
    row = verify(sample, given.jobs, command=command)
    failed = [check for check in row["checks"] if check["differences"]]
    for check in row["checks"]:
        print(f"{check['format']}  {check['check']}: {check['differences']} differ")
    for reason in row["skipped"]:
        print(f"skipped: {reason}")
    for check in failed:
        print(check["first"])
    print(f"{row['patterns']} patterns in {row['seconds']} s")
    if out is not None:
        write_atomically(out, to_json(row, indent=2) + "\n")
        print(f"result: {out}")
    return 1 if failed else 0


def _new_kernel(given: argparse.Namespace) -> int:
    from fp8lab.new_kernel import write_kernel

    files = write_kernel(given.name, given.out)
    for file in files:
        print(file)
    print(f"test it: python -m pytest {files[2]}")
    return 0

"""From opening an audit to closing it: what counts as a step, nesting, threads."""

from __future__ import annotations

import threading

import torch

import fp8lab
from fp8lab import observe
from fp8lab.linear import advance_scaling
from tests.audit_cases import K, Loop, network


def test_a_step_is_an_optimizers_and_every_counts_them() -> None:
    loop = Loop(network("delayed"))
    with fp8lab.audit(every=3, sample=1) as report:
        for _ in range(7):
            loop.step(microbatches=2)
    assert (report.steps, report.audited) == (7, 3)
    checks = {line.checks for (_, what), line in report.lines.items() if what == "forward product"}
    assert checks == {6}


def test_without_an_optimizer_advance_scaling_ends_a_step() -> None:
    model = network("delayed")
    with fp8lab.audit(sample=1) as report, torch.no_grad():
        for _ in range(2):
            model(torch.ones(2, K))
            model(torch.ones(2, K))
            advance_scaling(model)
    assert report.steps == 2


def test_torchs_own_optimizer_ends_a_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8lab.audit(sample=1, every=2) as report:
        for _ in range(3):
            model(torch.ones(2, K)).sum().backward()
            optimizer.step()
    assert (report.steps, report.audited) == (3, 2)


def test_audits_are_nested_and_closed() -> None:
    model = network()
    with fp8lab.audit(sample=1) as outer:
        with fp8lab.audit(sample=1) as inner:
            model(torch.ones(2, K))
        between = outer.checked
        assert inner.checked == between > 0
        model(torch.ones(2, K))
    assert outer.checked > between
    assert inner.checked == between
    assert observe._open == ()


def test_another_threads_operations_are_its_own() -> None:
    """A backward pass on the CPU runs in the thread that calls it."""
    here, there = network(), network()

    def elsewhere() -> None:
        there(torch.ones(2, K)).sum().backward()

    with fp8lab.audit(sample=1) as report:
        here(torch.ones(2, K)).sum().backward()
        before = report.checked
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert there.get_submodule("0").weight.grad is not None
    assert report.checked == before

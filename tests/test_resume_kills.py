"""Kill -9 at random moments of a loop that trains and saves: what is there is whole and exact.

    python tests/test_resume_kills.py KILLS FOLDER

is the loop on its own: one process imports everything, then forks a child for each kill. A child
takes the newest checkpoint and goes on, saving after every second step, in turn with a thread and
without, until it is killed. After each kill the newest checkpoint is loaded, whole, and its state
compared in bits with that of a run that nobody stopped.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fp8lab.checkpoint import load, take_state
from fp8lab.checkpoint_files import remove_leftovers
from fp8lab.checkpoint_store import AsyncWriter, CheckpointStore, checkpoints_in
from fp8lab.checkpoint_tree import leaves, rebuild, same_leaf
from fp8lab.linear import Fp8Linear, advance_scaling
from fp8lab.optimizer import AdamW
from fp8lab.recipes import recipe_named
from fp8lab.state import TrainingState

ROOT = Path(__file__).resolve().parent.parent
SAVES = 3  # a child is killed before, in or after one of this many


def tiny_training() -> tuple[TrainingState, Callable[[], None]]:
    """A small network with delayed scales and moments in E4M3, and what takes one step."""
    random.seed(0)  # Python seeds a forked child anew
    recipe = recipe_named("delayed:history=4")
    model = nn.Sequential(
        Fp8Linear(16, 32, recipe, products="decoded"),
        nn.ReLU(),
        Fp8Linear(32, 16, recipe, products="decoded"),
    )
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1, generator=generator)
    optimizer = AdamW(model.parameters(), lr=0.01, exp_avg="e4m3_128", exp_avg_sq="e4m3_128_keep")
    rng = np.random.default_rng(0)

    def step() -> None:
        x = torch.from_numpy(rng.standard_normal((16, 16), dtype=np.float32))
        loss = (model(x) - x.flip(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        advance_scaling(model)

    return TrainingState(model, optimizer, generators={"data": rng}), step


def train_until_killed(root: Path, pipe: int, *, threaded: bool) -> None:
    """Go on from the newest checkpoint, saving after every second step, for ever.

    A byte goes to the pipe after each save, so that the parent knows how far this is.
    """
    store = CheckpointStore(root, keep_last=2)
    state, step = tiny_training()
    done = 0
    if found := checkpoints_in(root):
        newest = load(found[-1])
        state.restore(newest.state)
        done = newest.manifest.step
    writer = AsyncWriter(store)
    while True:
        step()
        step()
        done += 2
        if threaded:
            writer.save(state.capture(), step=done)
        else:
            store.save(state.capture(), step=done)
        os.write(pipe, b".")


class Uninterrupted:
    """The states of a run that nobody stopped, as far as they are asked for."""

    def __init__(self) -> None:
        self._state, self._step = tiny_training()
        self._done = 0

    def leaves_at(self, step: int) -> dict[str, Any]:
        while self._done < step:
            self._step()
            self._done += 1
        assert self._done == step, "steps are asked for in order"
        taken = take_state(self._state.capture())
        return dict(leaves({name: rebuild(own.json, own.tensors) for name, own in taken.items()}))


def kill_loop(root: Path, kills: int) -> dict[str, int]:
    """Kill children; check what each left. Counts of what happened."""
    rng = random.Random(0)
    uninterrupted = Uninterrupted()
    seen = {"kills": 0, "in_a_save": 0, "checkpoints": 0, "steps": 0}
    tiny_training()[1]()  # every import and every table is there before the first fork
    root.mkdir(parents=True)
    cycle = 0.05  # seconds from one save to the next, as they were lately: machines are busy
    for number in range(kills):
        listen, speak = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                train_until_killed(root, speak, threaded=number % 2 == 0)
            finally:
                os._exit(1)
        os.close(speak)
        for _ in range(rng.randrange(SAVES + 1)):
            started = time.perf_counter()
            os.read(listen, 1)
            cycle = time.perf_counter() - started
        time.sleep(rng.uniform(0, 1.5 * cycle))
        os.close(listen)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself: its error is above"
        seen["kills"] += 1
        seen["in_a_save"] += any(root.glob(".*.partial-*"))
        remove_leftovers(root)
        found = checkpoints_in(root)
        seen["checkpoints"] += bool(found)
        if found:
            newest = load(found[-1])
            ours, theirs = dict(leaves(newest.state)), uninterrupted.leaves_at(newest.manifest.step)
            assert ours.keys() == theirs.keys()
            for path, value in theirs.items():
                assert same_leaf(ours[path], value), f"{found[-1]}: {path}"
            seen["steps"] = newest.manifest.step
    return seen


def test_killed_at_random_moments(tmp_path: Path) -> None:
    kills = 40
    done = subprocess.run(
        [sys.executable, __file__, str(kills), tmp_path / "loop"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == kills
    assert seen["checkpoints"] > kills // 2
    assert seen["in_a_save"] >= 3, "no kill fell into a save; the loop tests nothing"
    assert seen["steps"] > kills


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(kill_loop(Path(sys.argv[2]), int(sys.argv[1]))))

"""What the parts of a training state are called, for people."""

from __future__ import annotations


def kind_of(path: str) -> str:
    """What a path of the state stands for, in a reader's words: "amax history", "scale"."""
    part, _, name = path.partition("/")
    last = name.rpartition("/")[2].rpartition(".")[2]
    if part == "model":
        if "amax" in last:
            return "amax history"
        if "scale" in last:
            return "scale"
        if "code" in last:
            return "weight codes"
        return "extra state" if "_extra_state" in name else "parameter or buffer"
    if part == "optimizer" and name.startswith("state/"):
        if last.endswith(("_scale", "_power")):
            return "moment's scale"
        kinds = {"step": "step counter", "remainder": "remainder of the master weight"}
        return kinds.get(last, "moment" if last.startswith("exp_avg") else "optimizer state")
    kinds = {
        "modes": "modes of modules",
        "optimizer": "optimizer's groups",
        "scaler": "loss scaler",
        "scheduler": "schedule",
        "random": "random state",
    }
    return kinds.get(part, f"state of {part}")

"""Casts that somebody watches, and whether they are those of the model still."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from fp8lab.errors import UserError
from fp8lab.linear import OperandCast

Casts = Mapping[str, OperandCast]


class WatchedCasts:
    """The casts of a model that are watched.

    `convert`, `restore` and `freeze` put other casts in their place: who watches the old ones would
    see nothing from then on.

    Args:
        who: Who watches, for the message: "telemetry".
        model: What has the casts.
        choose: Which ones, by name, of those that there are now.

    Attributes:
        by_name: Those that were there when this was made.
    """

    def __init__(self, who: str, model: nn.Module, choose: Callable[[], Casts]) -> None:
        self._who, self._model, self._choose = who, model, choose
        self.by_name = choose()
        self._all = self._present()

    def check(self) -> None:
        """Refuse to watch casts that the model no longer has, or to overlook new ones.

        Raises:
            UserError: What would be chosen now is not what was chosen.
        """
        present = self._present()
        # Names take most of the time, and as a rule nothing has changed.
        if len(present) == len(self._all) and all(map(lambda a, b: a is b, present, self._all)):
            return
        chosen = self._choose()
        for one, other in ((self.by_name, chosen), (chosen, self.by_name)):
            known = {id(cast) for cast in other.values()}
            for name, cast in one.items():
                if id(cast) not in known:
                    raise UserError(
                        f"{self._who}: the model was converted, restored or frozen since this was"
                        f" made, so that {name} is not what it was; make it after that, anew"
                    )
        self._all = present

    def _present(self) -> list[OperandCast]:
        return [own for own in self._model.modules() if isinstance(own, OperandCast)]

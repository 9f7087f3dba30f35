"""The parser of every command, `fp8lab` and the experiments alike."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """argparse's parser, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where the options are explained; end with exit code 2."""
        self.exit(2, f"{self.prog}: {' '.join(message.splitlines())} (see {self.prog} --help)\n")

"""What a search over launch settings of products compares, and what its rows say. Needs no card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from fp8lab.errors import UserError
from fp8lab.experiments.row_checks import (
    checker,
    is_count,
    is_list,
    is_positive,
    is_table,
    is_text,
    is_truth,
    one_of,
)
from fp8lab.kernels.matmul_choice import fast_settings
from fp8lab.kernels.matmul_settings import GluonSettings
from fp8lab.records import Row

EXPERIMENT = "search_matmul"
REFERENCES = {"cublaslt": "cuBLASLt", "default": "the default settings"}


@dataclass(frozen=True)
class Mode:
    """One contract of products.

    Attributes:
        name: What it is called.
        promote: k between promotions, None for one chain.
        scales: Of both operands: "one" each, "squares" (1x128 by 128x128), "columns" (1x128 by
            1x128), or "mx" (E8M0, 1x32 by 32x1).
    """

    name: str
    promote: int | None
    scales: Literal["one", "squares", "columns", "mx"]

    def choice(self, m: int, n: int, k: int, multiprocessors: int) -> GluonSettings:
        """What a product takes on sm_90 unless told otherwise."""
        return fast_settings(
            m,
            n,
            k,
            promote=self.promote,
            blocks=self.scales != "one",
            by_row=self.scales != "one",
            by_column=self.scales in ("columns", "mx"),
            multiprocessors=multiprocessors,
        )


MODES = {
    mode.name: mode
    for mode in (
        Mode("native", None, "one"),
        Mode("promoted 128", 128, "one"),
        Mode("1x128 by 128x128", 128, "squares"),
        Mode("1x128 by 1x128", 128, "columns"),
        Mode("mx", 32, "mx"),
    )
}


@dataclass(frozen=True)
class Search:
    """What is searched; rows of one file have it in common.

    Attributes:
        modes: Names of `MODES`.
        shapes: M, N and K by name.
        groups: Each tile is tried with each of them.
        tiles: Names of tiles; all that there are where there is none.
        rounds: How often each candidate is visited.
        visit_ms: About how long a visit is, in milliseconds.
        seed: Of the candidates' order.

    Raises:
        UserError: A name or a number that is not accepted.
    """

    modes: tuple[str, ...]
    shapes: dict[str, tuple[int, int, int]]
    groups: tuple[int, ...] = (8,)
    tiles: tuple[str, ...] = ()
    rounds: int = 5
    visit_ms: float = 25.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.modes:
            if name not in MODES:
                raise UserError(f"--modes names {name!r}; accepted: {', '.join(MODES)}")
        for group in self.groups:
            try:
                GluonSettings(group=group)
            except ValueError as error:
                raise UserError(f"--groups: {error}") from None

    def head(self, multiprocessors: int, environment: Row) -> Row:
        """The first row of its file."""
        return {
            EXPERIMENT: asdict(self) | {"multiprocessors": multiprocessors},
            "environment": environment,
        }

    def candidates(
        self, available: Iterable[GluonSettings], choice: GluonSettings
    ) -> list[GluonSettings]:
        """Every tile with every group, and the choice, each once.

        Args:
            available: The tiles that a mode has.
            choice: What is chosen today for a shape.
        """
        chosen = [tile for tile in available if not self.tiles or tile_name(tile) in self.tiles]
        crossed = [replace(tile, group=group) for tile in chosen for group in self.groups]
        return list(dict.fromkeys([*crossed, choice]))


def named_shapes(
    shapes: dict[str, tuple[int, int, int]], texts: Sequence[str]
) -> dict[str, tuple[int, int, int]]:
    """Those whose name holds one of the texts.

    Raises:
        UserError: A text is in no name.
    """
    for text in texts:
        if not any(text in name for name in shapes):
            raise UserError(f"--shapes is {text!r}; accepted: a part of {'; '.join(shapes)}")
    return {name: sizes for name, sizes in shapes.items() if any(text in name for text in texts)}


def check_tiles(tiles: Sequence[str], available: Iterable[GluonSettings]) -> None:
    """Refuse names that no tile has.

    Raises:
        UserError: With those that there are.
    """
    names = list(dict.fromkeys(map(tile_name, available)))
    for tile in tiles:
        if tile not in names:
            raise UserError(f"--tiles names {tile!r}; accepted: {', '.join(names)}")


def tile_name(settings: GluonSettings) -> str:
    """Settings without their group, in a word or more.

    >>> tile_name(GluonSettings(16, 64, 256, most_stages=5, swap=True))
    '16x64x256 most_stages 5 swap'
    """
    words = [f"{settings.block_m}x{settings.block_n}x{settings.block_k}"]
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name.startswith("block_") or field.name == "group" or value == field.default:
            continue
        words.append(field.name if value is True else f"{field.name} {value}")
    return " ".join(words)


def identity(settings: GluonSettings) -> Row:
    """How a row names its candidate."""
    return {"tile": tile_name(settings), "group": settings.group}


def candidate_name(row: Row) -> str:
    """How people read it."""
    return f"{row['tile']}, group {row['group']}"


def place_of(row: Row) -> tuple[Any, ...]:
    """What only one row of a file is about."""
    return row["mode"], row["shape"], row["tile"], row["group"]


def settings_named(tile: str) -> GluonSettings:
    """The settings that `tile_name` calls so.

    Raises:
        ValueError: It calls none so.
    """
    sizes, *words = tile.split(" ")
    block_m, block_n, block_k = map(int, sizes.split("x"))
    given: dict[str, Any] = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    while words:
        name = words.pop(0)
        given[name] = True if name == "swap" else int(words.pop(0)) if words else None
    known = {field.name for field in fields(GluonSettings)} - {"group"}
    if not set(given) <= known or None in given.values():
        raise ValueError(f"{tile!r} is no tile's name")
    settings = GluonSettings(**given)
    if tile_name(settings) != tile:
        raise ValueError(f"{tile!r} is no tile's name")
    return settings


def _is_tile(value: Any) -> bool:
    try:
        return is_text(value) and settings_named(value) is not None
    except ValueError:
        return False


def _is_group(value: Any) -> bool:
    try:
        return is_count(value) and GluonSettings(group=value) is not None
    except ValueError:
        return False


def _is_shape(value: Any) -> bool:
    sizes = is_list(value) and len(value) == 3 and all(map(is_count, value))
    return sizes and all(0 < size < 1 << 31 for size in value)


def _is_environment(value: Any) -> bool:
    return is_table(value) and is_table(value.get("packages", {}))


def _is_search(value: Any) -> bool:
    return (
        is_table(value)
        and is_list(value.get("modes"))
        and all(one_of(*MODES)(name) for name in value["modes"])
        and is_table(value.get("shapes"))
        and all(map(_is_shape, value["shapes"].values()))
        and is_list(value.get("groups"))
        and all(map(_is_group, value["groups"]))
        and is_list(value.get("tiles"))
        and all(map(_is_tile, value["tiles"]))
        and is_count(value.get("rounds"))
        and is_count(value.get("multiprocessors"))
        and 0 < value["multiprocessors"] < 1 << 31
    )


_check_kinds = checker(
    EXPERIMENT,
    {EXPERIMENT: _is_search, "environment": _is_environment},
    {
        "mode": is_text,
        "shape": is_text,
        "tile": _is_tile,
        "group": _is_group,
        "default": is_truth,
        "reference": one_of(*REFERENCES),
    },
)


def check_rows(rows: list[Any], source: Path) -> list[Row]:
    """The rows of a search, the head first.

    Raises:
        UserError: They are something else, one is damaged or stands there twice, or the head does
            not speak of it.
    """
    _check_kinds(rows, source)
    search, seen = rows[0][EXPERIMENT], set()
    for line, row in enumerate(rows[1:], start=2):
        said = candidate_name(row)
        if row["mode"] not in search["modes"] or row["shape"] not in search["shapes"]:
            raise UserError(
                f"{source}, line {line}, is not the head's: {row['mode']}, {row['shape']}"
            )
        tiles = search["tiles"] or [row["tile"]]
        asked = row["tile"] in tiles and row["group"] in search["groups"]
        if [row.get(size) for size in "mnk"] != search["shapes"][row["shape"]]:
            raise UserError(f"{source}, line {line}, is not the head's: other sizes")
        if not asked and not row["default"]:
            raise UserError(f"{source}, line {line}, is not the head's: {said}")
        if place_of(row) in seen:
            raise UserError(f"{source}, line {line}, is damaged: {said} stands there twice")
        seen.add(place_of(row))
        damaged = f"{source}, line {line}, is damaged"
        if "left_out" in row:
            if "ratio" in row or not is_text(row["left_out"]):
                raise UserError(f"{damaged}: left_out is no text, or stands beside a ratio")
        elif not all(is_positive(row.get(key)) for key in ("ratio", "lowest", "highest")):
            raise UserError(f"{damaged}: it lacks a ratio")
    return rows

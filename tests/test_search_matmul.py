"""The search over launch settings of products: who is timed when, what rows say, who is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8lab.errors import UserError
from fp8lab.experiments import card_timing, search_matmul
from fp8lab.experiments.bench_matmul import shapes
from fp8lab.experiments.card_timing import (
    WARM_BURSTS,
    against_reference,
    ratios_to_reference,
    schedule,
)
from fp8lab.experiments.commands import exit_code
from fp8lab.experiments.search_matmul import ROWS, estimate, missing_of, run
from fp8lab.experiments.search_matmul_card import Card, Contest
from fp8lab.experiments.search_matmul_report import report
from fp8lab.experiments.search_matmul_rows import (
    EXPERIMENT,
    MODES,
    Mode,
    Search,
    candidate_name,
    check_rows,
    identity,
    named_shapes,
    settings_named,
    tile_name,
)
from fp8lab.kernels import matmul_settings
from fp8lab.kernels.matmul import checked_product
from fp8lab.kernels.matmul_launch import _chosen
from fp8lab.kernels.matmul_product import Product
from fp8lab.kernels.matmul_settings import (
    BROAD_FAST,
    FAST_NATIVE_CANDIDATES,
    FAST_PROMOTED_CANDIDATES,
    LEAN_FAST,
    NARROW_FAST,
    PAIRED_BROAD_FAST,
    SMALL_FAST,
    SQUARE_FAST,
    WIDE_FAST,
    GluonSettings,
)
from fp8lab.records import Row, read_rows, to_json

NAMES = list("abcdefgh")
MULTIPROCESSORS = 132
FIGURES = Path(__file__).parent.parent / "figures" / "h200"
SHAPES = {"cube": (8192, 8192, 8192), "low": (512, 4096, 4096)}


def test_each_visit_is_between_two_bursts_of_the_reference() -> None:
    order = schedule(NAMES, 5, 0)
    assert len(order) == 2 * 5 * len(NAMES) + 1
    assert set(order[::2]) == {None}
    visits = order[1::2]
    rounds = [visits[start : start + 8] for start in range(0, 40, 8)]
    assert all(sorted(map(str, one)) == NAMES for one in rounds)
    assert all(one != other for one, other in pairwise(rounds))


def test_the_order_is_the_seeds() -> None:
    assert schedule(NAMES, 3, "0 mx cube") == schedule(NAMES, 3, "0 mx cube")
    assert schedule(NAMES, 3, "0 mx cube") != schedule(NAMES, 3, "1 mx cube")
    assert schedule([], 3, 0) == [None]


def test_a_clock_that_drifts_does_not_change_a_ratio() -> None:
    order = [None, "a", None, "b", None, "b", None, "a", None]
    speeds = {None: 1.0, "a": 0.5, "b": 2.0}
    times = [speeds[name] * (10 + place) for place, name in enumerate(order)]
    assert ratios_to_reference(order, times) == {"a": [2.0, 2.0], "b": [0.5, 0.5]}
    times[-1] *= 2  # 36 in place of 18, beside 16 and 8.5
    assert ratios_to_reference(order, times)["a"] == [2.0, (16 + 36) / 2 / 8.5]


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Graphs are lists of launches, which return their milliseconds; what replays took."""
    taken: list[float] = []

    def captured(launch: Any, number: int) -> list[float]:
        return [float(launch(index)) for index in range(number)]

    def timed(graph: list[float], *, cover: bool = False) -> float:
        assert not cover
        taken.append(sum(graph))
        return taken[-1]

    monkeypatch.setattr(card_timing, "captured", captured)
    monkeypatch.setattr(card_timing, "timed", timed)
    return taken


def test_visits_are_as_long_as_bursts(visits: list[float]) -> None:
    seen: list[int] = []

    def candidate(index: int) -> float:
        seen.append(index)
        return 0.5

    found = against_reference(
        lambda _: 1.0, {"a": candidate}, sets=4, rounds=3, visit_ms=25.0, seed=0
    )
    assert found.ratios == {"a": [2.0] * 3}
    assert found.times == {"a": [0.5] * 3}
    assert found.reference == [1.0] * 4
    assert seen == list(range(25))
    assert visits == [1.0, *[25.0] * WARM_BURSTS, 25.0, *[12.5, 25.0] * 3]


@pytest.mark.parametrize(
    ("single", "sets", "launches", "replays"),
    [
        (40.0, 1, 1, 1),  # longer than a visit
        (10.0, 12, 12, 1),  # every set once
        (0.01, 12, card_timing.MOST_LAUNCHES, 12),  # 2,500 launches, in graphs of 200
    ],
)
def test_how_many_launches_a_visit_has(
    visits: list[float], single: float, sets: int, launches: int, replays: int
) -> None:
    against_reference(lambda _: single, {}, sets=sets, rounds=1, visit_ms=25.0, seed=0)
    assert len(visits) == 1 + (WARM_BURSTS + 1) * replays
    assert visits[1:] == pytest.approx([single * launches] * (len(visits) - 1))


def test_tiles_have_names_of_their_own() -> None:
    tiles = {one for one in vars(matmul_settings).values() if isinstance(one, GluonSettings)} | {
        *FAST_NATIVE_CANDIDATES,
        *FAST_PROMOTED_CANDIDATES,
    }
    assert len(set(map(tile_name, tiles))) == len(tiles) > 8
    assert tile_name(replace(WIDE_FAST, group=16)) == tile_name(WIDE_FAST) == "128x256x128"
    assert tile_name(GluonSettings(16, 64, drain=4, swap=True)) == "16x64x128 swap drain 4"
    for one in tiles:
        assert settings_named(tile_name(one)) == replace(one, group=8)
    for wrong in ("", "zz", "128x256", "1x256x128", "128x256x128 group 8", "128x256x128 drain"):
        with pytest.raises(ValueError, match=r"tile's name|invalid literal|not enough|accepted"):
            settings_named(wrong)


def _product_of(mode: Mode, m: int, n: int, k: int, **added: torch.Tensor) -> Product:
    one = torch.ones(())
    rows, columns = torch.ones(m, k // 128), torch.ones(k // 128, n)
    scales = {
        "one": (one, one),
        "squares": (rows, torch.ones(k // 128, n // 128)),
        "columns": (rows, columns),
        "mx": (torch.ones(m, k // 32), torch.ones(k // 32, n)),
    }[mode.scales]
    a, b = (torch.empty(rows, k, dtype=torch.float8_e4m3fn) for rows in (m, n))
    return checked_product(
        a,
        b.t(),
        inverse_scale_a=scales[0],
        inverse_scale_b=scales[1],
        promote_every=mode.promote,
        out_dtype=torch.bfloat16,
        accumulator=added.get("accumulator"),
        bias=added.get("bias"),
    )


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("m", [16, 32, 64, 128, 1024, 8192])
@pytest.mark.parametrize("multiprocessors", [8, MULTIPROCESSORS])
def test_todays_choice_is_the_launchers(
    mode: Mode, m: int, multiprocessors: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("fp8lab.kernels.matmul_launch.multiprocessors", lambda _: multiprocessors)
    for n, k in ((256, 256), (1024, 256), (1024, 8192), (8192, 8192)):
        chosen = _chosen(_product_of(mode, m, n, k), fast=True)
        assert mode.choice(m, n, k, multiprocessors) == chosen


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_launcher_chooses_what_the_product_can_take(mode: Mode, monkeypatch: Any) -> None:
    """Also where matrices are added, which leave no registers for the largest tiles."""
    monkeypatch.setattr("fp8lab.kernels.matmul_launch.multiprocessors", lambda _: MULTIPROCESSORS)
    m = n = k = 8192
    matrix = torch.empty(m, n)
    blocks = mode.scales != "one"
    for matrices, added in (
        (0, {"bias": matrix[0]}),
        (1, {"bias": matrix}),
        (1, {"accumulator": matrix}),
        (1, {"accumulator": matrix, "bias": matrix[0]}),
        (2, {"accumulator": matrix, "bias": matrix}),
    ):
        chosen = _chosen(_product_of(mode, m, n, k, **added), fast=True)
        assert isinstance(chosen, GluonSettings)
        assert chosen.takes(promote=mode.promote, blocks=blocks, matrices=matrices)
        large = matrices == 0 and mode.promote == 128
        assert (chosen.tile[0] > 128) == large, added


def test_the_choice_depends_on_k(visits: list[float], tmp_path: Path) -> None:
    """In what is searched, in what is called the default, and in the report."""
    shapes = {"short": (4096, 57344, 4096), "long": (4096, 57344, 8192)}
    search = Search(("promoted 128",), shapes, (32,))
    for tiles in ((), (PAIRED_BROAD_FAST, BROAD_FAST)):
        found = missing_of(search, {"promoted 128": list(tiles)}, MULTIPROCESSORS, [])
        for shape, choice in (("short", PAIRED_BROAD_FAST), ("long", BROAD_FAST)):
            assert found[shape, "promoted 128"] == list(tiles or [choice])
    run(search, tmp_path, None, MadeUpCard(PAIRED_BROAD_FAST, BROAD_FAST))
    rows = read_rows(tmp_path / ROWS)
    defaults = {row["shape"]: row["tile"] for row in rows[1:] if row["default"]}
    assert defaults == {"short": "128x256x128 swap", "long": "128x192x128 swap"}
    said = report(rows)
    assert (
        "  1  4.000  128x256x128 swap, group 32\n    2  1.333  128x192x128 swap, group 32" in said
    )
    assert "  short  4.000  1.333      1\n  long   4.000  1.333      2\n" in said


def test_candidates_are_tiles_with_groups_and_the_choice() -> None:
    search = Search(("native",), SHAPES, (8, 16), ("128x128x128",))
    tiles = [SQUARE_FAST, WIDE_FAST]
    square = [SQUARE_FAST, replace(SQUARE_FAST, group=16)]
    assert search.candidates(tiles, WIDE_FAST) == [*square, WIDE_FAST]
    assert search.candidates(tiles, SQUARE_FAST) == square
    assert len(replace(search, tiles=()).candidates(tiles, WIDE_FAST)) == 4


def test_shapes_are_named_by_a_part() -> None:
    found = named_shapes(shapes(), ["cube", "8B out 4096"])
    assert list(found) == ["cube 4096", "cube 8192", "8B out 4096"]
    assert named_shapes(shapes(), [""]) == shapes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--modes", "natvie"], "--modes names 'natvie'; accepted: native, promoted 128, 1x"),
        (["--modes", "mx,mx"], "--modes names mx, mx; accepted"),
        (["--modes", ""], "--modes names none"),
        (["--shapes", "9B"], "--shapes is '9B'; accepted: a part of cube 4096; "),
        (["--shapes", "8B", "--shapes", "9B"], "--shapes is '9B'"),
        (["--groups", "8,12"], "--groups: group is 12; accepted: powers of two"),
        (["--groups", "8,x"], "--groups names 8, x; accepted: whole numbers"),
        (["--rounds", "0"], "--rounds is 0; accepted: 1 and up"),
        (["--seconds", "0"], "--seconds is 0.0; accepted: more than 0"),
        (["--seconds", "nan"], "--seconds is nan; accepted: more than 0"),
        (["--tiles", ","], "--tiles names none"),
        (["--report", "nowhere.jsonl"], "cannot read rows from nowhere.jsonl"),
    ],
)
def test_mistakes_end_with_2(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert exit_code(search_matmul.main, words) == 2
    found = capsys.readouterr().err
    assert found.startswith(said)
    assert found.count("\n") == 1


def test_without_a_card_the_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(search_matmul.main, ["--out", str(tmp_path)]) == 2
    assert "search_matmul needs a CUDA device; --report FILE" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class MadeUpContest(Contest):
    """Milliseconds by tile in place of products; one tile fails, one differs."""

    def __init__(self, mode: Mode, sizes: tuple[int, int, int]) -> None:
        self._mode, self.sets = mode, 2
        self.reference_name = "default" if mode.scales == "mx" else "cublaslt"
        self.prepared: list[GluonSettings] = []

    @property
    def reference(self) -> Any:
        return lambda _: 1.0

    def launch(self, settings: GluonSettings | None) -> Any:
        times = {SQUARE_FAST: 1.0, WIDE_FAST: 0.5, PAIRED_BROAD_FAST: 0.25, BROAD_FAST: 0.75}
        assert settings in self.prepared
        if settings in times:
            return lambda _: times[settings]
        return lambda _: times[replace(settings, group=8)] * (2 if settings.group == 32 else 1)

    def prepare(self, candidates: list[GluonSettings]) -> None:
        self.prepared = candidates

    def problem(self, settings: GluonSettings) -> str | None:
        return "3 elements differ from the default's" if settings.block_m == 64 else None

    def check_device(self) -> None:
        pass


class MadeUpCard(Card):
    """A card that is none; it knows what it was asked for."""

    def __init__(self, *tiles: GluonSettings) -> None:
        super().__init__({})
        self.tiles = list(tiles) or [SQUARE_FAST, WIDE_FAST, SMALL_FAST]
        self.asked: list[tuple[str, tuple[int, int, int]]] = []

    def environment(self) -> Row:
        packages = {"torch": "2", "triton": "3"}
        return {"device": "a card", "packages": packages, "when": "2026-11-30T00:00:00"}

    def multiprocessors(self) -> int:
        return MULTIPROCESSORS

    def available(self, mode: Mode) -> list[GluonSettings]:
        return self.tiles

    def contest(self, mode: Mode, sizes: tuple[int, int, int]) -> Contest:
        self.asked.append((mode.name, sizes))
        return MadeUpContest(mode, sizes)


class CpuContest(Contest):
    """Launches that fill a result on the CPU, by the tile's columns."""

    def __init__(self, milliseconds: float) -> None:
        self._operands = SimpleNamespace(out=torch.zeros(2, 3, dtype=torch.bfloat16))  # type: ignore[assignment]
        self._expected = torch.zeros(2, 3, dtype=torch.bfloat16)
        self._alone = milliseconds

    def launch(self, settings: GluonSettings | None) -> Any:
        assert settings is not None
        out = self._operands.out

        def launch(_: int) -> torch.Tensor:
            if settings.block_n == 256:
                raise ValueError("out of\nshared memory")
            if settings.block_n == 64:
                return out  # it writes nothing
            return out.fill_(-0.0 if settings.block_n == 32 else 0.0)

        return launch


def test_a_candidate_is_looked_at_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8lab.experiments.search_matmul_card.captured", lambda *_: None)
    monkeypatch.setattr("fp8lab.experiments.search_matmul_card.timed", lambda _: 3.0)
    contest = CpuContest(1.0)
    assert contest.problem(SQUARE_FAST) is None
    assert contest.problem(WIDE_FAST) == "ValueError: out of shared memory"
    assert contest.problem(NARROW_FAST) == "6 elements differ from the default's"
    assert contest.problem(LEAN_FAST) == "6 elements differ from the default's"
    contest = CpuContest(0.75)
    assert contest.problem(SQUARE_FAST) == "takes 4.0 times as long as the default"


CUBE = Search(("native", "mx"), {"cube": SHAPES["cube"]}, (8, 32), rounds=3)


def test_a_search_from_end_to_end(
    visits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(CUBE, tmp_path, None, MadeUpCard())
    said = capsys.readouterr().out
    head, *rows = read_rows(tmp_path / ROWS)
    assert head["search_matmul"]["multiprocessors"] == MULTIPROCESSORS
    assert check_rows([head, *rows], tmp_path) == [head, *rows]
    assert Counter(row["mode"] for row in rows) == {"native": 6, "mx": 6}
    # Both sides of a mode's ratios are of one reference.
    assert {(row["mode"], row["reference"]) for row in rows} == {
        ("native", "cublaslt"),
        ("mx", "default"),
    }
    native = {(row["tile"], row["group"]): row for row in rows if row["mode"] == "native"}
    wide = native["128x256x128", 8]
    assert wide["ratio"] == wide["lowest"] == wide["highest"] == 2.0
    assert wide["tflops"] == 2e-9 * 8192**3 / 0.5 == 2 * wide["reference_tflops"]
    assert (wide["m"], wide["n"], wide["k"], wide["sets"]) == (*SHAPES["cube"], 2)
    assert native["128x256x128", 32]["ratio"] == 1.0
    left_out = {key for key, row in native.items() if "left_out" in row}
    assert left_out == {("64x128x128", 8), ("64x128x128", 32)}
    assert [key for key, row in native.items() if row["default"]] == [("128x256x128", 8)]
    bursts = 2 * (WARM_BURSTS + 1 + 2 * 3 * 6)
    assert said.startswith(f"2 products, 12 candidates: about {bursts * 0.025:.0f} s of launches")
    assert "left out: 3 elements differ from the default's" in said
    assert said.endswith(f"{report([head, *rows])}\n{tmp_path / ROWS}\n")


def test_a_second_sitting_does_what_is_missing(
    visits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = replace(CUBE, modes=("native",), shapes=SHAPES, groups=(8,))
    path, tiles = tmp_path / ROWS, [SQUARE_FAST, WIDE_FAST]
    seconds = count()
    run(search, tmp_path, 2, MadeUpCard(*tiles), lambda: float(next(seconds)))
    assert "missing: low, native; the same command goes on" in capsys.readouterr().out
    first = path.read_text()
    assert {row["shape"] for row in read_rows(path)[1:]} == {"cube"}
    card = MadeUpCard(*tiles)
    run(search, tmp_path, None, card)
    assert card.asked == [("native", SHAPES["low"])]
    assert "missing" not in capsys.readouterr().out
    assert path.read_text().startswith(first)
    whole = path.read_text()
    run(search, tmp_path, None, card)
    assert card.asked == [("native", SHAPES["low"])]
    assert path.read_text() == whole
    # Candidates may have grown: only the new ones are timed.
    run(search, tmp_path, None, MadeUpCard(*tiles, SMALL_FAST))
    assert [row["tile"] for row in read_rows(path)[5:]] == ["64x128x128"] * 2


def test_what_is_done_of_a_product_is_not_done_again(visits: list[float], tmp_path: Path) -> None:
    search = replace(CUBE, modes=("native",), groups=(8,))
    run(search, tmp_path, None, MadeUpCard())
    path = tmp_path / ROWS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote the last
    run(search, tmp_path, None, MadeUpCard())
    assert path.read_text() == "".join(lines)


def test_rows_of_another_search_are_refused(visits: list[float], tmp_path: Path) -> None:
    run(CUBE, tmp_path, None, MadeUpCard())
    before = (tmp_path / ROWS).read_bytes()
    for other in (
        replace(CUBE, rounds=4),
        replace(CUBE, shapes=SHAPES),
        replace(CUBE, groups=(8,)),
        replace(CUBE, tiles=("128x128x128",)),
        replace(CUBE, modes=("mx",)),
    ):
        with pytest.raises(UserError, match="holds rows of another search_matmul"):
            run(other, tmp_path, None, MadeUpCard())
    assert (tmp_path / ROWS).read_bytes() == before


def test_tiles_that_there_are_not_are_refused(tmp_path: Path) -> None:
    search = replace(CUBE, tiles=("128x128x128", "128x128"))
    with pytest.raises(UserError, match="--tiles names '128x128'; accepted: 128x128x128, 128x2"):
        run(search, tmp_path, None, MadeUpCard())
    assert not list(tmp_path.iterdir())


def made_up_rows() -> list[Row]:
    """Two shapes of native products: what is chosen today is 128 x 256 and 128 x 128."""
    search = Search(("native", "mx"), SHAPES)
    head = search.head(MULTIPROCESSORS, MadeUpCard().environment())
    rows: list[Row] = [json.loads(to_json(head))]
    choices = [MODES["native"].choice(*sizes, MULTIPROCESSORS) for sizes in SHAPES.values()]
    assert choices == [WIDE_FAST, SQUARE_FAST]
    ratios = {"cube": (1.0, 0.9), "low": (0.5, 0.4)}
    for shape, (m, n, k) in SHAPES.items():
        for tile, ratio in zip((WIDE_FAST, SQUARE_FAST), ratios[shape], strict=True):
            row: Row = {"mode": "native", "shape": shape, "m": m, "n": n, "k": k}
            row |= {**identity(tile), "default": False, "reference": "cublaslt"}
            rows.append(row | dict.fromkeys(("ratio", "lowest", "highest"), ratio))
    rows.append({**rows[1], **identity(SMALL_FAST), "left_out": "it differs"})
    del rows[-1]["ratio"]
    return rows


def test_the_report_says_what_todays_choice_costs() -> None:
    lines = report(made_up_rows()).splitlines()
    assert lines[0] == "a card, 2026-11-30, torch 2, Triton 3; medians of 5 rounds"
    assert lines[2:] == [
        "native: the time of cuBLASLt over a candidate's",
        "  geometric means",
        "    1  0.707  128x256x128, group 8",  # of 1.0 and 0.5
        "    2  0.600  128x128x128, group 8",  # of 0.9 and 0.4
        "  best of each shape 0.707, today's choice 0.632, 2 shapes",  # 1.0 and 0.4
        "            1      2  today",
        "  cube  1.000  0.900      1",
        "  low   0.500  0.400      2",
        "  today's choice loses more than 1 %:",
        "  low: 128x128x128, group 8 0.400, 128x256x128, group 8 0.500 (25.0 %)",
        "  left out: 64x128x128, group 8 at cube: it differs",
        "",
        "mx: no ratios",
        "  without rows: cube; low",
    ]


def test_the_report_bears_one_percent() -> None:
    rows = made_up_rows()
    rows[4]["ratio"] = 0.5 / 1.009
    assert "  today's choice loses more than 1 %: nowhere" in report(rows)
    rows[4]["ratio"] = 0.5 / 1.011
    assert "(1.1 %)" in report(rows)


def test_the_report_says_over_how_many_shapes_a_mean_is() -> None:
    rows = made_up_rows()
    del rows[4], rows[1]["ratio"]  # 128 x 256 and 128 x 128, where they are today's choice
    rows[1]["left_out"] = "it fails"
    text = report(rows)
    assert "    1  0.900  128x128x128, group 8, over 1 of 2 shapes" in text
    assert "best of each shape" not in text
    assert "  cube: today's choice, 128x256x128, group 8, has no ratio" in text
    assert "  left out: 128x256x128, group 8 at cube: it fails" in text


def test_a_file_is_reported_without_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "x.jsonl"
    path.write_text("".join(to_json(row) + "\n" for row in made_up_rows()))
    assert exit_code(search_matmul.main, ["--report", str(path)]) == 0
    assert capsys.readouterr().out == report(made_up_rows()) + "\n"


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        (0, {"search_matmul": {"modes": ["native"]}}, "line 1, is damaged: search_matmul"),
        (1, {"mode": "mx128"}, "line 2, is not the head's: mx128, cube"),
        (2, {"shape": "cubes"}, "line 3, is not the head's: native, cubes"),
        (2, {"m": 1}, "line 3, is not the head's: other sizes"),
        (3, {"group": 16}, "line 4, is not the head's: 128x256x128, group 16"),
        (4, {"tile": "128x256x128"}, "line 5, is damaged: 128x256x128, group 8 stands there twice"),
        (4, {"ratio": None}, "line 5, is damaged: it lacks a ratio"),
        (4, {"lowest": 0}, "line 5, is damaged: it lacks a ratio"),
        (4, {"highest": "nan"}, "line 5, is damaged: it lacks a ratio"),
        (4, {"default": 1}, "line 5, is damaged: default is '1'"),
        (4, {"reference": "cutlass"}, "line 5, is damaged: reference is 'cutlass'"),
        (0, {"environment": {"packages": None}}, "line 1, is damaged: environment"),
        (0, {"environment": {"packages": [1]}}, "line 1, is damaged: environment"),
        (4, {"left_out": None}, "line 5, is damaged: left_out is no text, or stands beside"),
        (4, {"left_out": "slow", "ratio": None}, "line 5, is damaged: left_out is no text, or"),
        (5, {"left_out": []}, "line 6, is damaged: left_out is no text, or stands beside"),
        (4, {"ratio": 10**400}, "line 5, is damaged: it lacks a ratio"),
        (4, {"lowest": 10**400}, "line 5, is damaged: it lacks a ratio"),
        (4, {"tile": "zz"}, "line 5, is damaged: tile is 'zz'"),
        (4, {"tile": "128x256x128 swap 3"}, "line 5, is damaged: tile is '128x256x128 swap 3'"),
        (4, {"group": 10**30}, "line 5, is damaged: group is '10000"),
        (4, {"group": 3}, "line 5, is damaged: group is '3'"),
    ],
)
def test_rows_that_are_not_the_heads_are_refused(
    tmp_path: Path, place: int, changes: Row, said: str
) -> None:
    rows = made_up_rows()
    assert check_rows(rows, tmp_path) == rows
    rows[place] |= changes
    with pytest.raises(UserError, match=f"{tmp_path}, {said}"):
        check_rows(rows, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shapes", {"cube": [10**400, 8192, 8192], "low": [512, 4096, 4096]}),
        ("tiles", ["zz"]),
        ("groups", [10**30]),
        ("multiprocessors", 10**400),
    ],
)
def test_a_head_that_no_search_writes_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    rows = made_up_rows()
    rows[0]["search_matmul"][key] = value
    with pytest.raises(UserError, match="line 1, is damaged: search_matmul"):
        check_rows(rows, tmp_path)


def test_the_default_may_be_no_tile_that_was_asked_for(tmp_path: Path) -> None:
    rows = made_up_rows()
    rows[0]["search_matmul"]["tiles"] = ["64x128x128", "128x256x128"]
    with pytest.raises(UserError, match="line 3, is not the head's: 128x128x128, group 8"):
        check_rows(rows, tmp_path)
    rows[2]["default"] = rows[4]["default"] = True
    assert check_rows(rows, tmp_path) == rows


def test_the_estimate_counts_visits_and_bursts() -> None:
    """12 shapes, 8 candidates and 5 rounds: 80 visits and bursts a shape, one more, and to warm."""
    pieces = [[SQUARE_FAST] * 8] * 12
    search = Search(("native",), SHAPES)
    assert estimate(search, pieces) == pytest.approx(12 * (81 + WARM_BURSTS) * 0.025)


@pytest.mark.parametrize("name", ["search-matmul", "search-matmul-native", "search-matmul-blocks"])
def test_todays_choice_is_what_the_rows_say(name: str) -> None:
    """As good as any one candidate over the shapes, and hardly worse than the best of each."""
    path = FIGURES / f"{name}.jsonl"
    head, *rows = check_rows(read_rows(path), path)
    search = head[EXPERIMENT]
    for mode in search["modes"]:
        ratios: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["mode"] == mode and "ratio" in row:
                ratios.setdefault(row["shape"], {})[candidate_name(row)] = row["ratio"]
        chosen = []
        for shape, (m, n, k) in search["shapes"].items():
            settings = MODES[mode].choice(m, n, k, search["multiprocessors"])
            chosen.append(ratios[shape][candidate_name(identity(settings))])
        for candidate in set.intersection(*(set(found) for found in ratios.values())):
            alone = [found[candidate] for found in ratios.values()]
            assert geometric_mean(chosen) >= geometric_mean(alone), candidate
        best = [max(found.values()) for found in ratios.values()]
        assert geometric_mean(chosen) >= 0.996 * geometric_mean(best), mode


@pytest.mark.gpu
def test_a_tiny_search_on_a_card(tmp_path: Path) -> None:
    sizes = {"tiny": (256, 256, 512), "thin": (16, 256, 512)}
    tiles = ("128x128x128", "64x64x128")
    search = Search(tuple(MODES), sizes, (8, 16), tiles, rounds=2, visit_ms=0.5)
    run(search, tmp_path, None, Card({}))
    rows = read_rows(tmp_path / ROWS)
    check_rows(rows, tmp_path)
    assert {(row["mode"], row["shape"]) for row in rows[1:]} == {
        (mode, shape) for mode in MODES for shape in sizes
    }
    assert {row["mode"] for row in rows[1:] if row["reference"] == "default"} == {"mx"}
    wrong = [row["left_out"] for row in rows[1:] if "left_out" in row]
    assert all(text.startswith("takes ") for text in wrong), wrong
    timed = [row for row in rows[1:] if "ratio" in row]
    assert all(row["lowest"] <= row["ratio"] <= row["highest"] for row in timed)
    assert Counter(row["default"] for row in timed)[True] == len(MODES) * len(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_candidate_whose_bits_differ_is_found(mode: Mode) -> None:
    contest = Card({}).contest(mode, (256, 256, 512))
    assert contest.problem(SQUARE_FAST) is None
    contest._expected.view(torch.int16)[3, 5] ^= 1
    assert contest.problem(SQUARE_FAST) == "1 elements differ from the default's"

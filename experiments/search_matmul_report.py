"""The tables of a search over launch settings of products, made from its rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fp8lab.experiments.search_matmul_rows import (
    EXPERIMENT,
    MODES,
    REFERENCES,
    Mode,
    candidate_name,
    identity,
)
from fp8lab.records import Row

# As many times the best candidate's time today's choice may take without a word.
BEARABLE = 1.01


def report(rows: list[Row]) -> str:
    """What a search found, mode by mode: shapes by candidates, means, what today's choice costs."""
    search, found = rows[0][EXPERIMENT], rows[0]["environment"]
    packages = found.get("packages", {})
    lines = [
        f"{found.get('device')}, {str(found.get('when'))[:10]}, torch {packages.get('torch')},"
        f" Triton {packages.get('triton')}; medians of {search['rounds']} rounds"
    ]
    for mode in search["modes"]:
        lines += ["", *_of_mode(MODES[mode], [r for r in rows[1:] if r["mode"] == mode], search)]
    return "\n".join(lines)


def _of_mode(mode: Mode, rows: list[Row], search: Row) -> Iterator[str]:
    ratios: dict[str, dict[str, float]] = {shape: {} for shape in search["shapes"]}
    for row in rows:
        if "ratio" in row:
            ratios[row["shape"]][candidate_name(row)] = row["ratio"]
    measured = {shape: found for shape, found in ratios.items() if found}
    if measured:
        references = sorted({REFERENCES[row["reference"]] for row in rows})
        yield f"{mode.name}: the time of {' or '.join(references)} over a candidate's"
        yield from _tables(mode, measured, search)
    else:
        yield f"{mode.name}: no ratios"
    for row in rows:
        if "left_out" in row:
            yield f"  left out: {candidate_name(row)} at {row['shape']}: {row['left_out']}"
    if lacking := sorted(set(search["shapes"]) - {row["shape"] for row in rows}):
        yield f"  without rows: {'; '.join(lacking)}"


def _tables(mode: Mode, ratios: dict[str, dict[str, float]], search: Row) -> Iterator[str]:
    """Candidates and their means, best first; the shapes; what today's choice loses."""
    by_name: dict[str, list[float]] = {}
    for found in ratios.values():
        for name, ratio in found.items():
            by_name.setdefault(name, []).append(ratio)
    means = {name: statistics.geometric_mean(found) for name, found in by_name.items()}
    # A mean over other shapes is another quantity: candidates that have them all come first.
    names = sorted(means, key=lambda name: (-len(by_name[name]), -means[name]))
    today = {
        shape: candidate_name(identity(mode.choice(m, n, k, search["multiprocessors"])))
        for shape, (m, n, k) in search["shapes"].items()
    }
    yield "  geometric means"
    for number, name in enumerate(names, start=1):
        count = len(by_name[name])
        of = f", over {count} of {len(ratios)} shapes" if count < len(ratios) else ""
        yield f"  {number:3}  {means[name]:.3f}  {name}{of}"
    known = [shape for shape in ratios if today[shape] in ratios[shape]]
    if known:
        best = statistics.geometric_mean(max(ratios[shape].values()) for shape in known)
        chosen = statistics.geometric_mean(ratios[shape][today[shape]] for shape in known)
        yield f"  best of each shape {best:.3f}, today's choice {chosen:.3f}, {len(known)} shapes"
    width = max(map(len, ratios))
    yield (
        f"  {'':{width}}"
        + "".join(f"{number:7}" for number in range(1, len(names) + 1))
        + "  today"
    )
    for shape, found in ratios.items():
        cells = "".join(f"{found[name]:7.3f}" if name in found else f"{'-':>7}" for name in names)
        chosen_number = names.index(today[shape]) + 1 if shape in known else "-"
        yield f"  {shape:{width}}{cells}{chosen_number:>7}"
    yield from _losses(ratios, today)


def _losses(ratios: dict[str, dict[str, float]], today: dict[str, str]) -> Iterator[str]:
    """Where another candidate is faster than today's choice by more than may pass."""
    losing = []
    for shape, found in ratios.items():
        if (mine := found.get(today[shape])) is None:
            losing.append(f"  {shape}: today's choice, {today[shape]}, has no ratio")
            continue
        name = max(found, key=found.__getitem__)
        if found[name] > BEARABLE * mine:
            losing.append(
                f"  {shape}: {today[shape]} {mine:.3f}, {name} {found[name]:.3f}"
                f" ({100 * (found[name] / mine - 1):.1f} %)"
            )
    yield f"  today's choice loses more than {100 * (BEARABLE - 1):.0f} %:" + (
        "" if losing else " nowhere"
    )
    yield from losing

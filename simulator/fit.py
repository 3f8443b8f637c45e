"""Fits a profile's constants to a file of measurements: `python -m simulator.fit FILE`.

Starts from relative least squares and then lowers the largest relative error by a pattern search
over the constants, so that no row is far off for the sake of the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from simulator.profile import DecodeCost, PrefillCost, TransferCost

Column = npt.NDArray[np.float64]
# Seconds of all rows, from the constants and the two columns that a form takes.
Predict = Callable[[Sequence[float], Column, Column], Column]

_MEAN_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants in the order of their form, in seconds, and their relative errors."""

    constants: tuple[float, ...]
    max_error: float
    mean_error: float


def _errors(predict: Predict, constants: Sequence[float], rows: Column) -> Column:
    return np.abs(predict(constants, rows[:, 0], rows[:, 1]) / rows[:, 2] - 1)


def _loss(errors: Column) -> float:
    return float(errors.max() + _MEAN_WEIGHT * errors.mean())


def search(predict: Predict, start: Sequence[float], rows: Column) -> Fit:
    """Pattern search on the logarithms of the constants. `rows`: two columns, then seconds."""
    best = list(start)
    best_loss = _loss(_errors(predict, best, rows))
    rng = np.random.default_rng(1)
    step = 0.5
    while step > 1e-4:
        improved = False
        for _ in range(60 * len(best)):
            move = rng.normal(size=len(best)) * (rng.random(len(best)) < 0.5) * step
            candidate = [
                value * float(np.exp(delta)) for value, delta in zip(best, move, strict=True)
            ]
            loss = _loss(_errors(predict, candidate, rows))
            if loss < best_loss:
                best, best_loss, improved = candidate, loss, True
        if not improved:
            step *= 0.6
    errors = _errors(predict, best, rows)
    return Fit(tuple(best), float(errors.max()), float(errors.mean()))


def least_squares(columns: Column, seconds: Column) -> list[float]:
    """Relative least squares, every constant kept positive."""
    scaled = columns / seconds[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    return [max(float(value), 1e-12) for value in found]


def _predict_prefill(constants: Sequence[float], new: Column, context: Column) -> Column:
    a, b, d, e, floor = constants
    attention: Column = d * new * (context + new / 2) + e * context
    return a + np.maximum(floor, b * new) + attention


def _predict_decode(constants: Sequence[float], batch: Column, context: Column) -> Column:
    a, b, d, floor = constants
    attention: Column = np.maximum(d * batch, floor) * context
    return a + b * batch + attention


def _table(rows: Sequence[Mapping[str, float]], *names: str) -> Column:
    """The named columns, milliseconds as seconds."""
    return np.array(
        [[row[name] / (1e3 if name == "ms" else 1) for name in names] for row in rows],
        dtype=np.float64,
    )


def fit_prefill(rows: Sequence[Mapping[str, float]]) -> Fit:
    table = _table(rows, "new", "ctx", "ms")
    new, context, seconds = table.T
    columns = np.stack([np.ones_like(new), new, new * (context + new / 2), context], axis=1)
    a, b, d, e = least_squares(columns, seconds)
    return search(_predict_prefill, (a / 2, b, d, e, a / 2), table)


def fit_decode(rows: Sequence[Mapping[str, float]]) -> Fit:
    table = _table(rows, "batch", "ctx", "ms")
    batch, context, seconds = table.T
    columns = np.stack([np.ones_like(batch), batch, batch * context], axis=1)
    a, b, d = least_squares(columns, seconds)
    return search(_predict_decode, (a, b, d, 10 * d), table)


def fit_transfer(rows: Sequence[Mapping[str, float]], kv_bytes_per_token: int) -> TransferCost:
    tokens, seconds = _table(rows, "tokens", "ms").T
    columns = np.stack([np.ones_like(tokens), tokens * kv_bytes_per_token], axis=1)
    latency, per_byte = least_squares(columns, seconds)
    return TransferCost(latency_s=latency, bytes_per_s=1 / per_byte)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(f"{value:.4g}") for key, value in values.items()}


def fit(measured: Mapping[str, Any]) -> dict[str, Any]:
    """The fitted part of a profile, and how well it fits."""
    prefill, decode = fit_prefill(measured["prefill"]), fit_decode(measured["decode"])
    transfer = fit_transfer(measured["kv_copy"], measured["kv_bytes_per_token"])
    return {
        "prefill": _rounded(asdict(PrefillCost(*prefill.constants))),
        "decode": _rounded(asdict(DecodeCost(*decode.constants))),
        "transfer": _rounded(asdict(transfer)),
        "kv_bytes_per_token": measured["kv_bytes_per_token"],
        "errors": {
            "prefill": _rounded({"max": prefill.max_error, "mean": prefill.mean_error}),
            "decode": _rounded({"max": decode.max_error, "mean": decode.mean_error}),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", type=Path)
    measured = orjson.loads(parser.parse_args().measurements.read_bytes())
    sys.stdout.write(orjson.dumps(fit(measured), option=orjson.OPT_INDENT_2).decode() + "\n")


if __name__ == "__main__":
    main()

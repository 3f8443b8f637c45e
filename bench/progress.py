"""A progress bar when a person watches, silence otherwise."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """A bar on standard error, drawn only on a terminal."""

    def __init__(self, title: str, total: int) -> None:
        watched = sys.stderr.isatty()
        self._bar = tqdm(desc=title, total=total, disable=not watched, leave=False, unit="call")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.close()

    def at(self, done: int) -> None:
        self._bar.update(done - self._bar.n)

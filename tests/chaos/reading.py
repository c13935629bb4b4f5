"""What a start prints, line by line with the time of each."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from pathlib import Path


class Output:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._lines: list[tuple[float, str]] = []
        self._process, self._log = process, log
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def first(self, pattern: re.Pattern[str], since: float) -> float | None:
        """Seconds from `since` to the first line after it that matches."""
        for moment, line in self._lines:
            if moment >= since and pattern.search(line):
                return round(moment - since, 1)
        return None

    @property
    def text(self) -> str:
        return "".join(line for _, line in self._lines)

    def close(self) -> None:
        """Every process that could write to it has ended."""
        self._thread.join(timeout=10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._log.open("w") as log:
            for line in self._process.stdout:
                self._lines.append((time.monotonic(), line))
                log.write(f"{self._lines[-1][0]:.2f} {line}")
                log.flush()

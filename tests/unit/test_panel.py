"""The panel on a terminal: what is on the screen after redrawing, typing and stopping."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from slime.runlog.panel import PanelDisplay, RunState

_HEIGHT = 30
_CODES = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])")


class Screen:
    """The lines of a terminal that wraps at its last column only when the next character comes."""

    def __init__(self, width: int) -> None:
        self.width, self.row, self.column = width, 0, 0
        self.lines: dict[int, dict[int, str]] = {}

    def write(self, text: str) -> None:
        while text:
            code = _CODES.match(text)
            if code:
                self._control(code[1], code[2])
                text = text[code.end() :]
                continue
            self._put(text[0])
            text = text[1:]

    def _put(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.row, self.column = self.row + 1, 0
        else:
            if self.column == self.width:
                self.row, self.column = self.row + 1, 0
            self.lines.setdefault(self.row, {})[self.column] = char
            self.column += 1

    def _control(self, number: str, letter: str) -> None:
        if letter == "A":
            self.row -= int(number or 1)
        elif letter == "K":
            assert number == "2"
            self.lines.pop(self.row, None)
        else:
            assert letter in "mhl"  # colours, and the cursor's visibility

    def text(self) -> list[str]:
        rows = [self.lines.get(row, {}) for row in range(max(self.lines, default=-1) + 1)]
        return ["".join(row.get(x, " ") for x in range(self.width)).rstrip() for row in rows]


@pytest.mark.parametrize("width", [60, 110])
@pytest.mark.parametrize("typed", ["^C", "^C^C"])
def test_the_echo_of_ctrl_c_leaves_no_line_of_the_panel_behind(width, typed):
    output, screen = StringIO(), Screen(width)

    def seen() -> list[str]:
        screen.write(output.getvalue())
        output.seek(0)
        output.truncate()
        return screen.text()

    console = Console(
        file=output, force_terminal=True, width=width, height=_HEIGHT, legacy_windows=False
    )
    state = RunState(run_name="first", model="tiny", layout="1 trainer", num_rollout=4)
    display = PanelDisplay(state, console)
    display.start()
    try:
        seen()
        state.update({"rollout_id": 0, "rollout/samples": 8, "rollout/reward_mean": 0.5})
        display._live.refresh()
        seen()
        screen.write(typed)  # the terminal echoes it where the cursor is
        display.message("interrupted: saving, then stopping")
    finally:
        display.stop()
    lines = seen()
    assert lines[0] == "interrupted: saving, then stopping"
    assert [line[0] for line in lines[1:]] == ["╭", *"│" * (len(lines) - 3), "╰"]
    assert "rollout 1/4" in lines[2]
    assert screen.row == len(lines) and screen.column == 0  # the next output follows directly

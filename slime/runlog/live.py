"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere.

A display never ends a run: when drawing fails, the error goes to the log and the display falls silent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from slime.config.env import read_env
from slime.runlog.format import layout, model_name
from slime.runlog.panel import PanelDisplay
from slime.runlog.plain import PlainDisplay
from slime.runlog.run_state import RunState
from slime.utils.printable import printable, safe_text

if TYPE_CHECKING:
    from slime.config.arguments import Args

logger = logging.getLogger(__name__)


class LiveDisplay:
    """Shows a run as it goes::

    display = LiveDisplay(args)
    with display.phase("generate"):
        ...
    display.update({"rollout_id": 0, "rollout/reward_mean": 0.4, **timer.take()})  # once per rollout
    display.close()
    """

    def __init__(self, args: Args, console: Console | None = None) -> None:
        console = console or RunConsole()
        self._state = RunState(
            run_name=printable(Path(args.run_dir).name),
            model=printable(model_name(args.hf_checkpoint)),
            layout=layout(
                trainers=0
                if args.debug_rollout_only
                else args.actor_num_nodes * args.actor_num_gpus_per_node,
                rollout=args.rollout_num_gpus,
                colocate=args.colocate,
                backend=args.train_backend,
                engine=args.rollout_engine,
            ),
            num_rollout=args.num_rollout,
        )
        live = console.is_terminal and not console.is_dumb_terminal and not read_env().plain_output
        self._drawing: _Drawing | None = (PanelDisplay if live else PlainDisplay)(
            self._state, console
        )
        self._contained(self._drawing.start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._contained(lambda: self._state.enter(name))
        try:
            yield
        finally:
            self._contained(self._state.leave)

    def update(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a rollout, with its `rollout_id`; or, before the first one, of the start."""
        self._contained(lambda: self._update(metrics))

    def message(self, text: str) -> None:
        """A line for the person watching; it stays above the live region."""
        drawing = self._drawing
        self._contained(
            lambda: drawing.message(text) if drawing else print(safe_text(text), flush=True)
        )

    def close(self) -> None:
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            self._contained(drawing.stop)

    def _update(self, metrics: Mapping[str, float]) -> None:
        is_rollout = self._state.update(metrics)
        if self._drawing is not None:
            (self._drawing.show_rollout if is_rollout else self._drawing.show_start)()

    def _contained(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            drawing, self._drawing = self._drawing, None
            if drawing is not None:
                with suppress(Exception):  # give the terminal back
                    drawing.stop()
            logger.warning("the display failed and is switched off; the run goes on", exc_info=True)


class RunConsole(Console):
    """A console whose reader may go away: rich would end the process then."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads this output any more")


class _Drawing(Protocol):
    def start(self) -> None: ...
    def show_start(self) -> None: ...
    def show_rollout(self) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...

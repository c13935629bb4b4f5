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

from slime.dashboard.format import layout
from slime.dashboard.panel import PanelDisplay
from slime.dashboard.plain import PlainDisplay
from slime.dashboard.run_state import RunState
from slime.utils.env import read_env

if TYPE_CHECKING:
    from slime.utils.arguments import Args

logger = logging.getLogger(__name__)


class LiveDisplay:
    """Shows a run as it goes.

    display = LiveDisplay(args)
    with display.phase("generate"):
        ...
    display.update({"rollout/reward": 0.4})
    display.update(timer.take())     # perf/step_time completes the rollout
    display.close()
    """

    def __init__(self, args: Args, console: Console | None = None) -> None:
        self._state = RunState(
            run_name=Path(args.run_dir).name,
            model=Path(args.hf_checkpoint or "model").name,
            layout=layout(
                trainers=args.actor_num_nodes * args.actor_num_gpus_per_node,
                rollout=args.rollout_num_gpus,
                colocate=args.colocate,
                backend=args.train_backend,
                engine=args.rollout_engine,
            ),
            start_rollout_id=args.start_rollout_id or 0,
            num_rollout=args.num_rollout,
        )
        console = console or Console()
        live = console.is_terminal and not console.is_dumb_terminal and not read_env().plain_output
        drawing = PanelDisplay(self._state, console) if live else PlainDisplay(self._state)
        self._drawing: _Drawing | None = drawing
        self._contained(drawing.start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._contained(lambda: self._state.enter(name))
        try:
            yield
        finally:
            self._contained(self._state.leave)

    def update(self, metrics: Mapping[str, float]) -> None:
        self._contained(lambda: self._update(metrics))

    def resumed_at(self, start_rollout_id: int) -> None:
        """A checkpoint was loaded: rollouts before this one are done."""
        self._state.start_rollout_id = start_rollout_id

    def message(self, text: str) -> None:
        """A line for the person watching; it stays above the live region."""
        if self._drawing is None:
            print(text, flush=True)
        else:
            self._contained(lambda: self._drawing and self._drawing.message(text))

    def close(self) -> None:
        if self._drawing is not None:
            self._contained(self._drawing.stop)
        self._drawing = None

    def _update(self, metrics: Mapping[str, float]) -> None:
        complete = self._state.update(metrics)
        if self._drawing is None:
            return
        if complete:
            self._drawing.rollout_done()
            self._state.start_next()
        elif not any(name.startswith("rollout/") for name in self._state.current):
            self._drawing.evaluated(metrics)
            self._state.start_next()

    def _contained(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception:
            drawing, self._drawing = self._drawing, None
            if drawing is not None:
                with suppress(Exception):  # give the terminal back
                    drawing.stop()
            logger.warning("the display failed and is switched off; the run goes on", exc_info=True)


class _Drawing(Protocol):
    def start(self) -> None: ...
    def evaluated(self, metrics: Mapping[str, float]) -> None: ...
    def rollout_done(self) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...

"""The engine: a thread that steps over requests, and the calls other threads make on it.

    HTTP threads ──submit / call──▶ commands ──▶ loop: run commands, then step() ──▶ on_update(requests)

All state belongs to the loop thread; others only leave commands. It sleeps on a condition variable
while there is nothing to do.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from slime.engine.arguments import EngineArgs
from slime.engine.cache.memory import MemoryReleaser, choose_sizes
from slime.engine.cache.page_pool import PagePool
from slime.engine.models.loading import eos_token_ids
from slime.engine.models.model_runner import ModelRunner
from slime.engine.scheduler.request import FinishReason, Request
from slime.engine.scheduler.sampling_params import RequestError
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.speculation import DEFAULT_WINDOW, Drafter
from slime.engine.scheduler.step_output import Flight, StepOutput
from slime.engine.server.text import TextCodec, load_codec
from slime.engine.weights import WeightStore

logger = logging.getLogger(__name__)
T = TypeVar("T")
UpdateListener = Callable[[list[Request]], None]


class Engine:
    """`on_update` is called in the loop thread with requests that finished or, streaming, grew;
    `on_failure` when the loop ends by an error, after which the engine is of no more use."""

    def __init__(
        self, args: EngineArgs, on_update: UpdateListener, on_failure: Callable[[], None]
    ) -> None:
        self.args = args
        self.runner = ModelRunner(args)
        self.codec: TextCodec = load_codec(args)
        self.eos_ids = eos_token_ids(self.runner.model, self.codec.eos_token_id)
        self.sizes = choose_sizes(args, self.runner)
        pool = PagePool(self.sizes.num_pages, args.page_size)
        self.scheduler = Scheduler(
            pool,
            max_running=self.sizes.max_running,
            max_pages_per_request=self.sizes.max_pages_per_request,
            chunk_size=self.sizes.chunk_size,
            use_prefix_cache=not args.disable_radix_cache,
            drafter=_make_drafter(args),
        )
        self.runner.prepare(self.sizes.num_pages, self.scheduler)
        self.weights = WeightStore(self.runner.model)
        self._releaser = MemoryReleaser(self.runner)
        self.weight_version = args.weight_version
        self.model_path = args.model_path
        self.pause_mode: str | None = None
        self.released: set[str] = set()  # parts of the memory given back
        self.failure: BaseException | None = None
        self.num_steps = 0
        self.in_call = False  # a command of another thread is being carried out
        self._on_update = on_update
        self._on_failure = on_failure
        self._random = random.Random(args.random_seed)
        self._wake = threading.Condition()
        self._commands: deque[tuple[bool, Callable[[], None]]] = deque()  # with: after all steps?
        self._flights: deque[Flight] = deque()  # steps not collected yet, the oldest first
        self._exclusive: deque[Callable[[], None]] = deque()
        self._held: deque[Request] = deque()  # came while an exclusive call waits for the others
        self._stopping = False
        self._thread: threading.Thread | None = None

    # called from other threads

    @classmethod
    def launch(
        cls, args: EngineArgs, on_update: UpdateListener, on_failure: Callable[[], None]
    ) -> Engine:
        """Make an engine and step it, all in one new thread; returns once the model is loaded.

        One thread: OpenMP keeps a team per thread that ever computed, and with more of them than
        cores the workers sleep between any two operations instead of waiting for the next.
        """
        made: Future[Engine] = Future()

        def live() -> None:
            try:
                engine = cls(args, on_update, on_failure)
            except BaseException as error:
                made.set_exception(error)
                return
            made.set_result(engine)
            engine.run()

        thread = threading.Thread(target=live, name="engine", daemon=True)
        thread.start()
        engine = made.result()
        engine._thread = thread
        return engine

    def stop(self) -> None:
        def stop() -> None:
            self._stopping = True

        self._leave_command(stop, settled=False)
        if self._thread is not None:
            self._thread.join()

    def new_seed(self) -> int:
        return self._random.getrandbits(63)

    def submit(self, requests: list[Request]) -> None:
        self._leave_command(lambda: self._accept(requests), settled=False)

    def call(self, function: Callable[[], T], *, exclusive: bool = False) -> Future[T]:
        """Run `function` in the loop thread between two steps.

        Exclusive: once no request is in flight; those that come meanwhile are held back. While
        generation is paused, or memory is released, it runs at once.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has hung up
            self.in_call = True
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self.in_call = False

        if exclusive:
            self._leave_command(lambda: self._exclusive.append(run), settled=False)
        else:
            self._leave_command(run, settled=True)
        return future

    def _leave_command(self, command: Callable[[], None], *, settled: bool) -> None:
        """`settled`: it must find the tokens of every step known."""
        with self._wake:
            self._commands.append((settled, command))
            self._wake.notify()

    # called in the loop thread

    def step(self) -> None:
        """Schedule and launch a step, then postprocess the one before, which runs meanwhile."""
        if self._flights and self.scheduler.may_retract():
            self._settle()
        step = self.scheduler.schedule()
        if step:
            flight = self.runner.launch(step)
            self._flights.append(flight)
            self.scheduler.complete(step)
            self.num_steps += 1
            # A draft is made from the whole text, so nothing may be pending then.
            wait = flight.immediate or self.scheduler.drafter is not None
            self._settle(keep=0 if wait else 1)
        elif self._flights:
            self._settle()
        elif self.scheduler.has_requests:
            raise RuntimeError("nothing could be scheduled")

    def _settle(self, keep: int = 0) -> None:
        """Read the tokens of all steps but the last `keep`."""
        while len(self._flights) > keep:
            self._postprocess(self._flights.popleft().collect())

    def abort(self, matches: Callable[[Request], bool]) -> int:
        """End matching requests with what they have; returns how many."""
        running = [request for request in self.scheduler.running if matches(request)]
        queued = {request: None for request in self.scheduler.waiting if matches(request)}
        queued |= {request: None for request in self._held if matches(request)}
        victims = [*running, *queued]
        for request in victims:
            request.finish = FinishReason(kind="abort", message="Aborted")
        for request in running:
            self._finish(request)
        if queued:  # all at once: taking one out of a queue is linear in its length
            self.scheduler.drop_waiting(queued.keys())
            self._held = deque(request for request in self._held if request not in queued)
        if victims:
            self._on_update(victims)
        return len(victims)

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort(lambda request: True)
        elif mode == "retract":
            self.scheduler.retract_all()
        self.pause_mode = mode

    def resume(self) -> None:
        self.pause_mode = None

    def flush_cache(self) -> bool:
        """Forget all prefixes; False if requests are in the way."""
        if self.scheduler.running or (self.scheduler.waiting and self.pause_mode is None):
            return False
        self.scheduler.flush()
        return True

    def weights_changed(self) -> None:
        """Cached prefixes were computed with other weights; running requests keep their own."""
        self.scheduler.flush()

    def release_memory(self, tags: list[str]) -> None:
        """Give back what the tags name; requests wait until all of it is back."""
        if self.scheduler.running or (self.scheduler.waiting and self.pause_mode is None):
            raise RequestError(
                "memory can be released only while no request is running; flush_cache first"
            )
        self.scheduler.flush()
        self.weights.forget()
        for tag in tags:
            if tag not in self.released:
                self._releaser.release(tag)
                self.released.add(tag)

    def resume_memory(self, tags: list[str]) -> None:
        for tag in tags:
            if tag in self.released:
                self._releaser.resume(tag)
                self.released.discard(tag)

    def require_memory(self, tag: str) -> None:
        if tag in self.released:
            raise RequestError(
                f"{tag} are released; call resume_memory_occupation with tags=[{tag!r}] first"
            )

    @property
    def in_flight(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting) + len(self._held)

    def run(self) -> None:
        """Until `stop`, or until a step fails."""
        try:
            while not self._stopping:
                self._wait_for_work()
                self._run_commands()
                self._run_exclusive()
                if self._can_step():
                    self.step()
        except BaseException as error:
            logger.exception("the engine stopped")
            self.failure = error
            self._fail_all(error)
            self._on_failure()

    def _wait_for_work(self) -> None:
        with self._wake:
            self._wake.wait_for(
                lambda: self._commands or self._can_run_exclusive() or self._can_step()
            )

    def _run_commands(self) -> None:
        while self._commands:
            settled, command = self._commands.popleft()
            if settled:
                self._settle()
            command()

    def _can_step(self) -> bool:
        if self.pause_mode is not None or self.released:
            return False
        return self.scheduler.has_requests or bool(self._flights)

    def _can_run_exclusive(self) -> bool:
        """While memory is away nothing runs, and those who wait have nothing in the cache yet."""
        return bool(self._exclusive) and (
            self.pause_mode is not None or bool(self.released) or not self.scheduler.has_requests
        )

    def _run_exclusive(self) -> None:
        while self._can_run_exclusive():
            self._settle()
            self._exclusive.popleft()()
        if not self._exclusive:
            while self._held:
                self.scheduler.add(self._held.popleft())

    def _accept(self, requests: list[Request]) -> None:
        waiting_room = self._held if self._exclusive and self.pause_mode is None else None
        for request in requests:
            if waiting_room is not None:
                waiting_room.append(request)
            else:
                self.scheduler.add(request)

    def _postprocess(self, output: StepOutput) -> None:
        for request, log_prob in output.scored:
            request.input_log_probs.append(log_prob)
        self._fail_if_no_numbers(output)
        updated: dict[Request, None] = {}  # in order, each once
        version = self.weight_version
        for request, token, log_prob in zip(
            output.requests, output.tokens, output.log_probs, strict=True
        ):
            if request.finish is None:
                if request.num_pending == 0:  # a draw behind a right guess
                    self.scheduler.take_guess(request)
                request.num_pending -= 1
                request.append(token, log_prob, version)
                if request.params.stop:
                    self._look_for_stop(request)
            elif request.row < 0:  # finished by the token before this one
                continue
            if request.finish is not None:
                self._finish(request)
                updated[request] = None
            elif request.stream:
                updated[request] = None
        if updated:
            self._on_update(list(updated))

    def _finish(self, request: Request) -> None:
        """What is known by its place in the cache is read before the place is given away."""
        experts = self.runner.routed_experts
        if request.return_routed_experts and experts is not None and request.pages:
            request.routed_experts = experts.of(request)
        self.scheduler.finish(request)

    def _look_for_stop(self, request: Request) -> None:
        if request.num_output and (request.finish is None or request.finish.kind == "length"):
            request.finish = self.codec.find_stop(request) or request.finish

    def _fail_if_no_numbers(self, output: StepOutput) -> None:
        if not math.isnan(sum(output.log_probs)):
            return
        message = f"the model's output is not a number (weights of version {self.weight_version})"
        for request, log_prob in zip(output.requests, output.log_probs, strict=True):
            if math.isnan(log_prob) and request.finish is None:
                request.finish = FinishReason(kind="abort", message=message, status_code=500)

    def _fail_all(self, error: BaseException) -> None:
        message = f"the engine stopped: {error!r}"
        for request in [*self.scheduler.running, *self.scheduler.waiting, *self._held]:
            request.finish = FinishReason(kind="abort", message=message, status_code=500)
            self._on_update([request])


def _make_drafter(args: EngineArgs) -> Drafter | None:
    if args.speculative_algorithm is None:
        return None
    return Drafter(args.speculative_num_draft_tokens or DEFAULT_WINDOW)

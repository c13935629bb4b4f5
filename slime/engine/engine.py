"""The engine: one thread that runs steps, and the calls that other threads make on it.

    HTTP threads ──submit / call──▶ commands ──▶ loop: run commands, then step() ──▶ on_update(requests)

All state belongs to the engine thread; other threads only enqueue commands. It sleeps on a condition
variable while there is nothing to do.
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
from slime.engine.kv_cache import choose_sizes, release_memory, resume_memory
from slime.engine.lora.store import Adapter, make_store
from slime.engine.models.loading import eos_token_ids
from slime.engine.models.model_runner import ModelRunner
from slime.engine.radix_cache import PagePool
from slime.engine.scheduler.request import FinishReason, Request
from slime.engine.scheduler.sampling_params import RequestError
from slime.engine.scheduler.scheduler import Scheduler
from slime.engine.scheduler.speculation import DEFAULT_WINDOW, Drafter
from slime.engine.scheduler.step import PendingStep, StepOutput
from slime.engine.server.text import TextCodec, load_codec
from slime.engine.weights import WeightStore

logger = logging.getLogger(__name__)
T = TypeVar("T")
UpdateListener = Callable[[list[Request]], None]


class Engine:
    """`on_update` is called in the engine thread with requests that finished, or that stream and have new
    tokens; `on_failure` when the loop ended with an error: the engine cannot be used after that."""

    def __init__(
        self, args: EngineArgs, on_update: UpdateListener, on_failure: Callable[[], None]
    ) -> None:
        self.args = args
        self.runner = ModelRunner(args)
        self.codec: TextCodec = load_codec(args)
        self.eos_ids = eos_token_ids(self.runner.model, self.codec.eos_token_id)
        self.sizes = choose_sizes(args, self.runner)
        pool = PagePool(self.sizes.num_pages, args.page_size)
        window = args.speculative_num_draft_tokens or DEFAULT_WINDOW
        self.scheduler = Scheduler(
            pool,
            max_running=self.sizes.max_running,
            max_pages_per_request=self.sizes.max_pages_per_request,
            chunk_size=self.sizes.chunk_size,
            use_prefix_cache=not args.disable_radix_cache,
            drafter=None if args.speculative_algorithm is None else Drafter(window),
            num_saved_states=self.sizes.num_saved_states if self.runner.state_shape else None,
        )
        self.runner.prepare(self.sizes.num_pages, self.scheduler)
        self.weights = WeightStore(self.runner.model, args.model_path)
        self.lora = make_store(args, self.runner.lora)
        self.weight_version = args.weight_version
        self.model_path = args.model_path
        self.pause_mode: str | None = None
        self.released: set[str] = set()  # tags of the memory that is released
        self.failure: BaseException | None = None
        self.num_steps = 0
        self.in_call = False  # a command of another thread is running
        self._on_update = on_update
        self._on_failure = on_failure
        self._random = random.Random(args.random_seed)
        self._wake = threading.Condition()
        self._commands: deque[tuple[bool, Callable[[], None]]] = deque()  # (after_steps, command)
        self._pending_steps: deque[PendingStep] = deque()  # not read yet, oldest first
        self._exclusive: deque[Callable[[], None]] = deque()
        self._held_back: deque[Request] = deque()  # arrived while an exclusive call waits
        self._stopping = False
        self._thread: threading.Thread | None = None

    # called from other threads

    @classmethod
    def launch(
        cls, args: EngineArgs, on_update: UpdateListener, on_failure: Callable[[], None]
    ) -> Engine:
        """Construct an engine and run it, both in one new thread; return once the model is loaded.

        One thread, because OpenMP keeps a thread team for every thread that has computed, and teams with
        more threads than cores sleep between operations instead of spinning.
        """
        loaded: Future[Engine] = Future()

        def run_thread() -> None:
            try:
                engine = cls(args, on_update, on_failure)
            except BaseException as error:
                loaded.set_exception(error)
                return
            loaded.set_result(engine)
            engine.run()

        thread = threading.Thread(target=run_thread, name="engine", daemon=True)
        thread.start()
        engine = loaded.result()
        engine._thread = thread
        return engine

    def stop(self) -> None:
        def stop() -> None:
            self._stopping = True

        self._enqueue(stop, after_steps=False)
        if self._thread is not None:
            self._thread.join()

    def find_adapter(self, name: str) -> Adapter:
        """Return the adapter that a request names, or raise RequestError."""
        if self.lora is None:
            raise RequestError(
                f"LoRA adapter {name[:100]!r} is not loaded: start the engine with --enable-lora"
            )
        return self.lora.find(name)

    def version_of(self, request: Request) -> str:
        """Return the weight version of the request: that of its adapter, or of the base model."""
        return self.weight_version if request.adapter is None else request.adapter.version

    def new_seed(self) -> int:
        return self._random.getrandbits(63)

    def submit(self, requests: list[Request]) -> None:
        self._enqueue(lambda: self._accept(requests), after_steps=False)

    def call(
        self, function: Callable[[], T], *, exclusive: bool = False, after_steps: bool = True
    ) -> Future[T]:
        """Run `function` in the engine thread between two steps, see `_enqueue` for `after_steps`.

        Exclusive calls wait until no request is in flight; new requests are held back until they have run.
        If generation is paused or memory is released, they do not wait.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller cancelled it
            self.in_call = True
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            finally:
                self.in_call = False

        if exclusive:
            self._enqueue(lambda: self._exclusive.append(run), after_steps=False)
        else:
            self._enqueue(run, after_steps=after_steps)
        return future

    def _enqueue(self, command: Callable[[], None], *, after_steps: bool) -> None:
        """Enqueue a command; with `after_steps` the tokens of all launched steps are read before it runs."""
        with self._wake:
            self._commands.append((after_steps, command))
            self._wake.notify()

    # called in the loop thread

    def step(self) -> None:
        """Schedule and launch a step, then postprocess the previous one while this one runs."""
        if self._pending_steps and self.scheduler.may_retract():
            self._wait_for_steps()
        step = self.scheduler.schedule()
        if step:
            pending = self.runner.launch(step)
            self._pending_steps.append(pending)
            self.scheduler.complete(step)
            self.num_steps += 1
            # Drafts are made from the whole text, so no token may be pending.
            wait = pending.blocks_next_step or self.scheduler.drafter is not None
            self._wait_for_steps(keep=0 if wait else 1)
        elif self._pending_steps:
            self._wait_for_steps()
        elif self.scheduler.has_requests:
            raise RuntimeError("nothing could be scheduled")

    def _wait_for_steps(self, keep: int = 0) -> None:
        """Read the tokens of all steps but the last `keep`."""
        while len(self._pending_steps) > keep:
            self._postprocess(self._pending_steps.popleft().wait())

    def abort(self, matches: Callable[[Request], bool]) -> int:
        """Finish matching requests with the tokens they have; return how many."""
        running = [request for request in self.scheduler.running if matches(request)]
        queued = {request: None for request in self.scheduler.waiting if matches(request)}
        queued |= {request: None for request in self._held_back if matches(request)}
        aborted = [*running, *queued]
        for request in aborted:
            request.finish = FinishReason(kind="abort", message="Aborted")
        for request in running:
            self._finish(request)
        if queued:  # all at once: removing one from a deque is linear in its length
            self.scheduler.drop_waiting(queued.keys())
            self._held_back = deque(request for request in self._held_back if request not in queued)
        if aborted:
            self._on_update(aborted)
        return len(aborted)

    def pause(self, mode: str) -> None:
        if mode == "abort":
            self.abort(lambda request: True)
        elif mode == "retract":
            self.scheduler.retract_all()
        self.pause_mode = mode

    def resume(self) -> None:
        self.pause_mode = None

    def flush_cache(self) -> bool:
        """Clear the prefix cache; return False if requests are running or waiting."""
        if self.scheduler.running or (self.scheduler.waiting and self.pause_mode is None):
            return False
        self.scheduler.flush()
        return True

    def weights_changed(self) -> None:
        """Clear the prefix cache, which was computed with other weights; running requests keep their pages."""
        self.scheduler.flush()
        if self.runner.tower is not None and self.weights.tower_changed:
            self.runner.tower.forget()
        self.weights.tower_changed = False

    def unload_adapter(self, name: str) -> None:
        """Free the slot of an adapter that no request uses; later requests for it are refused."""
        adapter = self.find_adapter(name)
        requests = (*self.scheduler.running, *self.scheduler.waiting)
        users = sum(request.adapter is adapter for request in requests)
        if users:
            raise RequestError(f"{users} requests use adapter {name!r}: abort them first")
        assert self.lora is not None
        self.lora.unload(name)

    def release_memory(self, tags: list[str]) -> None:
        """Release the memory of these tags; requests wait until all of it is resumed."""
        if self.scheduler.running or (self.scheduler.waiting and self.pause_mode is None):
            raise RequestError(
                "memory can be released only while no request is running; flush_cache first"
            )
        self.scheduler.flush()
        if self.runner.tower is not None:
            self.runner.tower.forget()
        self.weights.invalidate()
        if self.lora is not None:
            self.lora.forget_buffers()
        for tag in tags:
            if tag not in self.released:
                release_memory(self.runner, tag)
                self.released.add(tag)

    def resume_memory(self, tags: list[str]) -> None:
        for tag in tags:
            if tag in self.released:
                resume_memory(self.runner, tag)
                self.released.discard(tag)

    def require_memory(self, tag: str) -> None:
        if tag in self.released:
            raise RequestError(
                f"the memory of {tag} is released; call resume_memory_occupation with tags=[{tag!r}] first"
            )

    @property
    def in_flight(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting) + len(self._held_back)

    def run(self) -> None:
        """Run the loop until `stop`, or until a step fails."""
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
            after_steps, command = self._commands.popleft()
            if after_steps:
                self._wait_for_steps()
            command()

    def _can_step(self) -> bool:
        if self.pause_mode is not None or self.released:
            return False
        return self.scheduler.has_requests or bool(self._pending_steps)

    def _can_run_exclusive(self) -> bool:
        """Return whether an exclusive call may run: while memory is released no request holds cache pages."""
        return bool(self._exclusive) and (
            self.pause_mode is not None or bool(self.released) or not self.scheduler.has_requests
        )

    def _run_exclusive(self) -> None:
        while self._can_run_exclusive():
            self._wait_for_steps()
            self._exclusive.popleft()()
        if not self._exclusive:
            while self._held_back:
                self._add(self._held_back.popleft())

    def _accept(self, requests: list[Request]) -> None:
        if self._exclusive and self.pause_mode is None:
            self._held_back.extend(requests)
            return
        for request in requests:
            self._add(request)

    def _add(self, request: Request) -> None:
        """Queue a request; abort it if its adapter was unloaded since it was parsed."""
        adapter = request.adapter
        if adapter is not None and (
            self.lora is None or self.lora.adapters.get(adapter.name) is not adapter
        ):
            message = f"LoRA adapter {adapter.name!r} was unloaded"
            request.finish = FinishReason(kind="abort", message=message, status_code=400)
            self._on_update([request])
            return
        self.scheduler.add(request)

    def _postprocess(self, output: StepOutput) -> None:
        for request, log_prob in output.scored:
            request.input_log_probs.append(log_prob)
        self._fail_nan_requests(output)
        updated: dict[Request, None] = {}  # in order, each once
        for request, token, log_prob in zip(
            output.requests, output.tokens, output.log_probs, strict=True
        ):
            if request.finish is None:
                if request.num_pending == 0:  # sampled after an accepted draft token
                    self.scheduler.advance(request)
                request.num_pending -= 1
                request.append(token, log_prob, self.version_of(request))
                if request.params.stop:
                    self._check_stop_strings(request)
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
        """Read the routed experts, which are stored by cache slot, before the pages are released."""
        experts = self.runner.routed_experts
        if request.return_routed_experts and experts is not None and request.pages:
            request.routed_experts = experts.of(request)
        self.scheduler.finish(request)

    def _check_stop_strings(self, request: Request) -> None:
        if request.num_output and (request.finish is None or request.finish.kind == "length"):
            request.finish = self.codec.find_stop(request) or request.finish

    def _fail_nan_requests(self, output: StepOutput) -> None:
        if not math.isnan(sum(output.log_probs)):
            return
        message = f"the model's output is not a number (weights of version {self.weight_version})"
        for request, log_prob in zip(output.requests, output.log_probs, strict=True):
            if math.isnan(log_prob) and request.finish is None:
                request.finish = FinishReason(kind="abort", message=message, status_code=500)

    def _fail_all(self, error: BaseException) -> None:
        message = f"the engine stopped: {error!r}"
        for request in [*self.scheduler.running, *self.scheduler.waiting, *self._held_back]:
            request.finish = FinishReason(kind="abort", message=message, status_code=500)
            self._on_update([request])

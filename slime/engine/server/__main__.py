"""`python -m slime.engine.server --model-path DIR`: serves one engine over SGLang's HTTP protocol."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from slime.config.env import read_env, set_default_env
from slime.utils.gc_tuning import collector_off

# Read when torch loads OpenMP. Threads spin about 1 ms at a barrier before they sleep instead of 15 ms: a
# sixth slower on idle cores, and many times faster if other processes use the cores too.
set_default_env(GOMP_SPINCOUNT="30000")

with collector_off():
    from transformers.utils import logging as transformers_logging

    from slime.core.errors import UserError
    from slime.engine.arguments import EngineArgs, parse_engine_args
    from slime.engine.engine import Engine
    from slime.engine.server.app import EngineApp
    from slime.engine.server.threads import ReplyHub
    from slime.utils.http_guard import GuardedServer, HttpLimits

logger = logging.getLogger(__name__)
_SWITCH_SECONDS = 0.0005  # GIL switch interval: bounds the engine thread's wait for the HTTP thread


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_engine_args(argv)
        logging.basicConfig(
            level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
        )
        transformers_logging.disable_progress_bar()
        return asyncio.run(serve(args))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status


async def serve(args: EngineArgs) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status, 1 if the engine failed."""
    listener = _listen(args)  # first, so that a port in use is reported before the model is loaded
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    hub = ReplyHub(loop)

    def fail() -> None:
        loop.call_soon_threadsafe(stopped.set)

    engine = await asyncio.to_thread(Engine.launch, args, hub.on_update, fail)
    hub.engine = engine
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()  # full collections skip the objects of torch and transformers
    limits = HttpLimits()
    server = GuardedServer(EngineApp(engine, hub, _key(args), limits).make(), limits)
    await server.start(listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    _announce(args, listener)
    await stopped.wait()
    engine.call(lambda: engine.abort(lambda request: True))
    await server.close()
    engine.stop()
    return 0 if engine.failure is None else 1


def _listen(args: EngineArgs) -> socket.socket:
    try:
        return socket.create_server((args.host, args.port), backlog=1024)
    except OSError as error:
        raise UserError(
            f"cannot listen at {args.host}:{args.port} ({error.strerror or error}); "
            "choose another --port, or 0 for any free one"
        ) from error


def _key(args: EngineArgs) -> str | None:
    """Return SLIME_ENGINE_TOKEN, which runs set, or --api-key, which other users of the machine can read."""
    key = read_env().engine_token or args.api_key
    if not key:
        logger.warning(
            "neither SLIME_ENGINE_TOKEN nor --api-key is set: everyone who can reach the port may "
            "generate, and control routes are closed"
        )
    return key or None


def _announce(args: EngineArgs, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    if args.port_file:
        path = Path(args.port_file)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"port": port, "pid": os.getpid()}))
        temporary.replace(path)
    logger.info("engine ready at http://%s:%d", args.host, port)


if __name__ == "__main__":
    sys.exit(main())

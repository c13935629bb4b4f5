"""Compare slime's option tables with the parsers of the installed SGLang and router.

slime doctor --sglang        prints the differences
"""

from __future__ import annotations

import json
import subprocess
import sys

from slime.config.flags.engine_options import known_version
from slime.config.flags.registry import read_table
from slime.config.installed import SGLangInstall, find_sglang

_TIMEOUT_S = 300
_ASK = """
import argparse, json, sys
parser = argparse.ArgumentParser()
if sys.argv[1] == "sglang":
    from sglang.srt.server_args import ServerArgs
    ServerArgs.add_cli_args(parser)
else:
    from sglang_router.router_args import RouterArgs
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
if len(sys.argv) > 2:
    parser.parse_args(json.loads(sys.argv[2]))
print("ANSWER" + json.dumps([option for a in parser._actions for option in a.option_strings]))
"""


def installed_options(
    install: SGLangInstall, package: str, argv: list[str] | None = None
) -> set[str]:
    """Return the options of "sglang" or "sglang_router"; its parser must accept `argv`."""
    given = [] if argv is None else [json.dumps(argv)]
    reply = subprocess.run(
        [install.python, "-c", _ASK, package, *given],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if reply.returncode != 0:
        raise ValueError(reply.stderr.strip().splitlines()[-1])
    answer = next(line for line in reply.stdout.splitlines() if line.startswith("ANSWER"))
    return set(json.loads(answer.removeprefix("ANSWER")))


def differences(install: SGLangInstall) -> list[str]:
    """Return one line per option that is missing from slime's tables or from the packages."""
    found = []
    for table, package in (("sglang", "sglang"), ("router", "sglang_router")):
        here = installed_options(install, package) - {"-h", "--help", "--config"}
        known = _known(table, install.version)
        found += [
            f"{package} has {option}, which slime does not know" for option in sorted(here - known)
        ]
        found += [f"{package} has no {option} any more" for option in sorted(known - here)]
    return [line for line in found if "--no-" not in line]  # skip the negated form of a flag


def _known(table: str, version: str) -> set[str]:
    rows = read_table(table)["flags"]  # pyright: ignore[reportArgumentType]
    if table == "sglang":
        rows = [row for row in rows if known_version(version) in row["versions"]]
    return {option.replace(f"--{table}-", "--", 1) for row in rows for option in row["options"]}


def main() -> int:
    install = find_sglang()
    if install is None:
        print("sglang is not installed", file=sys.stderr)
        return 1
    lines = differences(install)
    print("\n".join(lines) or f"slime knows every option of SGLang {install.version}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

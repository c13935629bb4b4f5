"""Which user wrote a config.yaml? A run signs the file with the key of its user.

Options name code (--custom-rm-path), environment variables and permissions (--allow-unsandboxed-code), so those of
another user's folder are not used.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from slime.core.errors import UserError
from slime.runlog.earlier_runs import CONFIG_FILE
from slime.runlog.jsonl import replace_file
from slime.runlog.run_yaml import parse_run_yaml, read_text
from slime.utils.untrusted_files import is_signed, sign

_LINE = "# signed for this user: "
_SIGNATURE = re.compile(rf"\n{_LINE}([0-9a-f]{{64}})\n\Z")
_PURPOSE = b"\0config.yaml\0"  # so that it is no valid signature of stored functions


def signed(text: str) -> str:
    """Append a line that marks the text as this user's; return it unchanged if there is no key."""
    try:
        return f"{text}{_LINE}{sign(_PURPOSE + text.encode()).hex()}\n"
    except (OSError, RuntimeError, UserError):  # no home, or one that cannot be written
        return text


def read_config(run_dir: Path) -> tuple[dict[str, Any], bool]:
    """Return the options in config.yaml of a run folder, and whether a run of this user wrote the file."""
    path = run_dir / CONFIG_FILE
    text = read_text(path)
    given = parse_run_yaml(text, path)
    found = _SIGNATURE.search(text)
    if found is None:
        return given, False
    content = text[: found.start() + 1].encode()
    try:
        return given, is_signed(_PURPOSE + content, bytes.fromhex(found[1]))
    except (OSError, RuntimeError, UserError):
        return given, False


def read_own_config(run_dir: Path) -> dict[str, Any]:
    """Return the options in config.yaml; raise UserError unless a run of this user wrote the file."""
    given, is_own = read_config(run_dir)
    if not is_own:
        raise UserError(
            f"{run_dir} is not a run of this user, or its {CONFIG_FILE} was changed, and options can run code. "
            f"Read the file, then: slime.load_run({str(run_dir)!r}, trust=True), or slime train --config "
            f"{run_dir / CONFIG_FILE} --run-dir {run_dir} --load {given.get('save')}"
        )
    return given


def adopt_config(run_dir: Path) -> None:
    """Sign config.yaml as it is with the key of this user."""
    path = run_dir / CONFIG_FILE
    text = read_text(path)
    found = _SIGNATURE.search(text)
    replace_file(path, signed(text[: found.start() + 1] if found else text).encode())

"""requirements.lock says what constraints.txt says, with a hash for every file that may be installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^# (\S+)\n([\w.-]+)==([\w.+-]+)(?: ; (.*?))?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.M
)


def locked() -> dict[tuple[str, str], str]:
    """Return {(name, version): extras that need it}."""
    text = (ROOT / "requirements.lock").read_text()
    blocks = {(name, version): users for users, name, version, _, _ in BLOCK.findall(text)}
    assert len(blocks) == len(re.findall(r"^[\w.-]+==", text, re.M))
    return blocks


def test_every_locked_version_is_the_pinned_one():
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert locked().keys() <= set(pins)
    missing = {name for name, _ in pins} - {name for name, _ in locked()}
    separate = {name for name in missing if re.match(r"torch$|nvidia-|cuda-", name)}
    assert "torch" in separate
    # Pins of packages that no extra of pyproject.toml needs on Linux would be dead lines.
    assert missing == separate


def test_a_file_with_another_hash_is_refused(tmp_path: Path):
    """pip is handed a wheel of a locked name and version, made here."""
    wheel = tmp_path / "zss-1.2.0-py3-none-any.whl"
    wheel.write_bytes(b"not what was locked")
    version = next(version for name, version in locked() if name == "zss")
    wheel = wheel.rename(tmp_path / f"zss-{version}-py3-none-any.whl")
    text = (ROOT / "requirements.lock").read_text()
    block = re.search(rf"^zss=={version}.*?(?=^#|\Z)", text, re.M | re.S)
    assert block
    (tmp_path / "lock").write_text(block[0])
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--isolated", "--no-index", "--no-deps",
         "--require-hashes", "--find-links", str(tmp_path), "--target", str(tmp_path / "to"),
         "--requirement", str(tmp_path / "lock")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr

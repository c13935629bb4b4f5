"""docs/scaling.md names scripts, settings and variables that are there, with the values they have."""

import re
from pathlib import Path

from slime.config.flags.registry import all_flags

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scaling.md").read_text()
LIBRARY = "".join(path.read_text() for path in sorted((ROOT / "scripts").rglob("*.s[hb]*")))


def test_files():
    named = set(re.findall(r"(?:scripts|tools|examples)/[\w./-]+\.(?:sh|py|sbatch)", TEXT))
    assert len(named) >= 8
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert all(script.name in TEXT for script in (ROOT / "scripts").glob("run-*.sh"))
    links = re.findall(r"\]\((\w+\.md)\)", TEXT)
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


def test_variables_and_their_values():
    shown = dict(re.findall(r"`((?:NCCL|TORCH_NCCL|CUDA)_\w+)=(\w+)`", TEXT))
    defaults = dict(re.findall(r"export (\w+)=\$\{\1:-(\w+)\}", LIBRARY))
    nccl = {name: value for name, value in defaults.items() if "NCCL" in name or "CUDA" in name}
    assert shown == {name: value for name, value in nccl.items() if not name.endswith("IFNAME")}
    assert len(shown) == 13


def test_settings():
    rows = re.findall(r"^\| ((?:`[A-Z_]+[=\"\w :/]*`(?:, )?)+) \|", TEXT, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([A-Z_]+)", row)}
    assert len(names) >= 16
    assert {name for name in names if f"${{{name}" not in LIBRARY} == set()


def test_flags():
    """Those in quotes are slime's own; commands of others stand in blocks."""
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    flags = {option for flag in all_flags().values() for option in flag.options}
    planner = {"--gpus", "--gpu-memory", "--suggest", "--cluster"}
    ray = {"--head", "--address"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose)) <= flags | planner | ray

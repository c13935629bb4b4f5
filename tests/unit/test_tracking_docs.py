"""docs/metrics.md names every metric the code writes out by name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_LITERAL = re.compile(r'"((?:perf|rollout|train)/[a-z][a-z0-9_]*)"')


def test_every_metric_in_the_code_is_documented():
    documented = (ROOT / "docs" / "metrics.md").read_text()
    # A phase of the timer becomes perf/<phase>_time.
    phases = {
        f"train/{part}" for part in ("ref_log_probs", "teacher_log_probs", "old_log_probs", "steps")
    }
    found: dict[str, str] = {}
    for path in (ROOT / "slime").rglob("*.py"):
        for name in _LITERAL.findall(path.read_text()):
            found[name] = str(path.relative_to(ROOT))
    assert "rollout/reward_mean" in found and "perf/step_time" in found
    named = {name: f"perf/{name}_time" if name in phases else name for name in found}
    missing = {name: found[name] for name in found if f"`{named[name]}`" not in documented}
    assert missing == {}

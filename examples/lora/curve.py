"""Draw the held-out reward of runs as an SVG, from their metrics.jsonl.

python examples/lora/curve.py curve.svg "all weights=runs/x/grpo" "LoRA, rank 8=runs/x/lora"
"""

from __future__ import annotations

import html
import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 626, 16, 260
COLOURS = ("#9bb8e0", "#1f4e9c", "#c0392b", "#2e7d32")


def heldout_rewards(run_dir: Path) -> dict[int, float]:
    """Return the mean reward of each evaluation by the number of rollouts that were trained on."""
    rewards = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        for name, value in record.items():
            if name.startswith("eval/") and name.endswith("/reward"):
                rewards[record["rollout_id"] + 1] = value
    return rewards


def draw(runs: dict[str, dict[int, float]]) -> str:
    most = max(max(rewards) for rewards in runs.values())

    def x(rollouts: float) -> float:
        return LEFT + (RIGHT - LEFT) * rollouts / most

    def y(reward: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * reward

    lines = []
    for step in range(6):
        at = y(step / 5)
        lines.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        lines.append(_text(LEFT - 8, at + 4, f"{step / 5:g}", "end"))
        lines.append(_text(x(most * step / 5), BOTTOM + 18, f"{most * step / 5:g}"))
    lines.append(_text((LEFT + RIGHT) / 2, BOTTOM + 34, "rollouts"))
    for number, (label, rewards) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{x(n):.1f},{y(reward):.1f}" for n, reward in rewards.items())
        lines.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{points}"/>'
        )
        lines.append(_text(RIGHT - 8, BOTTOM - 12 - 18 * number, label, "end", colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    body = "\n".join([f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *lines])
    return f'{head} font-size="12">\n{body}\n</svg>\n'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "#555") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {where}>{html.escape(text)}</text>"


if __name__ == "__main__":
    named = dict(word.split("=", 1) for word in sys.argv[2:])
    curves = {label: heldout_rewards(Path(folder)) for label, folder in named.items()}
    Path(sys.argv[1]).write_text(draw(curves))
    for label, rewards in curves.items():
        print(f"{label}: " + ", ".join(f"{n} {reward:.2f}" for n, reward in rewards.items()))

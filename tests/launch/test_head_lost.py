"""The Ray head dies under a job that a run script follows: it is said, with how to continue."""

import json
import sys

# What becomes of `ray job submit`: it fails, or (a host that is off closes no connection) hears nothing more.
SUBMIT = """#!{python}
import json, os, signal, socket, sys, time
words = sys.argv[1:]
if words[:2] != ["job", "submit"]:
    os.execv({ray!r}, [{ray!r}, *words])
heads = [json.loads(line) for line in open(os.environ["CALLS"])]
os.kill(next(call["pid"] for call in heads if "--head" in call["words"]), signal.SIGKILL)
while True:  # until it is dead
    try:
        socket.create_connection(("127.0.0.1", int(os.environ["DASHBOARD_PORT"]))).close()
    except OSError:
        break
time.sleep(float(os.environ["SILENT_S"]))
sys.exit(1)
"""


def _lose_the_head(site, **settings: str) -> str:
    site.checkpoint("Qwen3-4B")
    real = site.commands / "ray"
    moved = real.rename(site.commands / "ray-that-works")
    site.command("ray", SUBMIT.format(python=sys.executable, ray=str(moved)))
    status, output = site.run("scripts/run-qwen3-4B.sh", **settings)
    assert status not in (0, 2), output
    return output


def _save_checkpoint(folder, rollout_id: int) -> None:
    checkpoint = folder / f"iter_{rollout_id:07d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "meta.json").write_text(json.dumps({}))


def test_the_job_fails(site):
    saved = site.folder / "base" / "Qwen3-4B_slime"  # --save and --load of the script
    _save_checkpoint(saved, 19)
    output = _lose_the_head(site, SILENT_S="0")
    head = f"http://127.0.0.1:{site.ports[1]}"
    assert f"the Ray head at {head} died or cannot be reached" in output
    assert f"The checkpoint after rollout 19 is in {saved}: the same command" in output


def test_the_job_is_heard_of_no_more(site):
    output = _lose_the_head(site, SILENT_S="400", HEAD_CHECK_S="0.1")
    assert "died or cannot be reached, and the job ended with it. Nothing had been saved" in output

"""The example notebook as it is, and the interrupt of a kernel that trains."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import slime
from tests.e2e import runs

nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel (Python >= 3.11)")

NOTEBOOK = runs.ROOT / "examples" / "notebook" / "train.ipynb"


@pytest.fixture
def kernel_env(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(runs.ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", "/nonexistent")  # no start-up files of this user


@pytest.mark.long
def test_the_notebook_trains_plots_inspects_and_goes_on(tmp_path: Path, kernel_env):
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "clear the outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    started = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    print(f"executed in {time.monotonic() - started:.0f} s")
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    texts = "".join(o.get("text", "") for o in outputs)
    assert "Traceback" not in texts
    rows = [row for row in slime.load_run(tmp_path / "run").metrics if row["rollout_id"] >= 0]
    rewards = [row["rollout/reward_mean"] for row in rows]
    # Ten of 320 tokens are digits: an untrained model has 0.03. The loop went on from rollout 5.
    assert rewards[0] < 0.15 and max(rewards) > 0.4 and len(rewards) > 5


INTERRUPTED = """
import slime
rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)]
run = slime.train(
    MODEL, rows, lambda sample: len(sample.response), run_dir="run", train_backend="fsdp",
    num_rollout=500, rollout_batch_size=4, n_samples_per_prompt=4, rollout_max_response_len=8,
    actor_num_gpus_per_node=1, rollout_num_gpus=1,
)
"""


def test_the_interrupt_of_a_kernel_saves_and_returns_the_run(tiny_model, tmp_path, kernel_env):
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        client.execute(INTERRUPTED.replace("MODEL", repr(str(tiny_model))))
        run_dir, deadline = tmp_path / "run", time.monotonic() + 200
        while not (run_dir / "metrics.jsonl").exists() or len(runs.metrics(run_dir, "train")) < 2:
            assert time.monotonic() < deadline and manager.is_alive()
            time.sleep(0.2)
        manager.interrupt_kernel()  # to the kernel's process group, as Jupyter's button does
        assert client.get_shell_msg(timeout=100)["content"]["status"] == "ok"
        reply = client.execute_interactive(
            "import json, pathlib; pathlib.Path('seen').write_text(json.dumps([run.exit_status, "
            "len(run.checkpoints), run.model.is_dir()]))",
            timeout=60,
        )
        assert reply["content"]["status"] == "ok"
        assert json.loads((tmp_path / "seen").read_text()) == [130, 1, True]
        assert not _left_over(run_dir)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _left_over(run_dir: Path) -> list[str]:
    """Return the command lines of processes that belong to the run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(run_dir) in words and int(process.name) != os.getpid():
            found.append(words)
    return found

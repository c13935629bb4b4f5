"""Configurations that cannot work are refused before anything starts, with one sentence that helps."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.flags.registry import all_flags
from slime.core.errors import ConfigError
from tests.wrong_configurations import DOCUMENT, TABLES, configure, document, refusal

ROOT = Path(__file__).parents[2]
ROWS = [row for rows in TABLES.values() for row in rows]
OPTIONS = {option for flag in all_flags().values() for option in (*flag.options, *flag.off_options)}
# Words of the sentence that say where the mistake is, for rows where that is not a flag that was typed.
_MEANT = {"--tensor-parallel-size": "--tensor-model-parallel-size"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_refused_with_one_sentence_that_names_the_flags(row):
    with pytest.raises(ConfigError) as error:
        configure(row.flags, row)
    sentence = str(error.value)
    assert error.value.exit_status == 2
    assert "\n" not in sentence and len(sentence) < 320
    named = set(re.findall(r"--[a-z0-9-]+", sentence))
    typed = {word for word in shlex.split(row.flags) if word.startswith("--")}
    assert named & {*typed, *(_MEANT.get(option, option) for option in typed)}, sentence
    assert named - OPTIONS <= {"--tensor-parallel-size", "--local-dir"}, sentence


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what)
def test_its_neighbour_is_accepted(row):
    configure(row.right, row, offline=True)


def test_the_first_is_the_single_node_job_of_the_guide():
    sentence = refusal(ROWS[0])
    assert "16 GPUs (8 for training, 8 beside them for rollout)" in sentence
    assert "this machine has 8" in sentence and "add --colocate" in sentence


def test_all_are_different_and_enough():
    assert len(ROWS) >= 25
    assert len({row.flags for row in ROWS}) == len(ROWS)


def test_document_says_what_slime_says():
    assert DOCUMENT.read_text() == document(), "write it anew: python -m tests.wrong_configurations"


def test_nothing_is_started_and_the_status_is_2(tmp_path):
    """As typed: train.py ends before it has imported Ray or torch."""
    program = (
        "import sys, train\n"
        "status = train.main(sys.argv[1:])\n"
        "heavy = {'ray', 'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(status if not heavy else f'imported {heavy}')\n"
    )
    words = "--hf-checkpoint /tmp --num-rollout 1 --rollout-batch-size 4 --global-batch-size 3"
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split(), "--run-dir", str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("slime: --rollout-batch-size 4") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()

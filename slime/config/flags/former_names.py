"""What to type instead of options that other versions of slime, Megatron or SGLang have and this one does not.

The text completes "there is no flag NAME: ..." and is asked before any similar name is suggested. An option
that can be honoured belongs among the flags, not here.
"""

from __future__ import annotations

FORMER_NAMES: dict[str, str] = {
    "--tensor-parallel-size": "use --tensor-model-parallel-size",
    "--pipeline-parallel-size": "use --pipeline-model-parallel-size",
    "--expert-parallel-size": "use --expert-model-parallel-size",
    "--no-check-for-nan-in-loss-and-grad": "use --no-check-for-nan-in-grad",
    "--sglang-router-request-timeout-secs": "use --router-request-timeout-secs",
    "--dump-details": "use --save-debug-rollout-data PATH for the samples of every rollout",
    "--ci-test": "remove it: it is a check of another test suite",
}

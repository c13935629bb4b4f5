"""A user's script: `python api_script.py MODEL RUN_DIR`; its functions exist in __main__ alone."""

import json
import sys

import slime

BONUS = 0.25
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]


def digits(sample):
    return sum(c.isdigit() for c in sample.response) / 8


async def bonus(args, sample):
    return BONUS if args.run_dir and sample.label.isdigit() else None


def answered(completions, answer, **columns):
    """As TRL calls it."""
    return [float(a in c) for c, a in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    assert "torch" not in sys.modules and "ray" not in sys.modules
    run = slime.train(
        sys.argv[1], ROWS, [digits, bonus, answered, lambda s: 0.5 * (s.metadata["answer"] == "0")],
        run_dir=sys.argv[2], train_backend="fsdp", num_rollout=int(sys.argv[3]), rollout_batch_size=4,
        n_samples_per_prompt=4, global_batch_size=16, rollout_max_response_len=8, lr=1e-3,
        use_dynamic_batch_size=True, max_tokens_per_gpu=128, actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
    )  # fmt: skip
    assert "torch" not in sys.modules
    print(json.dumps({"status": run.exit_status, "rollouts": len(run.metrics)}))

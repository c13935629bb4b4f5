"""Three roles of one model on each prompt: a solver answers, a critic comments, a reviser answers again.

Each role is a segment of its own, with its own prompt, all trained on. The segments share `rollout_id`,
over which the loss is averaged, so that a trajectory of three segments weighs as much as one of one.
The reviser's answer is graded; the critic shares its reward, the solver is graded for its own.
"""

from __future__ import annotations

from slime.rollout.rm_hub import async_rm
from slime.rollout.sglang_rollout import generate as one_turn
from slime.utils.data import encode_prompt
from slime.utils.tokenizer import load_tokenizer
from slime.utils.types import Sample, Status

CRITIC = "{question}\n\nA student answered:\n{answer}\n\nName the mistakes, if there are any."
REVISER = "{question}\n\nFirst answer:\n{answer}\n\nComments:\n{comments}\n\nGive the final answer."


async def generate(args, sample: Sample, sampling_params: dict) -> list[Sample]:
    question = sample.metadata.get("question") or sample.prompt
    solver = await one_turn(args, sample, sampling_params)
    if solver.status == Status.ABORTED:
        return [solver]
    critic = segment(args, sample, CRITIC.format(question=question, answer=solver.response))
    critic = await one_turn(args, critic, sampling_params)
    text = REVISER.format(question=question, answer=solver.response, comments=critic.response)
    reviser = await one_turn(args, segment(args, sample, text), sampling_params)
    segments = [solver, critic, reviser]
    if any(one.status == Status.ABORTED for one in segments):
        reviser.status = (
            Status.ABORTED
        )  # the group starts over: parts of a trajectory are of no use
        return segments
    solver.reward = await async_rm(args, solver)
    critic.reward = reviser.reward = await async_rm(args, reviser)
    for one, role in zip(segments, ("solver", "critic", "reviser"), strict=True):
        one.train_metadata = {"role": role}
    return segments


def segment(args, sample: Sample, text: str) -> Sample:
    """A fresh sample of the same trajectory with another prompt."""
    tokenizer = load_tokenizer(args.hf_checkpoint)
    if args.apply_chat_template:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **args.apply_chat_template_kwargs
        )
    fresh = sample.clone()
    fresh.prompt, fresh.response, fresh.response_length, fresh.weight_versions = text, "", 0, []
    fresh.loss_mask = fresh.rollout_log_probs = fresh.reward = None
    fresh.status = Status.PENDING
    fresh.tokens = encode_prompt(tokenizer, text, rendered=args.apply_chat_template)
    return fresh

"""TRL's side of vs_trl_cpu.py and step_gpu.py; run by them, with the packages of TRL's own environment.

usage: python trl_side.py CKPT DATA.jsonl --lengths 64|mixed|128-1024 --steps 3 --micro-batch 128 [--cuda] [--vllm]

With --vllm generation is TRL's colocated vLLM instead of transformers'. The clock runs from the end of one step to the end of the next, so data loading, rewards and logging
are inside it. The first step is warm-up. Prints one line of JSON.
"""

import argparse
import json
import os
import tempfile
import time
from copy import copy
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
import trl  # pyright: ignore[reportMissingImports]
from arithmetic import longest_response, response_length, score
from datasets import load_dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class EndAt(LogitsProcessor):
    """Rows end by themselves: no end-of-text before their own length, nothing else at it."""

    def __init__(
        self, prompt_width: int, lengths: list[int], eos_id: int, device: torch.device
    ) -> None:
        self.last = prompt_width + torch.tensor(lengths, device=device) - 1
        self.eos_id = eos_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends = input_ids.shape[1] >= self.last
        end_scores = scores[:, self.eos_id].clone()
        scores = scores.masked_fill(ends[:, None], float("-inf"))
        scores[:, self.eos_id] = torch.where(ends, end_scores, float("-inf"))
        return scores


class LengthControl:
    """Stands in for `model.generate`, adding the length each sample of the run is to have."""

    def __init__(self, generate, lengths: str, eos_id: int) -> None:
        self.generate, self.lengths, self.eos_id = generate, lengths, eos_id
        self.num_samples = self.num_tokens = 0

    def __call__(self, *args, **kwargs):
        rows, width = kwargs["input_ids"].shape
        indices = range(self.num_samples, self.num_samples + rows)
        wanted = [response_length(self.lengths, index) for index in indices]
        self.num_samples += rows
        self.num_tokens += sum(wanted)
        processor = EndAt(width, wanted, self.eos_id, kwargs["input_ids"].device)
        output = self.generate(*args, logits_processor=LogitsProcessorList([processor]), **kwargs)
        assert output.shape[1] - width == max(wanted), "a row did not end at its length"
        return output


class VllmLengths:
    """Stands in for `LLM.generate` of vLLM, with the length of each sample in its own parameters."""

    def __init__(self, generate, lengths: str) -> None:
        self.generate, self.lengths, self.num_samples = generate, lengths, 0

    def __call__(self, prompts, sampling_params, **options):
        own = []
        for index in range(self.num_samples, self.num_samples + len(prompts)):
            params = copy(sampling_params)
            params.max_tokens, params.ignore_eos = response_length(self.lengths, index), True
            own.append(params)
        self.num_samples += len(prompts)
        outputs = self.generate(prompts, sampling_params=own, **options)
        found = [len(output.outputs[0].token_ids) for output in outputs]
        assert found == [params.max_tokens for params in own], "a row did not end at its length"
        return outputs


class StepClock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.ends.append(time.perf_counter())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("ckpt")
    parser.add_argument("data")
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--samples-per-prompt", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--cuda", action="store_true", help="one GPU, bf16 with fp32 weights")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM on the same GPU")
    return parser.parse_args()


def reward(completions, label, **_):
    return [score(c, y) for c, y in zip(completions, label, strict=True)]


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    completions = args.prompts * args.samples_per_prompt
    tokenizer = AutoTokenizer.from_pretrained(args.ckpt)
    model: Any = AutoModelForCausalLM.from_pretrained(args.ckpt, dtype=torch.float32)
    model.generate = LengthControl(model.generate, args.lengths, tokenizer.eos_token_id)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            max_steps=1 + args.steps,
            per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=completions // args.micro_batch,
            num_generations=args.samples_per_prompt,
            max_completion_length=longest_response(args.lengths),
            temperature=1.0,
            beta=0.0,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            use_cpu=not args.cuda,
            bf16=args.cuda,
            fp16=False,
            gradient_checkpointing=False,
            use_vllm=args.vllm,
            vllm_max_model_length=256 + longest_response(args.lengths) if args.vllm else None,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,
            args=config,
            train_dataset=load_dataset("json", data_files=args.data, split="train"),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        if args.vllm:
            llm = trainer.vllm_generation.llm
            llm.generate = VllmLengths(llm.generate, args.lengths)
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    means = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    result = {
        "step_seconds": [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)],
        "mean_response_lengths": means[1:],
        "rewards": rewards,
        "versions": f"trl {trl.__version__} transformers {transformers.__version__} torch {torch.__version__}",
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()

"""Speeds of one rollout, from its times and token counts; docs/metrics.md says what each one means."""

from __future__ import annotations

from collections.abc import Mapping

TRAIN_FLOPS = "perf/train_flops"  # what train_flops() counts, over all ranks


def throughput_metrics(
    metrics: Mapping[str, float], *, num_gpus: int, train_gpus: int, peak_flops: float | None
) -> dict[str, float]:
    """The speeds that the given metrics of a rollout allow to say.

    1,000 response tokens in a step of 4 s on 2 GPUs: perf/tokens_per_second is 250 and
    perf/tokens_per_gpu_per_second 125. On a CPU "GPU" means process, and there is no MFU.
    """
    rates: dict[str, float] = {}
    step, train = metrics.get("perf/step_time"), metrics.get("perf/train_time")
    if step and "rollout/tokens" in metrics:
        rates["perf/tokens_per_second"] = metrics["rollout/tokens"] / step
        rates["perf/tokens_per_gpu_per_second"] = metrics["rollout/tokens"] / step / num_gpus
    if train and "perf/train_tokens" in metrics:
        rates["perf/train_tokens_per_second"] = metrics["perf/train_tokens"] / train
    if train and TRAIN_FLOPS in metrics:
        per_gpu = metrics[TRAIN_FLOPS] / train / train_gpus
        rates["perf/train_tflops_per_gpu"] = per_gpu / 1e12
        if peak_flops:
            rates["perf/mfu"] = per_gpu / peak_flops
    return rates

"""Command lines of published run scripts and launchers: the model of each and the flags that set it apart.

A row is: name | model, a name of scripts/models or type:MODEL_TYPE | flags, in braces those of GROUPS.
"""

from __future__ import annotations

GROUPS = {
    "ci": "--ci-test",
    "sp": "--sequence-parallel",
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "moe": "--moe-permute-fusion --moe-router-dtype fp32",
    "sft": "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
    "--debug-train-only --disable-compute-advantages-and-returns",
    "next": "--spec slime_plugins.models.FAMILY get_spec --use-gated-attention",
    "glm4": "--spec slime_plugins.models.glm4 get_glm_spec",
    "ppo": "--advantage-estimator ppo --megatron-config-path ROLES",
    "delta": "--update-weight-mode delta --update-weight-delta-encoding xor "
    "--update-weight-local-checkpoint-dir /tmp/weights",
    "mtp": "--enable-mtp-training --mtp-num-layers 1",
    "opd": "--use-opd --opd-kl-coef 1.0",
    "engines": "--sglang-config ENGINES",
    "async": "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "fp8": "--fp8-format e4m3 --fp8-recipe blockwise",
}

SCRIPTS = """
coding_agent_rl/run_qwen36_35b_a3b_swe_8nodes | type:qwen3_5_moe_text | {next}
delta_weight_sync/run-glm4.7-30B-A3B-delta | glm4.7-30B-A3B | --no-position-embedding {delta}
eval_multi_task/multi_task | qwen3-4B | --eval-interval 5 --eval-config EVAL
fully_async/run-qwen2.5-0.5B-fully_async | qwen2.5-0.5B | {async} {sp}
fully_async/run-qwen3.5-9B-fully_async | type:qwen3_5_text | {next}
geo3k_vlm/run_geo3k_qwen35 | type:qwen3_5_moe_text | --multimodal-keys {"image":"images"}
multi_agent/run-qwen3-30B-A3B-multi-agent | qwen3-30B-A3B | {tp2} {moe}
on_policy_distillation/run-qwen3-8B-opd-megatron | qwen3-8B | {opd} --opd-type megatron --opd-teacher-load MODEL
on_policy_distillation/run-qwen3-8B-opd | qwen3-8B | {opd} --opd-type sglang --rm-url http://127.0.0.1:1
retool/retool_qwen3_4b_rl | qwen3-4B | {tp2}
retool/retool_qwen3_4b_sft | qwen3-4B | {sft} {sp}
search-r1/run_qwen2.5_3B | qwen2.5-3B | {tp2}
strands_sglang/strands_qwen3_8b | qwen3-8B | {tp2}
tau-bench/run_qwen3_4B | qwen3-4B | {tp2}
train_infer_mismatch_helper/run-qwen3-4b-mis | qwen3-4B | --use-tis --custom-config-path HOOKS
low_precision/run-kimi-k2-Thinking-int4 | int4:kimi-k2-thinking | --no-check-for-nan-in-loss-and-grad {moe}
low_precision/run-moonlight-16B-A3B-int4 | int4:moonlight | {moe}
low_precision/run-qwen3-235B-A22B-int4 | int4:qwen3-235B-A22B | --no-check-for-nan-in-loss-and-grad {moe}
low_precision/run-qwen3-30B-A3B-int4 | int4:qwen3-30B-A3B | --eval-interval 5 --eval-prompt-data DATA {moe}
low_precision/run-qwen3-30b-a3b-fp8 | qwen3-30B-A3B | {sp} {moe} {fp8}
low_precision/run-qwen3-4b-fp8 | qwen3-4B | {tp2} {fp8}
run-deepseek-r1 | deepseek-v3 | {moe} --expert-model-parallel-size 8
run-glm4-9B | glm4-9B | {glm4} {tp2}
run-glm4.7-30B-A3B | glm4.7-30B-A3B | --no-position-embedding {mtp}
run-glm4.7-355B-A32B | glm4.7-355B-A32B | {moe} --tensor-model-parallel-size 8 --sequence-parallel
run-glm5-744B-A40B | type:glm_moe_dsa | --no-position-embedding --data-pad-size-multiplier 4096
run-glm5.2-744B-A40B | type:glm_moe_dsa | --no-check-for-nan-in-loss-and-grad {engines}
run-kimi-k2-Instruct | kimi-k2 | {moe}
run-kimi-k2-Thinking | kimi-k2-thinking | {moe}
run-mimo-7B-rl-eagle | mimo-7B-rl | {mtp}
run-minimax-m2 | type:minimax_m2 | --spec slime_plugins.models.minimax_m2 get_spec
run-moonlight-16B-A3B | moonlight | --moe-router-num-groups 1 --moe-router-group-topk 1 --mscale-all-dim 1.0 {moe}
run-qwen2.5-0.5B-gb10-smoke | qwen2.5-0.5B | --actor-num-gpus-per-node 1
run-qwen2.5-0.5B-reproducibility | qwen2.5-0.5B | {sp} --sglang-enable-deterministic-inference
run-qwen3-235B-A22B-sft | qwen3-235B-A22B | {sft} {moe} {tp2}
run-qwen3-235B-A22B | qwen3-235B-A22B | {moe} {tp2}
run-qwen3-30B-A3B | qwen3-30B-A3B | {moe} {tp2}
run-qwen3-32B | qwen3-32B | {tp2}
run-qwen3-4B-amd | qwen3-4B | {tp2}
run-qwen3-4B-base-sft | qwen3-4B | {sft} {sp}
run-qwen3-4B | qwen3-4B | {tp2}
run-qwen3-next-80B-A3B | type:qwen3_next | {next}
run-qwen3.5-27B | type:qwen3_5_text | {next}
run-qwen3.5-35B-A3B-sft | type:qwen3_5_moe_text | {next} {sft} --loss-mask-type qwen3_5
rollout_buffer/rollout_buffer_example | qwen3-4B | --ref-micro-batch-size 1 --rollout-buffer-url http://127.0.0.1:8889 --keep-old-actor --rollout-function-path my.generate
test_gspo | qwen3-4B | {tp2} --advantage-estimator gspo
"""

LAUNCHERS = """
run_geo3k_vlm_multi_turn | type:qwen3_5_moe_text | {next} --multimodal-keys {"image":"images"}
test_full_disk_weight_update | type:qwen3_5_text | {next} {ci} --update-weight-mode full
test_glm4.7_30B_A3B_pd_mooncake | glm4.7-30B-A3B | --no-position-embedding {ci}
test_mimo_7B_mtp_only_grad | mimo-7B-rl | {mtp} {ci} --ci-disable-kl-checker
test_moonlight_16B_A3B | moonlight | {ci} {moe}
test_moonlight_16B_A3B_r3 | moonlight | {ci} {moe} --use-rollout-routing-replay
test_quick_start_glm4_9B | glm4-9B | {glm4} {ci} {tp2}
test_qwen2.5_0.5B_async_short | qwen2.5-0.5B | {ci} {sp}
test_qwen2.5_0.5B_debug_rollout_then_train | qwen2.5-0.5B | {sp} --debug-rollout-only
test_qwen2.5_0.5B_debug_rollout_then_train#1 | qwen2.5-0.5B | {ci} {sp}
test_qwen2.5_0.5B_debug_train_dump_e2e | qwen2.5-0.5B | {ci} --dump-details /tmp/details
test_qwen2.5_0.5B_fanout_short | qwen2.5-0.5B | {ci} {sp}
test_qwen2.5_0.5B_fully_async_short | qwen2.5-0.5B | {ci} {async} {sp}
test_qwen2.5_0.5B_opd_sglang | qwen2.5-0.5B | {ci} {opd} --opd-type sglang --rm-url http://127.0.0.1:1 --rollout-temperature 0.8
test_qwen2.5_0.5B_sglang_config | qwen2.5-0.5B | {ci} {sp} {engines}
test_qwen2.5_0.5B_sglang_config_distributed | qwen2.5-0.5B | {ci} {sp} {engines}
test_qwen2.5_0.5B_short | qwen2.5-0.5B | {ci} {sp}
test_qwen3.5_0.8B_gsm8k_async_short | type:qwen3_5_text | {next} {ci}
test_qwen3.5_0.8B_gsm8k_short | type:qwen3_5_text | {next} {ci} --rollout-data-transport ray
test_qwen3.6_35B_A3B_pd_mooncake | type:qwen3_5_moe_text | {next} {ci} --prefill-num-servers 1
test_qwen3_0.6B_parallel_check | qwen3-0.6B | {ci} --ci-save-grad-norm /tmp/norms.json
test_qwen3_0.6B_parallel_check#1 | qwen3-0.6B | {ci} {sp} --ci-load-grad-norm /tmp/norms.json
test_qwen3_30B_A3B | qwen3-30B-A3B | {ci} {moe} {tp2}
test_qwen3_30B_A3B_r3 | qwen3-30B-A3B | {ci} {moe} {tp2} --rollout-data-transport ray --use-rollout-routing-replay
test_qwen3_4B_ckpt | qwen3-4B | {ci} {tp2}
test_qwen3_4B_external_pd | qwen3-4B | {ci} {delta} --rollout-external-engine-addrs 127.0.0.1:1
test_qwen3_4B_ppo | qwen3-4B | {ci} {ppo}
test_qwen3_4B_ppo_disaggregate | qwen3-4B | {ci} {ppo} --rollout-data-transport ray
test_qwen3_4B_ppo_train_critic_only | qwen3-4B | {ci} {ppo} --num-critic-only-steps 1
test_qwen3_4B_streaming_partial_rollout | qwen3-4B | {ci} --partial-rollout
test_release_train | type:qwen3_5_text | {next} {ci} --release-train
test_sglang_config_mixed_offload | qwen2.5-0.5B | {ci} {sp} {engines}
test_sglang_config_mixed_offload_ft | qwen2.5-0.5B | {ci} {sp} {engines}
"""

# What all of them have, and the files that flags name.
COMMON = """
--prompt-data DATA --input-key input --label-key label --apply-chat-template --rollout-shuffle
--num-rollout 3 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024
--rollout-temperature 1 --global-batch-size 256 --balance-data --rm-type math --use-dynamic-batch-size
--max-tokens-per-gpu 4096 --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1
--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --colocate
--attention-softmax-in-fp32 --attention-backend flash --rollout-engine sglang --actor-num-gpus-per-node 8
"""
FILES = {
    "EVAL": "eval:\n  datasets:\n    - {name: a, path: DATA, n_samples_per_eval_prompt: 4}\n",
    "ROLES": "critic: {lr: 1.0e-5}\n",
    "HOOKS": "tis_mode_of_mine: mask\n",
    "ENGINES": "sglang:\n  - name: actor\n    server_groups:\n"
    "      - {worker_type: regular, num_gpus: 8, num_gpus_per_engine: 1}\n",
}


def rows(block: str) -> list[tuple[str, str, list[str]]]:
    found = []
    for line in block.strip().splitlines():
        name, model, flags = (part.strip() for part in line.split(" | "))
        words = [w for f in flags.split() for w in GROUPS.get(f.strip("{}") or "-", f).split()]
        found.append((name, model, words))
    return found

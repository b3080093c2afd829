"""How far each argument and field of TRL's trainer works in a run: the tables of docs/trl.md.

A row names fields, their state and the tests that train with them, without `tests/`. Fields that `foreign_keys`
refuses, and those that no row names, are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from grpo_orch.orchestrator.config.foreign_keys import REFUSED_GRPO, grpo_table


class Row(NamedTuple):
    names: str  # separated by spaces
    state: str
    details: str = ""


ARGUMENTS = (
    Row(
        "model",
        "works",
        "`trainer.model`, a folder or a name on the hub: `node/trainer/test_trainer.py::test_run_completes`",
    ),
    Row(
        "reward_funcs",
        "works",
        "functions, also async ones, and those in [rewards.md](rewards.md). Each is called once before "
        "rollouts are requested: `node/trainer/starting/test_preflight.py::test_rewards_of_every_form_pass`. "
        "A name with a `/` is a reward model, a folder or on the hub; without a trained head it is refused: "
        "`node/features/test_settings.py::test_a_model_judges`",
    ),
    Row(
        "reward_processing_classes",
        "no key",
        "a reward model's folder brings its own",
    ),
    Row(
        "args",
        "works",
        "`grpo`, see below",
    ),
    Row(
        "train_dataset",
        "works",
        "prompts are texts or chats: `node/trainer/starting/test_user_data.py`. The first attempt ends for "
        "images (nodes get only text), fewer rows than a batch has prompts, and chats without a chat "
        "template: "
        "`node/trainer/starting/test_preflight.py::test_data_that_no_step_can_be_made_of_end_the_first_attempt`",
    ),
    Row(
        "eval_dataset",
        "works",
        "`node/trainer/test_resume.py::test_killed_trainer_ends_in_the_same_weights`",
    ),
    Row(
        "peft_config",
        "works",
        "only LoRA, `trainer.peft`: `node/trainer/test_resume.py::test_killed_trainer_ends_in_the_same_weights`",
    ),
    Row(
        "quantization_config",
        "no key",
        "refused with rollout nodes in `model_init_kwargs` and in the model's config.json: engines cannot "
        "update quantised weights in place",
    ),
    Row(
        "processing_class",
        "no key",
        "the model's own, as on the nodes; to change the tokenizer, copy the model's folder",
    ),
    Row(
        "callbacks",
        "no key",
        "the run uses its own, which watch, save and publish",
    ),
    Row(
        "optimizers",
        "no key",
        "set `optim` and `lr_scheduler_type` in `grpo`",
    ),
    Row(
        "tools",
        "works",
        "`trainer.tools`, import paths, in chats: "
        "`node/features/test_turns.py::test_tools_alone_and_a_function_of_ones_own`",
    ),
    Row(
        "rollout_func",
        "works",
        "`trainer.rollout_func`, an import path. Completions from `trainer.vllm_generation.generate` come "
        "from the nodes and are stored; data from other sources is not. An [agent](agents.md) replaces this "
        "argument: `node/features/test_turns.py::test_tools_alone_and_a_function_of_ones_own`",
    ),
    Row(
        "environment_factory",
        "works",
        "`trainer.environment_factory`, the import path of a class, a function or a mapping of them by name, "
        "tried on the first row before rollouts are requested: "
        "`node/features/test_turns.py::test_trainer_killed_between_turns_ends_in_the_same_weights`; "
        "in several processes: "
        "`node/features/test_turns.py::test_several_processes_ask_for_what_one_asks_for`",
    ),
)
FIELDS = (
    Row(
        "num_generations per_device_train_batch_size max_completion_length max_steps learning_rate "
        "lr_scheduler_type beta bf16 use_cpu save_steps gradient_checkpointing",
        "works",
        "`node/trainer/test_trainer.py::test_run_completes`",
    ),
    Row(
        "num_iterations steps_per_generation eval_steps per_device_eval_batch_size",
        "works",
        "`node/trainer/test_resume.py::test_killed_trainer_ends_in_the_same_weights`",
    ),
    Row(
        "gradient_accumulation_steps",
        "works",
        "`node/trainer/test_memory.py::test_less_memory_makes_the_same_step`",
    ),
    Row(
        "optim",
        "works",
        "`adamw_torch`, `adafactor`, `sgd`, `rmsprop`, `adagrad`: "
        "`node/features/test_settings.py::test_a_setting_changes_what_is_trained`. Optimizers from other "
        "packages: untried",
    ),
    Row(
        "loss_type",
        "works",
        "`grpo`, `dr_grpo`, `dapo` (the default): "
        "`node/trainer/test_memory.py::test_less_memory_makes_the_same_step`; `bnpo`, `cispo`, `sapo`, "
        "`luspo`, `vespo`: `node/features/test_settings.py::test_a_setting_changes_what_is_trained`. `vespo` "
        "needs `vllm_importance_sampling_mode` `token_truncate` or `token_mask`",
    ),
    Row(
        "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
        "works",
        "`node/trainer/test_requested_end.py::test_stop_request_loses_no_step`; refused with LoRA, without "
        "`beta`, and for a sharded reference model",
    ),
    Row(
        "epsilon reward_weights warmup_steps",
        "works",
        "`node/trainer/test_divergence.py::test_diverging_run_exits_with_its_code_and_one_line`",
    ),
    Row(
        "temperature top_p top_k min_p repetition_penalty",
        "works",
        "`node/rollout/test_vllm_sampling.py`",
    ),
    Row(
        "logging_steps",
        "works",
        "`node/trainer/test_divergence.py::test_nan_weights_diverged_at_the_step_that_made_them`",
    ),
    Row(
        "shuffle_dataset max_grad_norm",
        "works",
        "`node/trainer/starting/test_refused.py::test_a_refused_prompt_leaves_the_step_to_the_others`",
    ),
    Row(
        "generation_kwargs",
        "works",
        "except `seed`, which is refused: "
        "`node/trainer/starting/test_preflight.py::test_users_mistakes_are_named`",
    ),
    Row(
        "eval_strategy seed generation_batch_size num_generations_eval fp16 scale_rewards num_train_epochs "
        "eval_on_start do_eval",
        "checked",
        "`node/test_config_tables.py::test_trl_accepts_what_we_accept`",
    ),
    Row(
        "report_to",
        "works",
        "see [Trackers](#trackers). Tests: "
        "`node/trainer/starting/test_preflight.py::test_missing_package_ends_the_first_attempt`, "
        "`node/trainer/test_reports.py::test_service_that_fails_later_is_disabled`, "
        "`node/trainer/starting/test_preflight.py::test_each_timeline_is_one_run_of_the_sinks`, "
        "`node/trainer/test_reports.py::test_restarted_trainer_resumes_the_mlflow_run`, "
        "`node/trainer/test_reports.py::test_tensorboard_has_every_step_after_a_killed_trainer`. The servers "
        "of W&B and trackio: untried",
    ),
    Row(
        "log_completions log_unique_prompts num_completions_to_print",
        "works",
        "tables are in `reports/completions` on the trainer's machine: "
        "`node/trainer/starting/test_preflight.py::test_completions_table_is_written_next_to_the_spool`",
    ),
    Row(
        "deepspeed fsdp fsdp_config accelerator_config ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb "
        "ddp_find_unused_parameters ddp_static_graph ddp_timeout ds3_gather_for_generation",
        "works",
        "several processes, `trainer.accelerate`: `node/ranks/test_killed.py` (with ZeRO-3; the others: `make "
        "bench-ranks`), `node/ranks/test_world_size_change.py`. FSDP2, ZeRO-3 and ZeRO-2 with CPU offload of "
        "the optimizer resume bit for bit, on CPUs: `node/ranks/test_divided_resume.py`; publishing of "
        "sharded weights: `node/ranks/test_divided.py`. FSDP1 is refused. GPUs and NCCL: untried. DeepSpeed needs "
        "`pip install deepspeed` in `trainer.setup`. Its CPU optimizer needs g++ and on GPUs CUDA's toolkit",
    ),
    Row(
        "use_liger_kernel liger_kernel_config",
        "untried",
        "its kernels need a GPU; if it is not installed, the first attempt ends: "
        "`node/trainer/starting/test_preflight.py::test_missing_package_ends_the_first_attempt`",
    ),
    Row(
        "router_aux_loss_coef",
        "trains",
        "`node/features/test_settings.py::test_a_mixture_of_experts_is_published_as_it_is_loaded`, "
        "`node/rollout/test_canary.py::test_experts_are_reloaded_as_they_are_loaded_first`. On GPUs: untried",
    ),
    Row(
        "chat_template_kwargs",
        "works",
        "`node/features/test_settings.py::test_a_template_is_told_what_the_run_says`",
    ),
    Row(
        "model_init_kwargs",
        "works",
        "`dtype`, `attn_implementation`: "
        "`node/features/test_settings.py::test_a_setting_changes_what_is_trained`; quantised: see above",
    ),
    Row(
        "cast_lm_head_to_fp32 trust_remote_code disable_dropout use_cache",
        "works",
        "`node/features/test_settings.py::test_a_setting_leaves_the_weights_as_they_are`",
    ),
    Row(
        "max_tool_calling_iterations",
        "works",
        "`node/features/test_turns.py::test_environment_is_trained_turn_by_turn`",
    ),
    Row(
        "vllm_structured_outputs_regex",
        "untried",
        "tried manually on vLLM 0.32's CPU build; a completion whose node is lost starts over. Refused with "
        "`rollout.replicas: 0`",
    ),
    Row(
        "delta epsilon_high importance_sampling_level mask_truncated_completions top_entropy_quantile "
        "off_policy_mask_threshold use_bias_correction_kl sapo_temperature_neg sapo_temperature_pos "
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg entropy_coef use_adaptive_entropy "
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "works",
        "`node/features/test_settings.py::test_a_setting_changes_what_is_trained`; state of adaptive "
        "coefficients, across a restart: "
        "`node/trainer/test_resume.py::test_killed_trainer_ends_in_the_same_weights`",
    ),
    Row(
        "multi_objective_aggregation",
        "works",
        "`node/features/test_settings.py::test_rewards_are_normalized_before_they_are_summed`",
    ),
    Row(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min",
        "works",
        "TRL's defaults: `node/trainer/test_trainer.py::test_completions_come_from_the_trainers_own_weights`; "
        "other values: `node/features/test_settings.py::test_a_setting_changes_what_is_trained`",
    ),
    Row(
        "vllm_importance_sampling_cap",
        "untried",
        "TRL's older name of `vllm_importance_sampling_clip_max`",
    ),
    Row(
        "weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_kwargs neftune_noise_alpha",
        "works",
        "`node/features/test_settings.py::test_a_setting_changes_what_is_trained`",
    ),
    Row(
        "gradient_checkpointing_kwargs dataloader_num_workers dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_pin_memory dataloader_drop_last include_num_input_tokens_seen "
        "torch_empty_cache_steps logging_first_step logging_nan_inf_filter log_level disable_tqdm",
        "works",
        "`node/features/test_settings.py::test_a_setting_leaves_the_weights_as_they_are`; with workers, "
        "across a restart: `node/trainer/test_resume.py::test_killed_trainer_ends_in_the_same_weights`",
    ),
    Row(
        "label_smoothing_factor label_names prediction_loss_only include_for_metrics batch_eval_metrics "
        "eval_do_concat_batches save_on_each_node log_on_each_node",
        "no effect",
        "for trainers with labels, metrics or several machines",
    ),
)


def field_rows() -> Iterator[Row]:
    """Yield the rows of all fields: those above, then the refused ones, then all others as untried."""
    known = grpo_table().keys
    named = [name for row in FIELDS for name in row.names.split()]
    if wrong := {name for name in named if name not in known or name in REFUSED_GRPO or named.count(name) > 1}:
        raise ValueError(f"docs/trl_fields.py: unknown to TRL, refused or twice: {', '.join(sorted(wrong))}")
    yield from FIELDS
    yield Row(" ".join(REFUSED_GRPO), "refused", "[the reasons](run-yaml.md#grpo)")
    untried = [name for name in known if name not in {*named, *REFUSED_GRPO}]
    yield Row(" ".join(untried), "untried", "passed to TRL unchanged")

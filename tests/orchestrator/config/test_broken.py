"""Broken files and what is said about each: one line a problem, with file, line, key, what was expected."""

# ruff: noqa: E501  # what is printed stands here whole, to be found by searching for it

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.config.load import ConfigError, load, load_spec, load_storage
from policies.model.gpus import DriverFailed
from tests.generators.config_world import VALID, changed, furnish

DROP = VALID[VALID.index("rehearse:") :]
GRPO = "  beta: 0.02"

# what it shows, changes to the valid file, the lines that are printed
BROKEN: list[tuple[str, list[tuple[str, str]], list[str]]] = [
    (
        "unknown key",
        [("replicas: 2", "replica: 2"), (DROP, "")],
        [
            'run.yaml:16: rollout.replica: unknown key; expected one of deadline_s, env, recovery, replicas, resources, setup, vllm; did you mean "replicas"?'
        ],
    ),
    (
        "unknown key at the top",
        [("policies:", "policy:")],
        [
            'run.yaml:19: policy: unknown key; expected one of budget, checkpoints, cloud, grpo, metrics_port, name, notify, policies, rehearse, rollout, secrets, storage, trainer; did you mean "policies"?'
        ],
    ),
    (
        "workdir is no key of the file",
        [("storage: ./run", "storage: ./run\nworkdir: /tmp")],
        [
            "run.yaml:3: workdir: unknown key; expected one of budget, checkpoints, cloud, grpo, metrics_port, name, notify, policies, rehearse, rollout, secrets, storage, trainer"
        ],
    ),
    (
        "wrong type",
        [("max_steps: 40", "max_steps: forty")],
        ["run.yaml:8: grpo.max_steps: expected a whole number, got 'forty'"],
    ),
    (
        "quoted number",
        [("learning_rate: 2e-3", 'learning_rate: "2e-3"')],
        ["run.yaml:12: grpo.learning_rate: expected a number, got '2e-3'; take the quotes away"],
    ),
    (
        "a boolean of YAML 1.1",
        [("enforce-eager: true", "enforce-eager: yes")],
        [
            "run.yaml:17: rollout.vllm.enforce-eager: expected true or false, got 'yes'; write true or false, without quotes"
        ],
    ),
    (
        "several at once, in the order of lines",
        [("name: demo", "name: Demo!"), ("limit: 0.5", "limit: 0"), ("max_steps: 40", "max_steps: 0")],
        [
            "run.yaml:1: name: 'Demo!' cannot be part of a machine's name; expected 1 to 40 lower-case letters, digits and dashes, no dash at either end",
            "run.yaml:8: grpo.max_steps: expected at least 1, or -1 to train num_train_epochs; got 0",
            "run.yaml:20: policies.kl.limit: expected more than 0, got 0",
        ],
    ),
    (
        "a name that ends with its line",
        [("name: demo", 'name: "demo\\n"')],
        [
            "run.yaml:1: name: 'demo\\n' cannot be part of a machine's name; expected 1 to 40 lower-case letters, digits and dashes, no dash at either end",
        ],
    ),
    (
        "more of a GPU's memory than there is",
        [("enforce-eager: true", "gpu-memory-utilization: 1.5")],
        ["run.yaml:17: rollout.vllm.gpu-memory-utilization: expected at most 1, got 1.5"],
    ),
    (
        "none of a GPU's memory",
        [("enforce-eager: true", "gpu_memory_utilization: 0")],
        ["run.yaml:17: rollout.vllm.gpu_memory_utilization: expected more than 0, got 0"],
    ),
    (
        "no time for rewards",
        [("limit: 0.5}", "limit: 0.5}\n  reward_timeout_s: 0")],
        ["run.yaml:21: policies.reward_timeout_s: expected more than 0, got 0"],
    ),
    (
        "more time for rewards than a clock has",
        [("limit: 0.5}", "limit: 0.5}\n  reward_timeout_s: 1e12")],
        ["run.yaml:21: policies.reward_timeout_s: expected at most 1e+09, got 1e+12"],
    ),
    (
        "missing keys",
        [("  model: ./model\n", ""), ("name: demo\n", "")],
        [
            "run.yaml:1: name: missing; expected a name for the run, in lower-case letters, digits and dashes",
            "run.yaml:2: trainer.model: missing; expected a model's name on the hub, or a folder",
        ],
    ),
    (
        "a key twice",
        [(GRPO, "  beta: 0.02\n  num_generations: 4")],
        ["run.yaml:15: grpo.num_generations: given twice, first on line 10; remove one of the two"],
    ),
    (
        "batch not divisible by the group",
        [("per_device_train_batch_size: 32", "per_device_train_batch_size: 1\n  gradient_accumulation_steps: 4")],
        [
            "run.yaml:11: grpo.num_generations: the generation batch, 4 = 1 x 4, is not divisible by num_generations, 8; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) to be a multiple of 8"
        ],
    ),
    (
        "batch of several processes",
        [
            ("num_generations: 8", "num_generations: 5"),
            ("  reward_funcs:", "  accelerate: {num_processes: 3}\n  reward_funcs:"),
        ],
        [
            "run.yaml:11: grpo.num_generations: the generation batch, 96 = 96 x 1, is not divisible by num_generations, 5; expected per_device_train_batch_size x steps_per_generation (default gradient_accumulation_steps) to be a multiple of 5"
        ],
    ),
    (
        "generation batch that no steps make",
        [(GRPO, "  beta: 0.02\n  generation_batch_size: 40")],
        [
            "run.yaml:15: grpo.generation_batch_size: 40 is not divisible by per_device_train_batch_size x processes, 32; expected a multiple of 32"
        ],
    ),
    (
        "both batch keys",
        [(GRPO, "  beta: 0.02\n  generation_batch_size: 32\n  steps_per_generation: 1")],
        [
            "run.yaml:16: grpo.steps_per_generation: TRL takes this or generation_batch_size, not both; remove one",
        ],
    ),
    (
        "one completion is no group",
        [("num_generations: 8", "num_generations: 1")],
        ["run.yaml:10: grpo.num_generations: expected at least 2, got 1"],
    ),
    (
        "KL limit with beta 0",
        [("beta: 0.02", "beta: 0")],
        [
            "run.yaml:14: grpo.beta: expected more than 0, as policies.kl.limit is set and TRL computes no kl at 0; remove one of the two"
        ],
    ),
    (
        "KL limit without beta",
        [("  beta: 0.02\n", "")],
        [
            "run.yaml:19: policies.kl.limit: needs grpo.beta above 0: at TRL's default of 0.0 no kl is computed; set e.g. grpo.beta: 0.02"
        ],
    ),
    (
        "a bare number for the KL policy",
        [("{limit: 0.5}", "0.5")],
        ["run.yaml:20: policies.kl: expected a mapping with the keys limit, action, on_rollback, budget, got 0.5"],
    ),
    (
        "an action that there is not",
        [("{limit: 0.5}", "{action: roll_back}")],
        [
            "run.yaml:20: policies.kl.action: expected one of rollback, pause, alert, got 'roll_back'; did you mean \"rollback\"?"
        ],
    ),
    (
        "a rollback that would make it worse",
        [
            (
                "{limit: 0.5}",
                "{on_rollback: {beta_factor: 0.9, epsilon_factor: 1.1, learning_rate_factor: 2, skip_prompts: yes}}",
            )
        ],
        [
            "run.yaml:20: policies.kl.on_rollback.skip_prompts: expected true or false, got 'yes'; write true or false, without quotes",
            "run.yaml:20: policies.kl.on_rollback.beta_factor: expected at least 1, got 0.9",
            "run.yaml:20: policies.kl.on_rollback.epsilon_factor: expected at most 1, got 1.1",
            "run.yaml:20: policies.kl.on_rollback.learning_rate_factor: expected at most 1, got 2",
        ],
    ),
    (
        "factors of nothing",
        [("{limit: 0.5}", "{on_rollback: {epsilon_factor: 0, learning_rate_factor: 0.0}}")],
        [
            "run.yaml:20: policies.kl.on_rollback.epsilon_factor: expected more than 0, got 0",
            "run.yaml:20: policies.kl.on_rollback.learning_rate_factor: expected more than 0, got 0",
        ],
    ),
    (
        "a budget below nothing",
        [("{limit: 0.5}", "{budget: {total: -1, recent: 0, recent_steps: 0}}")],
        [
            "run.yaml:20: policies.kl.budget.total: expected at least 0, got -1",
            "run.yaml:20: policies.kl.budget.recent: expected at least 1, got 0",
            "run.yaml:20: policies.kl.budget.recent_steps: expected at least 1, got 0",
        ],
    ),
    (
        "save between two generations",
        [(GRPO, "  beta: 0.02\n  num_iterations: 4\n  save_steps: 10")],
        [
            "run.yaml:16: grpo.save_steps: 10 is no multiple of 4, the optimizer steps that share one generation: between them no checkpoint resumes exactly; expected e.g. 12"
        ],
    ),
    (
        "save steps as a share",
        [(GRPO, "  beta: 0.02\n  save_steps: 1.5")],
        ["run.yaml:15: grpo.save_steps: expected a whole number of steps, got 1.5"],
    ),
    (
        "key that the run sets",
        [(GRPO, "  beta: 0.02\n  output_dir: out\n  use_vllm: true")],
        [
            "run.yaml:15: grpo.output_dir: cannot be set, remove it: checkpoints go to `storage` and are restored from there",
            "run.yaml:16: grpo.use_vllm: cannot be set, remove it: completions come through the gateway",
        ],
    ),
    (
        "key that TRL has removed",
        [(GRPO, "  beta: 0.02\n  max_prompt_length: 128")],
        [
            "run.yaml:15: grpo.max_prompt_length: TRL has removed it; filter long prompts out of the dataset, and let rollout.vllm.max-model-len bound prompt and completion together"
        ],
    ),
    (
        "unknown foreign keys",
        [(GRPO, "  beta: 0.02\n  num_generation: 8"), ("max-model-len", "max-modellen")],
        [
            'run.yaml:15: grpo.num_generation: unknown key, not one of GRPOConfig\'s (TRL 1.16.0); did you mean "num_generations"?',
            'run.yaml:18: rollout.vllm.max-modellen: unknown key, not one of the flags of `vllm serve` (vLLM 0.32.0); did you mean "max-model-len"?',
        ],
    ),
    (
        "choice",
        [(GRPO, "  beta: 0.02\n  loss_type: drgrpo")],
        [
            "run.yaml:15: grpo.loss_type: expected one of bnpo, cispo, dapo, dr_grpo, grpo, luspo, sapo, vespo, got 'drgrpo'; did you mean \"dr_grpo\"?"
        ],
    ),
    (
        "vLLM flags that the node sets, in any spelling",
        [("max-model-len: 256", "api_key: x, host: 0.0.0.0")],
        [
            "run.yaml:17: rollout.vllm.api_key: cannot be set, remove it: every node is given its own, from the run's own secret",
            "run.yaml:17: rollout.vllm.host: cannot be set, remove it: every node is given its own",
        ],
    ),
    (
        "one flag in two spellings",
        [("max-model-len: 256", "max-model-len: 256, max_model_len: 512")],
        ["run.yaml:17: rollout.vllm.max_model_len: given twice, in two spellings; keep max-model-len"],
    ),
    (
        "no room for a prompt",
        [("max_completion_length: 16", "max_completion_length: 256")],
        [
            "run.yaml:17: rollout.vllm.max-model-len: 256 leaves no room for a prompt: grpo.max_completion_length is 256; expected more than that"
        ],
    ),
    (
        "guessed tokens, and completions that go on elsewhere",
        [("max-model-len: 256", "max-model-len: 256, spec-method: ngram")],
        [
            "run.yaml:17: rollout.vllm.spec-method: speculative decoding draws by what it guessed, so no completion can go on at another node; expected rollout.recovery: exact with it"
        ],
    ),
    (
        "evaluation without data",
        [(GRPO, "  beta: 0.02\n  eval_steps: 10")],
        [
            "run.yaml:15: grpo.eval_steps: set, but there is nothing to score; set trainer.eval_dataset or remove this key"
        ],
    ),
    (
        "one seed for all completions",
        [(GRPO, "  beta: 0.02\n  generation_kwargs:\n    seed: 1")],
        [
            "run.yaml:16: grpo.generation_kwargs.seed: each completion has a seed of its own, derived from grpo.seed; remove this one"
        ],
    ),
    (
        "files of the wrong kind",
        [("./model", "rewards.py"), ("dataset: prompts.jsonl", "dataset: {path: rewards.py}")],
        [
            "run.yaml:4: trainer.model: {folder}/rewards.py is a file; expected a folder",
            "run.yaml:5: trainer.dataset.path: {folder}/rewards.py is a file; expected a folder or a file that ends in .json, .jsonl, .csv, .parquet, .json.gz, .jsonl.gz, .csv.gz",
        ],
    ),
    (
        "evaluation in batches that hold no groups",
        [
            ("  reward_funcs:", "  eval_dataset: prompts.jsonl\n  reward_funcs:"),
            (GRPO, "  beta: 0.02\n  per_device_eval_batch_size: 4\n  eval_steps: 10"),
        ],
        [
            "run.yaml:16: grpo.per_device_eval_batch_size: the evaluation batch, 4 (grpo.per_device_eval_batch_size), is not divisible by num_generations, 8; expected a multiple of 8",
        ],
    ),
    (
        "adapter keys",
        [("  reward_funcs:", "  peft: {rank: 8, r: 0, lora_alpha: x, peft_type: LORA}\n  reward_funcs:")],
        [
            "run.yaml:6: trainer.peft.rank: unknown key, not one of LoraConfig's (PEFT 0.21.2)",
            "run.yaml:6: trainer.peft.lora_alpha: expected a whole number, got 'x'",
            "run.yaml:6: trainer.peft.peft_type: cannot be set, remove it: adapters are LoRA",
            "run.yaml:6: trainer.peft.r: expected at least 1, got 0",
        ],
    ),
    (
        "resources",
        [
            (
                "  replicas: 2",
                "  replicas: 2\n  resources:\n    accelerator: L4\n    ports: 8000\n    any_of:\n      - {zon: a}",
            )
        ],
        [
            'run.yaml:18: rollout.resources.accelerator: unknown key, not one of SkyPilot\'s resources keys (0.14.1); did you mean "accelerators"?',
            "run.yaml:19: rollout.resources.ports: ports stay closed: nodes reach each other without; leave it out",
            'run.yaml:21: rollout.resources.any_of[0].zon: unknown key, not one of SkyPilot\'s resources keys (0.14.1); did you mean "zone"?',
        ],
    ),
    (
        "an engine that its node cannot hold",
        [
            (
                "  replicas: 2",
                "  replicas: 2\n  resources:\n    accelerators: H100:2",
            ),
            ("max-model-len: 256", "max-model-len: 256, tensor-parallel-size: 4"),
        ],
        [
            "run.yaml:18: rollout.resources.accelerators: a node has 2 GPUs, and with these rollout.vllm flags its engine takes 4; expected at least as many",
        ],
    ),
    (
        "GPUs divided by hand",
        [("OMP_NUM_THREADS: 1", "CUDA_VISIBLE_DEVICES: 1")],
        [
            "run.yaml:18: rollout.env.CUDA_VISIBLE_DEVICES: each node is given its own GPUs; remove this, and say how many in resources.accelerators",
        ],
    ),
    (
        "replicas",
        [("replicas: 2", "replicas: {min: 4, max: 3}")],
        ["run.yaml:16: rollout.replicas.min: 4 is more than max, 3; expected min <= max"],
    ),
    (
        "fewer replicas than none",
        [("replicas: 2", "replicas: -1"), (DROP, "")],
        ["run.yaml:16: rollout.replicas: expected at least 0, got -1"],
    ),
    (
        "perhaps no replica",
        [("replicas: 2", "replicas: {min: 0, max: 2}")],
        [
            "run.yaml:16: rollout.replicas.min: a run with rollout nodes needs one at least; expected 1 or more, or replicas: 0"
        ],
    ),
    (
        "no nodes, and what only they do",
        [
            ("replicas: 2", "replicas: 0"),
            (GRPO, f"{GRPO}\n  generation_kwargs: {{best_of: 2}}"),
            ("  reward_funcs", "  accelerate: {num_processes: 2, fsdp_config: {fsdp_version: 2}}\n  reward_funcs"),
        ],
        [
            "run.yaml:6: trainer.accelerate.num_processes: with rollout.replicas: 0 one process trains and generates; expected 1, got 2",
            "run.yaml:6: trainer.accelerate.fsdp_config: with rollout.replicas: 0 one process holds the whole model to generate; remove it",
            "run.yaml:16: grpo.generation_kwargs: vLLM's, and with rollout.replicas: 0 the trainer generates; remove it",
            "run.yaml:25: rehearse.faults[0].kill: there are no rollout nodes: rollout.replicas is 0",
            "run.yaml:26: rehearse.faults[1].preempt: there are no rollout nodes: rollout.replicas is 0",
            "run.yaml:28: rehearse.faults[3].no_capacity: there are no rollout nodes: rollout.replicas is 0",
        ],
    ),
    (
        "no nodes, and more GPUs than generate",
        [
            ("replicas: 2", "replicas: 0"),
            (GRPO, f"{GRPO}\n  fsdp: full_shard"),
            ("  reward_funcs", "  resources: {accelerators: 'H100:2'}\n  reward_funcs"),
            (DROP, ""),
        ],
        [
            "run.yaml:6: trainer.resources.accelerators: with rollout.replicas: 0 one process trains and generates; expected 1, got 2",
            "run.yaml:16: grpo.fsdp: with rollout.replicas: 0 one process holds the whole model to generate; remove it",
        ],
    ),
    (
        "replicas of another type",
        [("replicas: 2", "replicas: two")],
        ["run.yaml:16: rollout.replicas: expected a whole number or a mapping with the keys min, max, got 'two'"],
    ),
    (
        "environment",
        [("OMP_NUM_THREADS: 1", "OMP_NUM_THREADS: [1]")],
        ["run.yaml:18: rollout.env.OMP_NUM_THREADS: expected text, got a list"],
    ),
    (
        "a store's URL without its slashes",
        [("storage: ./run", "storage: s3:/bucket/run")],
        ["run.yaml:2: storage: neither a folder nor a URL; expected s3:// and what follows"],
    ),
    (
        "a store's URL without its scheme",
        [("storage: ./run", "storage: //bucket/run")],
        ["run.yaml:2: storage: nothing stands before //; expected a folder or a URL, as in s3://bucket/my-run"],
    ),
    (
        "no URL at all before the slashes",
        [("storage: ./run", "storage: my bucket://run")],
        [
            "run.yaml:2: storage: what stands before :// is no URL scheme; expected a folder or a URL, as in s3://bucket/my-run"
        ],
    ),
    (
        "a store that ends with its process",
        [("storage: ./run", "storage:\n  url: memory://run")],
        [
            "run.yaml:3: storage.url: memory:// ends with its process; expected a folder or a URL, as in s3://bucket/my-run"
        ],
    ),
    (
        "a secret in the URL",
        [("storage: ./run", "storage: sftp://user:hunter2@host/run")],
        [
            "run.yaml:2: storage: a password in the URL would be stored with the run; expected it among storage.options"
        ],
    ),
    (
        "storage as a list",
        [("storage: ./run", "storage: [s3://bucket/run]")],
        [
            "run.yaml:2: storage: expected a folder or a URL, as in s3://bucket/my-run, or a mapping with the keys url, options"
        ],
    ),
    (
        "storage as a mapping",
        [
            (
                "storage: ./run",
                "storage:\n  ulr: s3://bucket/run\n  options:\n    region: [eu-west-1]\n    endpoint:",
            )
        ],
        [
            "run.yaml:2: storage.url: missing; expected a folder or a URL, as in s3://bucket/my-run",
            'run.yaml:3: storage.ulr: unknown key; expected one of options, url; did you mean "url"?',
            "run.yaml:5: storage.options.region: expected text, a number, true or false",
            "run.yaml:6: storage.options.endpoint: expected text, a number, true or false",
        ],
    ),
    (
        "checkpoints",
        [
            (
                "policies:\n",
                "checkpoints:\n  keep_lats: 2\n  keep_last: 0\n  keep_every_steps: 0\n  spool: shm\n  spool_gib: 0\n"
                "  max_behind_steps: 49\npolicies:\n",
            )
        ],
        [
            'run.yaml:20: checkpoints.keep_lats: unknown key; expected one of keep_every_steps, keep_last, keep_rollouts_every_steps, max_behind_steps, spool, spool_gib; did you mean "keep_last"?',
            "run.yaml:21: checkpoints.keep_last: expected at least 1, got 0",
            "run.yaml:22: checkpoints.keep_every_steps: expected at least 1, got 0",
            "run.yaml:23: checkpoints.spool: expected a whole path, for it is a folder of the trainer's machine; got 'shm'",
            "run.yaml:24: checkpoints.spool_gib: expected more than 0, got 0",
            "run.yaml:25: checkpoints.max_behind_steps: less than grpo.save_steps, 50: training would wait for what is not due yet; expected at least that, got 49",
        ],
    ),
    (
        "checkpoints of another type",
        [("policies:\n", "checkpoints: {keep_last: '3', spool_gib: all}\npolicies:\n")],
        [
            "run.yaml:19: checkpoints.keep_last: expected a whole number, got '3'; take the quotes away",
            "run.yaml:19: checkpoints.spool_gib: expected a number or null, got 'all'",
        ],
    ),
    (
        "checkpoints as TRL counts them",
        [(GRPO, "  beta: 0.02\n  save_total_limit: 2\n  load_best_model_at_end: true\n  save_only_model: true")],
        [
            "run.yaml:15: grpo.save_total_limit: cannot be set, remove it: the machine's disk keeps none; how many the store keeps is checkpoints.keep_last",
            "run.yaml:16: grpo.load_best_model_at_end: cannot be set, remove it: the machine's disk keeps none to load; see checkpoints for those that stay",
            "run.yaml:17: grpo.save_only_model: cannot be set, remove it: such a checkpoint cannot be resumed",
        ],
    ),
    (
        "a folder as the store of many machines, and a rehearsal there",
        [("storage: ./run", "storage: ./run\ncloud: sky")],
        [
            "run.yaml:2: storage: a folder is on this machine only; with cloud: sky, expected s3://, gs:// or az://",
            "run.yaml:22: rehearse: faults are rehearsed on the local cloud alone; set cloud: local or remove this section",
        ],
    ),
    (
        "cloud",
        [("storage: ./run", "storage: ./run\ncloud: aws"), (DROP, "")],
        ["run.yaml:3: cloud: expected one of local, sky, got 'aws'"],
    ),
    (
        "reward function",
        [
            (
                "[rewards.digit_share]",
                "\n    - rewards.digit_shar\n    - reward.x\n    - digit_share\n    - rewards.no_room\n    - trl.rewards.x",
            )
        ],
        [
            'run.yaml:7: trainer.reward_funcs[0]: rewards.py defines no digit_shar; expected a function of that name; did you mean "digit_share"?',
            "run.yaml:8: trainer.reward_funcs[1]: no module reward in {folder} or the installed packages; expected a file reward.py, or its package in trainer.setup",
            "run.yaml:9: trainer.reward_funcs[2]: expected an import path, module.function, got 'digit_share'",
            "run.yaml:10: trainer.reward_funcs[3]: no_room cannot be called by TRL, which passes completion_ids too; give it a **kwargs parameter",
            'run.yaml:11: trainer.reward_funcs[4]: TRL ships no such reward function; did you mean "trl.rewards.accuracy_reward"?',
        ],
    ),
    (
        "arguments of reward functions",
        [
            (
                "reward_funcs: [rewards.digit_share]",
                "reward_funcs: [tasks.rewards.xml_format, tasks.rewards.json_schema, tasks.rewards.xml]\n"
                "  reward_args:\n    xml_format: {tag: [a]}\n    json_schema: {shema: {}}\n    xml_formats: {}\n    xml: 5",
            )
        ],
        [
            "run.yaml:6: trainer.reward_funcs[2]: __init__.py defines no xml; expected a function of that name",
            'run.yaml:8: trainer.reward_args.xml_format: xml_format takes no argument `tag`; did you mean "tags"?',
            'run.yaml:9: trainer.reward_args.json_schema: json_schema takes no argument `shema`; did you mean "schema"?',
            'run.yaml:10: trainer.reward_args.xml_formats: no such function in trainer.reward_funcs; did you mean "xml_format"?',
        ],
    ),
    (
        "no reward function",
        [("[rewards.digit_share]", "[]")],
        ["run.yaml:6: trainer.reward_funcs: expected at least one import path, as in rewards.my_reward"],
    ),
    (
        "reward models",
        [("[rewards.digit_share]", "[./judge, org/judge]")],
        [
            "run.yaml:6: trainer.reward_funcs[0]: no such file or folder: {folder}/judge; relative paths start at the folder of this file"
        ],
    ),
    (
        "turns",
        [
            (
                "  reward_funcs: [rewards.digit_share]",
                "  reward_funcs: []\n  tools: rewards.digit_shar\n  environment_factory: Ladder\n  rollout_func: rolls.out",
            ),
            ("max_completion_length: 16", "max_completion_length: 128"),
        ],
        [
            'run.yaml:7: trainer.tools: rewards.py defines no digit_shar; expected a function of that name; did you mean "digit_share"?',
            "run.yaml:8: trainer.environment_factory: expected an import path, module.function, got 'Ladder'",
            "run.yaml:9: trainer.rollout_func: no module rolls in {folder} or the installed packages; expected a file rolls.py, or its package in trainer.setup",
            "run.yaml:20: rollout.vllm.max-model-len: 256 leaves no room for another turn, whose prompt holds the turns before it; expected more than twice grpo.max_completion_length, 128",
        ],
    ),
    (
        "a loss and a correction that is not for it",
        [(GRPO, f"{GRPO}\n  loss_type: vespo")],
        [
            "run.yaml:15: grpo.loss_type: vespo needs vllm_importance_sampling_mode token_truncate or token_mask, and it is sequence_mask; set one of them"
        ],
    ),
    (
        "a base model in four bits",
        [(GRPO, f"{GRPO}\n  model_init_kwargs: {{load_in_4bit: true}}")],
        [
            "run.yaml:15: grpo.model_init_kwargs: a quantised model cannot be published to rollout nodes; expected the model as it was before, with adapters (trainer.peft) to save memory"
        ],
    ),
    (
        "what a restart would not come through",
        [(GRPO, f"{GRPO}\n  ignore_data_skip: true\n  push_to_hub: true")],
        [
            "run.yaml:15: grpo.ignore_data_skip: cannot be set, remove it: a restart would train on other prompts than the next ones",
            "run.yaml:16: grpo.push_to_hub: cannot be set, remove it: weights go to `storage`; `grpo-orch export` writes them as from_pretrained reads them, ready to be pushed",
        ],
    ),
    (
        "an item of a list",
        [("[rewards.digit_share]", "[rewards.digit_share, 5]")],
        ["run.yaml:6: trainer.reward_funcs: expected a list of texts, got a list with 5"],
    ),
    (
        "weights of another number",
        [(GRPO, "  beta: 0.02\n  reward_weights: [1.0, 0.5]")],
        ["run.yaml:15: grpo.reward_weights: expected one weight for each of 1 reward_funcs, got 2"],
    ),
    (
        "files that are not there",
        [("./model", "./modell"), ("dataset: prompts.jsonl", "dataset: prompt.jsonl")],
        [
            "run.yaml:4: trainer.model: no such file or folder: {folder}/modell; relative paths start at the folder of this file",
            "run.yaml:5: trainer.dataset: no such file or folder: {folder}/prompt.jsonl; relative paths start at the folder of this file",
        ],
    ),
    (
        "faults",
        [
            ("{at_step: 5, kill: rollout-0}", "{at_step: 5, kil: rollout-0}"),
            ("kill: daemon, for_s: 3", "kill: deamon, for_s: 3"),
            ("preempt: rollout-1, notice_s: 5", "preempt: rollout-2, notice_s: 5"),
            ("{at_step: 14, no_capacity: rollouts", "{at_step: 40, no_capacity: rollouts"),
        ],
        [
            'run.yaml:23: rehearse.faults[0]: expected exactly one of kill, preempt, no_capacity in a fault; did you mean "kill"?',
            "run.yaml:24: rehearse.faults[1].preempt: there is no rollout-2; the last is rollout-1, by rollout.replicas.max",
            "run.yaml:25: rehearse.faults[2].for_s: unknown key; expected one of at_step, kill",
            "run.yaml:25: rehearse.faults[2].kill: expected one of rollout-N, rollouts, trainer, trainer-0, gateway, daemon, got 'deamon'; did you mean \"daemon\"?",
            "run.yaml:26: rehearse.faults[3].at_step: never comes: the run ends with step 40 (grpo.max_steps); expected at most 39",
        ],
    ),
    (
        "prices",
        [
            ("spot_usd_per_h: 0.4", "spot: 0.4"),
            ("usd_per_h: 4.1", "usd_per_h: -1"),
            ("at_step: 5,", "at_step: x,"),
        ],
        [
            "run.yaml:23: rehearse.faults[0].at_step: expected a whole number, got 'x'",
            "run.yaml:28: rehearse.prices.trainer.on_demand_usd_per_h: expected at least 0, got -1",
            "run.yaml:29: rehearse.prices.rollout.spot: unknown key; expected one of on_demand_usd_per_h, spot_usd_per_h",
        ],
    ),
    (
        "what JSON cannot hold",
        [("learning_rate: 2e-3", "learning_rate: .nan"), ("max_steps: 40", "max_steps: 99999999999999999999")],
        [
            "run.yaml:8: grpo.max_steps: expected a number of at most 64 bits, got 99999999999999999999",
            "run.yaml:12: grpo.learning_rate: expected a finite number, got .nan",
        ],
    ),
    (
        "not YAML",
        [("trainer:\n", "trainer: [\n")],
        [
            "run.yaml:5: not YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ],
    ),
    (
        "tags and merges",
        [("name: demo", "name: !!python/name:os.system x"), (GRPO, "  beta: 0.02\n  <<: {a: 1}")],
        [
            "run.yaml:1: name: the tag python/name:os.system is not read; expected a plain value",
            "run.yaml:15: grpo: only plain keys are read, no merge (<<); write the keys out",
        ],
    ),
]


@pytest.mark.parametrize(("changes", "lines"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], lines: list[str]
) -> None:
    furnish(tmp_path)
    (tmp_path / "run.yaml").write_text(changed(*changes))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_spec(Path("run.yaml"))
    assert str(caught.value).splitlines() == [line.replace("{folder}", str(tmp_path)) for line in lines]
    assert [str(problem) for problem in caught.value.problems] == str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "run.yaml:1: the file is empty; expected name, storage, trainer, grpo; "),
        (b"- a\n", "run.yaml:1: the file is not a mapping; expected name, storage, trainer, grpo; "),
        (b"name: \xff\n", "run.yaml:1: not UTF-8; expected text, saved as UTF-8"),
        (b"a: 1\nb: \x07\n", "run.yaml:2: not YAML: a control character"),
        (b'a: "\\U99999999"\n', "run.yaml: not YAML: "),
        (
            b"a: 1\n---\nb: 2\n",
            "run.yaml:2: not YAML: expected a single document in the stream, but found another",
        ),
        (b"a: " + b"[" * 100 + b"]" * 100, "run.yaml:1: too deep or too large; "),
        (b"a: " + b"[" * 5000, "run.yaml: not YAML: "),
        (b"a: &a [*a]\n", "run.yaml:1: too deep or too large; "),
        (b'name: "\\ud800"\n', "run.yaml:1: name: not valid Unicode: half of a surrogate pair"),
        (b'"a\\nb": 1\n', "run.yaml:1: a\\nb: unknown key; "),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, line: str
) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_spec(Path("run.yaml"))
    assert any(said.startswith(line) for said in str(caught.value).splitlines()), str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "hunter2",
        "[hunter2]",
        "{access_key: [hunter2]}",
        "{access_key: hunter2, access_key: other}",
        "{access_key: !!int hunter2}",
        "{access_key: !hunter2 x}",
        "{access_key: !hunter2!x y}",
        "{access_key: *hunter2}",
        "{access_key: &hunter2 x, other: &hunter2 y}",
        "{access_key: 'hunter2",
        '{access_key: "hunter2\\ud800"}',
        "!!float hunter2",
    ],
)
def test_no_message_quotes_a_secret(tmp_path: Path, options: str) -> None:
    furnish(tmp_path)
    storage = f"storage:\n  url: s3://bucket/run\n  options: {options}\n"
    for text in (changed(("storage: ./run\n", storage)), storage):
        (tmp_path / "run.yaml").write_text(text)
        for read in (load_spec, load_storage):
            with pytest.raises(ConfigError) as caught:
                read(tmp_path / "run.yaml")
            assert "storage.options" in str(caught.value) or "not YAML" in str(caught.value)
            assert "hunter2" not in str(caught.value)


def test_machines_of_a_cloud_get_nothing_from_beside_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run_yaml = furnish(tmp_path / "run")
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").write_text("")
    elsewhere = [
        ("./model", "./a/../../model"),
        ("dataset: prompts.jsonl", "dataset: ../prompts.jsonl"),
        (DROP, ""),
    ]
    run_yaml.write_text(changed(*elsewhere))
    load_spec(run_yaml)
    run_yaml.write_text(changed(("storage: ./run", "storage: s3://bucket/run\ncloud: sky"), *elsewhere))
    with pytest.raises(ConfigError) as caught:
        load_spec(run_yaml)
    why = "is outside the folder of this file, and machines get a copy of no other; expected a path below it"
    assert str(caught.value).splitlines() == [
        f"{run_yaml}:5: trainer.model: ./a/../../model {why}",
        f"{run_yaml}:6: trainer.dataset: ../prompts.jsonl {why}",
    ]


SHARDED = "a reference model in shards ({}) does not survive a restart; expected ZeRO stage 0 to 2, or DDP"


@pytest.mark.parametrize(
    ("trainer", "grpo", "said"),
    [
        ("accelerate: {distributed_type: MULTI_GPU, num_processes: 2}", "", None),
        ("accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 2}}", "", None),
        (
            "accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}}",
            "",
            SHARDED.format("trainer.accelerate.deepspeed_config, ZeRO stage 3"),
        ),
        (
            "accelerate: {distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_config_file: ds.json}}",
            "",
            SHARDED.format("trainer.accelerate.deepspeed_config, ZeRO stage in a file"),
        ),
        ("accelerate: {distributed_type: FSDP, fsdp_config: {fsdp_version: 2}}", "", SHARDED.format("FSDP")),
        ("", "deepspeed: {zero_optimization: {stage: 1}}", None),
        ("", "deepspeed: {zero_optimization: {stage: 3}}", SHARDED.format("grpo.deepspeed, ZeRO stage 3")),
        (
            "peft: {r: 4}",
            "",
            "adapters are their own reference when they are taken off; remove this one, or trainer.peft",
        ),
    ],
)
def test_a_reference_that_moves_comes_through_a_restart_or_is_refused(
    trainer: str, grpo: str, said: str | None, tmp_path: Path
) -> None:
    run_yaml = furnish(tmp_path)
    more = "".join(f"\n  {line}" for line in ("sync_ref_model: true", grpo) if line)
    changes = [
        (GRPO, f"{GRPO}{more}"),
        ("  reward_funcs", f"  {trainer}\n  reward_funcs" if trainer else "  reward_funcs"),
    ]
    run_yaml.write_text(changed(*changes, (DROP, "")))
    if said is None:
        load_spec(run_yaml)
        return
    with pytest.raises(ConfigError) as caught:
        load_spec(run_yaml)
    assert f"grpo.sync_ref_model: {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("here", "rollout", "said"),
    [
        (0, "replicas: 2", ""),  # a machine without any
        (3, "replicas: 2", ""),
        (2, "replicas: {min: 1, max: 8}", ""),
        (
            2,
            "replicas: 2",
            "this machine has 2 GPUs, and the run takes 3: the trainer 1 and 2 rollout nodes 1 each",
        ),
        (1, "replicas: 1", "this machine has 1 GPU, and the run takes 2: the trainer 1 and 1 rollout node 1 each"),
        (
            4,
            "replicas: 1\n  resources: {accelerators: 'L4:4'}",
            "this machine has 4 GPUs, and the run takes 5: the trainer 1 and 1 rollout node 4 each",
        ),
    ],
)
def test_more_nodes_than_this_machine_has_gpus_for(here: int, rollout: str, said: str, tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(("replicas: 2", rollout), (DROP, "")))
    if not said:
        load(run_yaml, lambda: here)
        return
    with pytest.raises(ConfigError) as caught:
        load(run_yaml, lambda: here)
    where = "run.yaml:16: rollout.replicas"
    assert str(caught.value).endswith(f"{where}: {said}; see `resources.accelerators` of both")


@pytest.mark.parametrize("asks", [True, False])
def test_a_driver_that_fails_is_told_where_it_matters(asks: bool, tmp_path: Path) -> None:
    def fails() -> int:
        raise DriverFailed("nvidia-smi ends with exit code 9: no driver")

    run_yaml = furnish(tmp_path)
    resources = "replicas: 1\n  resources: {accelerators: 'L4:4'}" if asks else "replicas: 1"
    run_yaml.write_text(changed(("replicas: 2", resources), (DROP, "")))
    if not asks:
        said = [one.message for one in load(run_yaml, fails).notices]
        assert "nvidia-smi ends with exit code 9: no driver, so this machine counts as one without GPUs" in said
        return
    with pytest.raises(
        ConfigError, match=r"17: rollout\.resources\.accelerators: nvidia-smi ends with exit code 9"
    ):
        load(run_yaml, fails)


def test_a_cloud_has_the_gpus_that_this_machine_lacks(tmp_path: Path) -> None:
    run_yaml = furnish(tmp_path)
    run_yaml.write_text(changed(("storage: ./run", "storage: s3://runs/demo\ncloud: sky"), (DROP, "")))
    load(run_yaml, lambda: 1)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml: no such file; `grpo-orch init` writes one"):
        load_spec(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        load_spec(tmp_path)


def test_aliases_do_not_blow_up(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join(rows))
    with pytest.raises(ConfigError, match="too deep or too large"):
        load_spec(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ("json.py", "Python's own `json`"),
        ("datasets.py", "the library `datasets`"),
        ("tasks/__init__.py", "grpo-orch's own `tasks`"),
    ],
)
def test_a_module_beside_the_file_that_hides_another(tmp_path: Path, made: str, says: str) -> None:
    furnish(tmp_path)
    for harmless in ("test.py", "datasets/rows.jsonl", made):
        (tmp_path / harmless).parent.mkdir(exist_ok=True)
        (tmp_path / harmless).write_text("")
    (tmp_path / "run.yaml").write_text(VALID)
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path / "run.yaml")
    (problem,) = caught.value.problems
    assert problem.key == "trainer"
    assert problem.message == f"{made.partition('/')[0]} beside this file takes the place of {says}; rename it"

"""Start vLLM's server with fewer garbage collections: `python -m grpo_orch.tasks.rollout.vllm.api_server FLAG...`.

It runs the same code as `python -m vllm.entrypoints.openai.api_server`. During vLLM's imports Python's collector
repeatedly scans objects that stay, which takes a fifth of the CPU time. The engine's process imports the main
module, too; if that were the API server, it would import all of it.
"""

import gc
import runpy

gc.set_threshold(100_000, 50, 1000)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

"""vLLM's server as `python -m vllm.entrypoints.openai.api_server` starts it:
`python -m tasks.rollout.vllm.main FLAG...`.

While vLLM's modules are imported, Python's collector looks again and again through what will stay: a fifth of the
CPU time. The engine's process, which imports this module too before it begins, would import the API server as well
if that were the main module.
"""

import gc
import runpy

gc.set_threshold(100_000, 50, 1000)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

"""`python -m grpo_orch`: the same as `grpo-orch`."""

from grpo_orch.orchestrator.cli import main

if __name__ == "__main__":
    main()

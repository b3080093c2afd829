"""`python -m orchestrator`: the same as `grpo-orch`."""

from orchestrator.cli import main

if __name__ == "__main__":
    main()

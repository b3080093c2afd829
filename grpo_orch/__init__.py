"""Everything that is installed has this one name, so no module of a user's is hidden by one of ours.

The packages are links to the folders of the checkout: `grpo_orch.tasks` is `tasks/`. Users import
`grpo_orch.rewards`.
"""

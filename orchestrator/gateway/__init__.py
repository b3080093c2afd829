"""The gateway: has completions made by the rollout nodes that hold the wanted policy, and by nobody else.

`surface` is what it answers over HTTP: a trainer's batch or an OpenAI request becomes jobs (`job`). `routing`
finds a place on a member for each job, by the table of `policies.serving.membership`, moves it when the member
fails or another would be better, and notices silence. `nodes` speaks with one member: an `attempt` at a job goes
out (`upstream`) over a `link` and its `connection`, and hears vLLM's `events`. `__main__` is the process.

What is said over HTTP is in `policies.serving.wire`. The gateway stores nothing but its address and its status:
started anew, it hears from nodes and trainer what it must know.
"""

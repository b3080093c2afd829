"""The gateway: has completions made by the rollout nodes that hold the wanted policy, and by nobody else.

`surface` is what it answers over HTTP: a trainer's batch or an OpenAI request becomes jobs (`job`). `routing` finds
each job its members, by the table of `policies.serving.membership`, and sees it through; it also notices silence.
`nodes` speaks with one member: a job's try (`upstream`) over a `link` and its `connection`, hearing vLLM's `events`.
`__main__` is the process. What is said over HTTP is in `policies.serving.wire`. The gateway keeps nothing on disk but
its address and its status in the run's store: started anew, it hears from nodes and trainer what it must know.
"""

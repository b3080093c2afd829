"""The gateway: has completions made by the rollout nodes that hold the wanted policy, and by nobody else.

`surface` is what it answers over HTTP: a trainer's batch or an OpenAI request becomes jobs (`job`). `routing`
finds members for each job, by the table of `policies.serving.membership`, sees it through, and notices silence.
`nodes` speaks with one member: a try of a job (`upstream`) over a `link` and its `connection`, hearing vLLM's
`events`. `__main__` is the process. What is said over HTTP is in `policies.serving.wire`. The gateway keeps
nothing on disk but its address and its status in the run's store: started anew, it hears from nodes and trainer
what it must know.
"""

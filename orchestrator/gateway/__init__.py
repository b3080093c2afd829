"""The gateway: has completions made by the rollout nodes that hold the wanted policy, and by nobody else.

`app` and what it imports is the HTTP surface. A `batch` or an OpenAI request is made of jobs (`job`). `dispatch`
sees a job through, `members` lends it places by the table of `policies.membership`, `upstream` is one try of it on
one member (`link`) over one `connection`, hearing vLLM's `events`. `watch` notices silence and slow tails.
`__main__` is the process. What is said over HTTP is in `policies.wire`. It keeps nothing on disk but its address
and its status in the run's store: started anew, it hears from nodes and trainer what it must know.
"""

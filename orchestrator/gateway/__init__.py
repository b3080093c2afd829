"""The gateway: sends each completion request to a rollout node that holds the wanted policy.

One request goes through it like this. `surface` turns a trainer's batch or an OpenAI request into jobs (`job`).
`routing` finds a place on a member for each job, by the table of `policies.serving.membership`, and moves the job
when the member fails or another one has less load. `nodes` talks to one member: an attempt at a job goes over the
member's link (`upstream`) and a `connection`. `__main__` is the process.

`policies.serving.wire` defines the HTTP messages. The gateway stores its address, its status and sessions; nodes
and trainer send a restarted gateway everything else.
"""
